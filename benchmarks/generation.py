"""Time and memory of a denoising step against the tokens of its image: norm-aware and softmax, heads of 64 and of 72."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from nalaformer.ops import use_backend

from .cases import check_device
from .image_cost import ChartStyle, ImageMeasurement, by_place, run_image_costs
from .measurement import Result
from .runner import Say, say_on_stdout

if TYPE_CHECKING:
    from nalaformer.models.diffusion import DiffusionTransformer

GENERATION_COLUMNS = (
    "model", "variant", "device", "threads", "dtype", "depth", "width", "heads", "head_size", "image_size", "tokens", "outcome",
    "median_ms", "peak_extra_mib", "peak_extra_means", "relative_error", "others_cpu", "torch", "triton", "nalaformer",
    "commit", "date",
)  # fmt: skip
NORM_AWARE, SOFTMAX = "norm-aware", "softmax, SDPA"
# by variant
ATTENTION = {NORM_AWARE: "nalaformer", SOFTMAX: "softmax"}
COLOURS = {NORM_AWARE: "#D55E00", SOFTMAX: "#0072B2"}
HEAD_SIZES = (64, 72)
DASHES = {"heads of 64": "-", "heads of 72": "--"}
# heads of 64 and of 72 make both widths; the first is that of DiT-XL, whose 16 heads have 72
LAYOUTS = {"cuda": {"depth": 28, "width": 1152}, "cpu": {"depth": 2, "width": 576}}
# an autoencoder of 8 and patches of 2: an image of 4096 pixels has 256 x 256 = 65,536 tokens
REDUCTION, PATCH, CHANNELS, CLASSES = 8, 2, 4, 1000
IMAGE_SIZES = {"cpu": (256, 512), "cuda": (512, 1024, 2048, 4096)}
SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class StepMeasurement(ImageMeasurement):
    """One evaluation of a diffusion transformer on one image, as a sampler asks for it."""

    image_size: int
    """Side of the image in pixels."""
    head_size: int
    depth: int
    width: int
    # as samplers run it where the host would be the limit
    is_captured = True
    what_counts = "parameters, latents and the class are held before and do not count; activations and the result count"

    @property
    def tokens(self) -> int:
        return (self.image_size // (REDUCTION * PATCH)) ** 2

    @property
    def setting(self) -> str:
        return f"heads of {self.head_size}"

    @property
    def label(self) -> str:
        return f"{self.tokens:,} tokens, {self.setting}, {self.variant}"

    @torch.no_grad()
    def check(self, built: None) -> float | None:
        """Against the reference path, on an image of 256 tokens."""
        if self.variant == SOFTMAX:
            return None
        network, inputs = self.make_network(), replace(self, image_size=256).make_inputs()
        found = network(*inputs).double()
        with use_backend("reference"):
            expected = network(*inputs).double()
        return ((found - expected).norm() / expected.norm()).item()

    def make_network(self) -> "DiffusionTransformer":
        """The transformer with the same random weights every time."""
        from nalaformer.models.diffusion import DiffusionTransformer

        torch.manual_seed(0)
        # drawn where they are used: a host takes many seconds for the 675 million weights of DiT-XL
        with torch.device(self.device):
            network = DiffusionTransformer(
                depth=self.depth,
                dim=self.width,
                num_heads=self.width // self.head_size,
                patch_size=PATCH,
                channels=CHANNELS,
                num_classes=CLASSES,
                attention=ATTENTION[self.variant],
            )
        # it starts as the function that is zero, which every path computes rightly
        for parameter in network.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        return network.to(self.device, self.dtype).eval()

    def make_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random latents of one image, its time and its class."""
        side = self.image_size // REDUCTION
        latents = torch.randn(1, CHANNELS, side, side, generator=torch.Generator().manual_seed(0))
        time, label = torch.tensor([500.0], device=self.device), torch.tensor([0], device=self.device)
        return latents.to(self.device, self.dtype), time, label

    def make_call(self, built: None) -> Callable[[], object]:
        network, inputs = self.make_network(), self.make_inputs()
        return torch.no_grad()(lambda: network(*inputs))

    def small(self) -> Self:
        return replace(self, image_size=64)

    def row(self, result: Result[Any]) -> dict[str, object]:
        names = ("variant", "depth", "width", "head_size", "image_size", "tokens")
        return {"model": "DiT", "heads": self.width // self.head_size} | {name: getattr(self, name) for name in names}


StepResult = Result[StepMeasurement]


def plan_generation(
    device: str, sizes: Sequence[int] | None = None, *, depth: int | None = None, width: int | None = None
) -> list[StepMeasurement]:
    """Return the plan, the smallest size first. depth, width: sizes of a smaller network, for a quick look."""
    check_device(device)
    sizes = IMAGE_SIZES[device] if sizes is None else sizes
    unit = REDUCTION * PATCH
    if not sizes or any(size < unit or size % unit for size in sizes):
        raise ValueError(f"sizes must be positive multiples of {unit}, what a token covers, got {list(sizes)}")
    layout = LAYOUTS[device]
    depth, width = depth or layout["depth"], width or layout["width"]
    return [
        StepMeasurement(variant=variant, image_size=size, head_size=head_size, device=device, depth=depth, width=width)
        for size in sorted(set(sizes))
        for head_size in HEAD_SIZES
        for variant in ATTENTION
    ]


def run_generation(
    device: str,
    out: str | Path | None = None,
    sizes: Sequence[int] | None = None,
    *,
    seconds: float = SECONDS,
    depth: int | None = None,
    width: int | None = None,
    say: Say = say_on_stdout,
) -> list[StepResult]:
    """Measure the plan, print each result and write its row; then draw a plot beside the file and return how costs grow.

    out: default benchmarks/results/generation_<device>.csv.
    """
    plan = plan_generation(device, sizes, depth=depth, width=width)
    made_of = f"{plan[0].depth} blocks of {plan[0].width} channels"
    style = ChartStyle(title=f"A step of a diffusion transformer, {made_of}", tokens="tokens", colours=COLOURS, dashes=DASHES)
    path = Path(out or f"benchmarks/results/generation_{device}.csv")
    return run_image_costs(plan, path, GENERATION_COLUMNS, style, lines=step_lines, seconds=seconds, say=say)


def step_lines(results: Sequence[StepResult]) -> list[str]:
    return [*comparison_lines(results), *growth_lines(results)]


def comparison_lines(results: Sequence[StepResult]) -> list[str]:
    """Norm-aware beside softmax, at every number of tokens."""
    found, lines = by_place(results), []
    for (tokens, setting, variant), ours in found.items():
        peer = found.get((tokens, setting, SOFTMAX))
        if variant != NORM_AWARE or peer is None or not ours.median_ms:
            continue
        if peer.median_ms:
            compared = f"{ours.median_ms / peer.median_ms:.2f} times the time of {SOFTMAX}"
            if ours.peak_extra_mib and peer.peak_extra_mib:
                compared += f", {ours.peak_extra_mib / peer.peak_extra_mib:.2f} times its peak memory"
        else:
            compared = f"{SOFTMAX} is {peer.outcome}"
        lines.append(f"{tokens:,} tokens, {setting}, {NORM_AWARE}: {compared}")
    return lines


def growth_lines(results: Sequence[StepResult]) -> list[str]:
    """The power of the tokens by which time and memory grow, between the two largest images that were measured."""
    lines = []
    for setting in DASHES:
        for variant in ATTENTION:
            own = [r for r in results if (r.measurement.setting, r.measurement.variant) == (setting, variant)]
            growth = []
            for name, title in (("median_ms", "time"), ("peak_extra_mib", "peak memory")):
                points = [(r.measurement.tokens, getattr(r, name)) for r in own if getattr(r, name)]
                if len(points) > 1:
                    (fewer, low), (more, high) = points[-2:]
                    growth.append(f"{title} grows as N^{log(high / low) / log(more / fewer):.2f}")
            if growth:
                lines.append(f"{setting}, {variant}: {', '.join(growth)} between its two largest images")
    return lines
