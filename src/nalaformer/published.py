"""The authors' released checkpoints: read without running code, translated to our parameter names, and loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .atomic_files import atomic_file
from .published_names import (
    FAMILIES,
    backbone_part,
    is_published_dit,
    is_published_model,
    translate,
    translate_dit,
    warn_about_others,
)
from .registry import unknown_name
from .weight_files import read

if TYPE_CHECKING:
    from .models.diffusion import NaLaDiT
    from .models.vision import Backbone

__all__ = ["FAMILIES", "convert_file", "load", "load_dit", "read", "translate"]


def load(weights: Mapping[str, Tensor] | str | Path, family: str, **config: Any) -> "Backbone":
    """Return the backbone with published weights: a file (see `read`) or a state dict, in the authors' names.

    `config`: fields of models.BackboneConfig in which the model differs from the family's tiny one; the number of classes is
    read off the weights. The published variants have names: timm.create_model("nalaformer_s", checkpoint_path=file) does the
    same. The file of a detector or segmenter gives the backbone without a head; a warning names its other parts.
    """
    from .models.vision import LAYOUTS
    from .models.vision.variants import build_from

    if family not in FAMILIES:
        raise unknown_name("family of published weights", family, FAMILIES)
    if isinstance(weights, str | Path):
        weights = read(weights)
    weights, others = backbone_part(weights)
    warn_about_others(others)
    translated = translate(weights, family)
    config = config_from_weights(translated) | config
    if family in LAYOUTS:
        layout = LAYOUTS[family]
    else:
        layout = LAYOUTS["pvt" if any(name.startswith("block1.") for name in weights) else "swin"]
        config = {"family": family, "attention": family} | config
    model = build_from(layout, **config)
    model.load_state_dict(translated)
    return model.eval()


def load_dit(weights: Mapping[str, Tensor] | str | Path, *, num_heads: int = 0, **config: Any) -> "NaLaDiT":
    """Return the softmax NaLaDiT with published DiT weights: a file (see `read`) or a state dict with DiT's names.

    Sizes are read off the weights. num_heads: 0 if the width is one of DiT-S, B, L or XL. `config`: other arguments of
    NaLaDiT, such as class_names.
    """
    from .models.diffusion import NaLaDiT
    from .models.diffusion.network import SIZES, sin_cos_positions

    if isinstance(weights, str | Path):
        weights = read(weights)
    if not is_published_dit(weights):
        raise ValueError(
            f"weights must be a published DiT's, with x_embedder.proj.weight, got {', '.join(list(weights)[:3])}, ..."
        )
    ours = translate_dit(weights)
    dim, channels, patch_size = ours["patches.weight"].shape[:3]
    heads = num_heads or next((heads for _, width, heads in SIZES.values() if width == dim), 0)
    if not heads:
        raise ValueError(
            f"the heads of a DiT of {dim} channels cannot be read off its weights, got num_heads=0; give num_heads"
        )
    sizes = {"dim": dim, "channels": channels, "patch_size": patch_size, "num_heads": heads}
    sizes["depth"] = 1 + max(int(name.split(".")[1]) for name in ours if name.startswith("blocks."))
    # the last row of the table is "no class"
    sizes["num_classes"] = ours["classes.weight"].shape[0] - 1
    table = weights.get("pos_embed")
    if table is not None:
        side = round(table.shape[1] ** 0.5)
        if table.shape != (1, side**2, dim) or (table[0] - sin_cos_positions(side, side, dim)).abs().max() > 1e-4:
            raise ValueError(
                f"pos_embed must hold the sines and cosines of a square grid, got another table of shape {tuple(table.shape)}; "
                "positions are computed here, for any size"
            )
        sizes |= {"height": side * patch_size, "width": side * patch_size}
    doubled = ours["pixels.bias"].shape[0] == 2 * channels * patch_size**2
    model = NaLaDiT(**(sizes | {"attention": "softmax", "objective": "ddpm" if doubled else "flow"} | config))
    model.load_state_dict(ours)
    return model.eval()


def config_from_weights(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields that translated weights determine: classes, head, output norms."""
    facts: dict[str, Any] = {}
    if "head.fc.weight" in weights:
        facts["num_classes"] = weights["head.fc.weight"].shape[0]
    elif not any(name.startswith(("head.", "projection.")) for name in weights):
        # checkpoints of detectors and segmenters hold the stages alone
        has_norms = any(name.startswith("output_norms.") for name in weights)
        facts |= {"num_classes": 0, "projection": None, "output_norms": has_norms}
    return facts


def convert_file(source: str | Path, out: str | Path, family: str, *, model: str = "") -> list[str]:
    """Translate a published checkpoint into a safetensors file with our names; return those names.

    `model`: a backbone (a name of models.VARIANTS) that the weights must fit, tensor for tensor.
    """
    source, out = Path(source), Path(out)
    if family not in FAMILIES:
        raise unknown_name("family of published weights", family, FAMILIES)
    if model:
        from .models.vision import VARIANTS, build

        if model not in VARIANTS:
            raise unknown_name("backbone", model, VARIANTS)
    if out.suffix != ".safetensors":
        raise ValueError(f"out must end in .safetensors, got {out.name}")
    published, others = backbone_part(read(source))
    warn_about_others(others)
    if not is_published_model(published):
        some = ", ".join(list(published)[:3])
        raise ValueError(f"{source} holds no published backbone: none of its names begins with patch_embed, but {some}, ...")
    weights = {name: value.contiguous() for name, value in translate(published, family).items()}
    if model:
        facts = {"num_classes": 0} | config_from_weights(weights)
        expected = {name: value.shape for name, value in build(model, device="meta", **facts).state_dict().items()}
        wrong = sorted(name for name in expected.keys() | weights.keys() if not _same(expected.get(name), weights.get(name)))
        if wrong:
            first = wrong[0]
            found = f"{list(weights[first].shape)}" if first in weights else "not there"
            wanted = f"{list(expected[first])}" if first in expected else "not there"
            raise ValueError(
                f"{source} does not fit {model}: {len(wrong)} tensors differ, the first is {first}, {found} in the file and "
                f"{wanted} in the model; name the backbone that the weights are of (`nalaformer models` lists them), or none"
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as aside:
        save_file(weights, aside, metadata={"format": "pt", "family": family})
    return list(weights)


def _same(expected: torch.Size | None, found: Tensor | None) -> bool:
    return expected is not None and found is not None and expected == found.shape
