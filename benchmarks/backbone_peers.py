"""NaLaFormer-T beside backbones of timm, eager and compiled, in one process: images per second and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalaformer.machine import describe_machine
from nalaformer.ops import use_backend

from .cases import check_device
from .measurement import Result
from .models import FORWARD, MODEL_COLUMNS, TRAINING, BackboneMeasurement, checked_image_sizes, make_backbone_call
from .runner import Bar, Say, busy_lines, mistake_lines, run_plan, say_on_stdout

OURS, CONVNEXT = "nalaformer_t_linear", "convnext_tiny"
# their layers are built for one image size
SIZED = ("swin_tiny_patch4_window7_224", "vit_small_patch16_224")
PEERS = (CONVNEXT, *SIZED, "efficientvit_b2")
EAGER, COMPILED, GRAPHS = "eager", "compiled", "compiled, graphs"
FOLDED, FOLDED_COMPILED, FOLDED_GRAPHS = "folded", "folded, compiled", "folded, compiled, graphs"
# torch.compile's mode of the compiled ones; CUDA graphs exist on GPUs alone
MODES = {COMPILED: None, FOLDED_COMPILED: None, GRAPHS: "reduce-overhead", FOLDED_GRAPHS: "reduce-overhead"}
FORMS = (EAGER, COMPILED, GRAPHS)
OUR_FORMS = {FORWARD: (EAGER, FOLDED, COMPILED, FOLDED_COMPILED, GRAPHS, FOLDED_GRAPHS), TRAINING: FORMS}
# calls in which torch.compile records its graphs: the first runs without them
RECORDING_CALLS = 3
SIZES = {"cpu": (224,), "cuda": (224, 1024)}
BATCHES = {("cuda", FORWARD): {224: 256, 1024: 24}, ("cuda", TRAINING): {224: 256, 1024: 12}}
SECONDS = 1.0
# ours against ConvNeXt-T, each in its faster form
LEAST = {FORWARD: 1.0, TRAINING: 1.25}


@dataclass(frozen=True, kw_only=True)
class PeerMeasurement(BackboneMeasurement):
    """A backbone in one form."""

    model: str
    """OURS or one of PEERS."""
    form: str
    """One of OUR_FORMS; peers are not folded."""

    @property
    def label(self) -> str:
        return f"{self.image_size} px x {self.batch}, {self.model}, {self.form}, {self.direction}"

    @property
    def is_ours(self) -> bool:
        return self.model == OURS

    @property
    def is_compiled(self) -> bool:
        return self.form in MODES

    @property
    def has_graphs(self) -> bool:
        return MODES.get(self.form) is not None

    @property
    def weights(self) -> torch.dtype:
        """Training keeps them in float32, and on a GPU computes under autocast."""
        return torch.float32 if self.direction == TRAINING else self.dtype

    def make_network(self) -> nn.Module:
        """The network with the same random weights every time, in the mode of its direction; neither folded nor compiled."""
        import timm

        torch.manual_seed(0)
        sized: dict[str, Any] = {"img_size": self.image_size} if self.model in SIZED else {}
        network: nn.Module = timm.create_model(self.model, **sized)
        return network.to(self.device).train(self.direction == TRAINING)

    def build(self) -> nn.Module:
        from nalaformer.conversion import fold

        network = self.make_network()
        if self.form in (FOLDED, FOLDED_COMPILED, FOLDED_GRAPHS):
            network = fold(network)
        network = network.to(self.weights)
        if self.is_compiled:
            # code compiled for other networks is useless here and keeps their memory alive
            torch._dynamo.reset()
            return torch.compile(network, dynamic=False, mode=MODES[self.form])  # type: ignore[return-value]
        return network

    @torch.no_grad()
    def check(self, built: nn.Module) -> float | None:
        """Compares the logits of one image with those of the plain network on the reference path; only in inference."""
        if not self.is_ours or self.direction == TRAINING:
            return None
        images = self.make_images()
        # all images, since another number would be compiled for another time
        found = built(images)[:1].double()
        with use_backend("reference"):
            expected = self.make_network().to(self.weights)(images[:1]).double()
        return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()

    def make_images(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(1, 3, self.image_size, self.image_size, generator=generator)
        return images.expand(self.batch, -1, -1, -1).to(self.device, self.weights).contiguous()

    def measure_call(self, built: nn.Module, *, seconds: float, memory: bool) -> dict[str, Any]:
        # graphs hold their memory from one call to the next: no call takes any
        return super().measure_call(built, seconds=seconds, memory=memory and not self.has_graphs)

    def make_call(self, built: nn.Module) -> Callable[[], object]:
        is_mixed = self.direction == TRAINING and self.device == "cuda"
        context = partial(torch.autocast, self.device, torch.bfloat16, enabled=is_mixed)
        call = make_backbone_call(built, self.make_images(), self.direction, context)
        if not self.has_graphs:
            return call

        def replay() -> object:
            # this lets the replay overwrite the output of the call before
            torch.compiler.cudagraph_mark_step_begin()
            return call()

        for _ in range(RECORDING_CALLS):
            replay()
        return replay

    def row(self, result: Result[Any]) -> dict[str, object]:
        return {"model": self.model, "variant": self.form} | super().row(result)


PeerResult = Result[PeerMeasurement]


def plan_peers(device: str, sizes: Sequence[int] | None = None) -> list[PeerMeasurement]:
    """Return the plan: first ours and ConvNeXt-T, which the bars need."""
    check_device(device)
    sizes = checked_image_sizes(SIZES[device] if sizes is None else sizes)
    everything = [
        PeerMeasurement(
            model=model,
            form=form,
            image_size=size,
            batch=BATCHES.get((device, direction), {}).get(size, 2),
            direction=direction,
            device=device,
        )
        for size in sizes
        for direction in (FORWARD, TRAINING)
        for model in (OURS, *PEERS)
        for form in (OUR_FORMS[direction] if model == OURS else FORMS)
        if device == "cuda" or form not in (GRAPHS, FOLDED_GRAPHS)
    ]
    return sorted(everything, key=lambda m: m.model not in (OURS, CONVNEXT))


def run_backbone_peers(
    device: str,
    out: str | Path | None = None,
    sizes: Sequence[int] | None = None,
    *,
    seconds: float = SECONDS,
    say: Say = say_on_stdout,
) -> list[PeerResult]:
    """Measure the plan, say each figure as it comes, write the CSV file after every one; then the bars.

    out: default benchmarks/results/backbone_peers_<device>.csv. seconds: of timing per measurement.
    """
    path = Path(out or f"benchmarks/results/backbone_peers_{device}.csv")
    results = run_plan(plan_peers(device, sizes), path, MODEL_COLUMNS, describe_machine(), seconds=seconds, say=say)
    bars = [bar.line for bar in peer_bars(results)]
    for line in (*busy_lines(results), *bars, *mistake_lines(results), f"results: {path}"):
        say(line)
    return results


def peer_bars(results: Sequence[PeerResult]) -> list[Bar]:
    """Ours against ConvNeXt-T, each in its faster form, and compiled against eager; only what this run measured."""
    speed = {
        (m.image_size, m.direction, m.model, m.form): result.per_second
        for m, result in ((result.measurement, result) for result in results)
        if result.per_second
    }
    found = []
    for size, direction in dict.fromkeys(key[:2] for key in speed):

        def fastest(model: str, *forms: str, at: tuple[int, str] = (size, direction)) -> float:
            """The fastest of the forms; 0: none was measured."""
            return max((speed.get((*at, model, form), 0.0) or 0.0 for form in forms), default=0.0)

        ours, peer = fastest(OURS, *OUR_FORMS[direction]), fastest(CONVNEXT, *FORMS)
        eager, compiled = fastest(OURS, EAGER), fastest(OURS, COMPILED)
        folded, folded_compiled = fastest(OURS, FOLDED), fastest(OURS, FOLDED_COMPILED)
        promises = (
            (f"{OURS} at least {LEAST[direction]:g}x as fast as {CONVNEXT}", ours, peer, LEAST[direction]),
            (f"{OURS} compiled no slower than eager", compiled, eager, 1.0),
            (f"{OURS} folded and compiled no slower than folded", folded_compiled, folded, 1.0),
        )
        for promise, mine, other, least in promises:
            if mine and other:
                ratio = mine / other
                title = f"{size} px, {direction}: {promise}"
                found.append(Bar(promise=title, measured=f"{ratio:.2f}x", is_met=ratio >= least))
    return found
