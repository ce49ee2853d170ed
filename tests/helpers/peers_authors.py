"""Whole networks of the authors' code against ours: random weights, the same images, logits in float64.

A network gets random weights, which are saved as the authors save theirs and read by timm.create_model(...,
checkpoint_path=file), as a user reads a released file. Their code needs einops.
"""

import importlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import timm
import timm.layers
import torch
from torch import nn

import nalaformer  # noqa: F401  (enters the backbones)

# rotary angles that authors keep in float32 leave 4e-8
TOLERANCE = 1e-7
# owner+repository, and the folder of its models
CHECKOUTS = {
    "polaformer": "ZacharyMeng+PolaFormer/models",
    "flatten": "LeapLabTHU+FLatten-Transformer/models",
    "polaformerpp": "ZacharyMeng+PolaFormerPP/polaformer++/models",
    "rala": "qhfan+RALA/classfication",
    "mala": "qhfan+MALA/classfication_release",
    "nalaformer": "ZacharyMeng+NaLaFormer/NaLaformer",
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A network of the authors and ours of the same name."""

    theirs: Callable[[], nn.Module]
    ours: str
    """In timm."""
    side: int = 224


def compare(folder: Path, chosen: str = "") -> tuple[str, bool]:
    """A table of the networks whose checkouts are in the folder and whose names contain `chosen`; False: one disagrees."""
    bring_old_names()
    rows, missing, agree = [], [], True
    for family, checkout in CHECKOUTS.items():
        place = folder / checkout
        if not place.is_dir():
            missing.append(f"- not compared: {family}, there is no folder {place}")
            continue
        for pair in (pair for pair in PAIRS[family](place) if chosen in pair.ours):
            error = error_of(pair)
            agree &= error < TOLERANCE
            rows.append(f"| {pair.ours} | {pair.side} | {error:.1e}{'' if error < TOLERANCE else ', disagrees'} |")
            print(rows[-1], flush=True)
    title = f"## the authors' networks: {len(rows)} compared (torch {version('torch')}, timm {version('timm')})"
    heading = ["| network | pixels | largest difference over the largest logit |", "|---|---|---|"]
    return "\n".join([title, "", *heading, *rows, "", *missing]), agree


def error_of(pair: Pair) -> float:
    """The largest difference of the logits of two images over the largest logit."""
    # their constructors print
    with redirect_stdout(StringIO()):
        theirs = with_random_weights(pair.theirs())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.pth"
        torch.save({"model": theirs.state_dict()}, file)
        ours = timm.create_model(pair.ours, checkpoint_path=str(file)).double().eval()
    images = torch.randn(2, 3, pair.side, pair.side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs.double()(images), ours(images)
    return ((found - expected).abs().max() / expected.abs().max()).item()


def with_random_weights(model: nn.Module) -> nn.Module:
    """The model in evaluation, every weight and statistic random and of a size at which logits neither vanish nor explode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # tables and vectors move away from where they start, which is often zero or one
            is_weight = parameter.dim() in (2, 4) and parameter.shape[0] > 1
            scale = parameter[0].numel() ** -0.5 if is_weight else 0.1
            parameter.copy_(scale * noise if is_weight else parameter + scale * noise)
        for name, statistic in model.named_buffers():
            if name.endswith("running_mean"):
                statistic.normal_(0, 0.1, generator=generator)
            elif name.endswith("running_var"):
                statistic.uniform_(0.5, 1.5, generator=generator)
    # some of their layers have a train() of their own
    for module in model.modules():
        module.training = False
    return model


def bring_old_names() -> None:
    """What the authors' files import and newer releases lack: names of timm 0.4, and a counter of multiply-adds."""
    layers = {name: getattr(timm.layers, name) for name in dir(timm.layers)}
    for name, members in (
        ("timm.models.layers", layers),
        ("timm.models.registry", {"register_model": lambda function: function}),
        ("fvcore", {}),
        ("fvcore.nn", {"FlopCountAnalysis": None, "flop_count_table": None}),
    ):
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


def module_of(place: Path, name: str) -> Any:
    """A module of a checkout, whose neighbours it may import, and whose package's __init__ is not run."""
    package = types.ModuleType("authors_" + "".join(letter if letter.isalnum() else "_" for letter in str(place)))
    package.__path__ = [str(place)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{name}")


# of their configuration files: linear attention everywhere, or in the first two stages
PVT = {"attn_type": "LLLL", "la_sr_ratios": "1111", "kernel_size": 5}
SWIN = {
    "t": {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]},
    "s": {"embed_dim": 96, "depths": [2, 2, 18, 2], "num_heads": [3, 6, 12, 24]},
    "b": {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]},
}


def pvts(module: Any, theirs: str, ours: str, **options: Any) -> Iterator[Pair]:
    for size in ("tiny", "small", "medium", "large"):
        create = getattr(module, f"{theirs}_{size}")
        yield Pair(theirs=lambda create=create: create(**PVT, **options), ours=f"{ours}_{size[0]}")


def swins(network: Callable[..., nn.Module], ours: str) -> Iterator[Pair]:
    for size, side in (("t", 224), ("s", 224), ("b", 224), ("b", 384)):
        # the window of the linear stages is the whole grid of the first
        options = SWIN[size] | {"img_size": side, "window_size": side // 4, "attn_type": "LLSS", "drop_path_rate": 0}
        yield Pair(
            theirs=lambda options=options: network(**options),
            ours=f"{ours}_{size}" + ("_384" if side == 384 else ""),
            side=side,
        )


def polaformer(place: Path) -> Iterator[Pair]:
    yield from pvts(module_of(place, "pola_pvt"), "pola_pvt", "polaformer_pvt", alpha=4)
    yield from swins(module_of(place, "pola_swin").PolaSwinTransformer, "polaformer_swin")


def flatten(place: Path) -> Iterator[Pair]:
    yield from pvts(module_of(place, "flatten_pvt"), "flatten_pvt", "flatten_pvt", focusing_factor=3)
    yield from swins(module_of(place, "flatten_swin").FLattenSwinTransformer, "flatten_swin")


def named(module: str, pairs: dict[str, str]) -> Callable[[Path], Iterator[Pair]]:
    """Networks whose functions need no arguments: {theirs: ours}."""

    def found(place: Path) -> Iterator[Pair]:
        authors = module_of(place, module)
        return (Pair(theirs=getattr(authors, theirs), ours=ours) for theirs, ours in pairs.items())

    return found


PAIRS: dict[str, Callable[[Path], Iterator[Pair]]] = {
    "polaformer": polaformer,
    "flatten": flatten,
    "polaformerpp": named("pola", {f"POLA_b{number}": f"polaformerpp_b{number}" for number in range(6)}),
    "rala": named("RALA", {f"RAVLT_{size.upper()}": f"ravlt_{size}" for size in "tsbl"}),
    "mala": named("model", {f"MALA_{size.upper()}": f"mavit_{size}" for size in "tsbl"}),
    "nalaformer": named("NALA", {f"NALAFORMER_{size.upper()}": f"nalaformer_{size}" for size in ("xt", "t", "s", "b", "l")}),
}
