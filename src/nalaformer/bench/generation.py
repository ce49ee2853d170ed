"""Time and memory of a denoising step against the tokens of its image: norm-aware and softmax, heads of 64 and of 72."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ..ops import use_backend
from .cases import refuse_missing_device
from .machine import Machine, describe_machine
from .measurement import OUT_OF_MEMORY, CallMeasurement, Result
from .models import LARGEST_ERROR
from .runner import Say, busy_lines, mistake_lines, name_of, rounded, run_plan, say_on_stdout

if TYPE_CHECKING:
    from ..models.diffusion import DiffusionTransformer

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
DASHES = {64: "-", 72: "--"}
# heads of 64 and of 72 make both widths; the first is that of DiT-XL, whose 16 heads have 72
LAYOUTS = {"cuda": {"depth": 28, "width": 1152}, "cpu": {"depth": 2, "width": 576}}
# an autoencoder of 8 and patches of 2: an image of 4096 pixels has 256 x 256 = 65,536 tokens
REDUCTION, PATCH, CHANNELS, CLASSES = 8, 2, 4, 1000
IMAGE_SIZES = {"cpu": (256, 512), "cuda": (512, 1024, 2048, 4096)}
SECONDS = 1.0
# of a usual sampler
SAMPLER_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class StepMeasurement(CallMeasurement):
    """One evaluation of a diffusion transformer on one image, as a sampler asks for it."""

    variant: str
    """A name of ATTENTION."""
    image_size: int
    """Side of the image in pixels."""
    head_size: int
    depth: int
    width: int
    what_counts = "parameters, latents and the class are held before and do not count; activations and the result count"

    @property
    def tokens(self) -> int:
        return (self.image_size // (REDUCTION * PATCH)) ** 2

    @property
    def label(self) -> str:
        return f"{self.tokens:,} tokens, heads of {self.head_size}, {self.variant}"

    @property
    def largest_error(self) -> float:
        return LARGEST_ERROR[self.dtype]

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
        from ..models.diffusion import DiffusionTransformer

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
        """As a sampler calls it: a CUDA graph where the host would be the limit."""
        from ..models.diffusion.prediction import prediction

        network, (latents, time, label) = self.make_network(), self.make_inputs()
        with torch.no_grad():
            predict = prediction(network, latents, label, guidance=1.0, calls=SAMPLER_STEPS)
        return torch.no_grad()(lambda: predict(latents, time[0]))

    def small(self) -> Self:
        return replace(self, image_size=64)

    def row(self, result: Result[Any]) -> dict[str, object]:
        names = ("variant", "depth", "width", "head_size", "image_size", "tokens")
        return {"model": "DiT", "heads": self.width // self.head_size} | {name: getattr(self, name) for name in names}

    def said(self, result: Result[Any]) -> str:
        memory = "" if result.peak_extra_mib is None else f", {rounded(result.peak_extra_mib)} MiB"
        return f"{result.median_ms:.4g} ms a step{memory}"


StepResult = Result[StepMeasurement]


def plan_generation(
    device: str, sizes: Sequence[int] | None = None, *, depth: int | None = None, width: int | None = None
) -> list[StepMeasurement]:
    """What will be measured, the smallest first. depth, width: of smaller networks, for a look."""
    refuse_missing_device(device)
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
    """Measure the plan, say each figure as it comes and write its row; then a picture beside the file, and how they grow.

    out: default benchmarks/results/generation_<device>.csv.
    """
    path = Path(out or f"benchmarks/results/generation_{device}.csv")
    machine = describe_machine()
    plan = plan_generation(device, sizes, depth=depth, width=width)
    results = run_plan(plan, path, GENERATION_COLUMNS, machine, seconds=seconds, say=say)
    lines = (*busy_lines(results), *comparison_lines(results), *growth_lines(results), *mistake_lines(results))
    for line in (*lines, f"results: {path}"):
        say(line)
    if any(result.is_right for result in results):
        say(f"picture: {draw_generation(results, path.with_suffix('.png'), machine)}")
    return results


def comparison_lines(results: Sequence[StepResult]) -> list[str]:
    """Norm-aware beside softmax, at every number of tokens."""
    found = {(r.measurement.tokens, r.measurement.head_size, r.measurement.variant): r for r in results}
    lines = []
    for (tokens, head_size, variant), ours in found.items():
        peer = found.get((tokens, head_size, SOFTMAX))
        if variant != NORM_AWARE or peer is None or not ours.median_ms:
            continue
        if peer.median_ms:
            compared = f"{ours.median_ms / peer.median_ms:.2f} times the time of {SOFTMAX}"
            if ours.peak_extra_mib and peer.peak_extra_mib:
                compared += f", {ours.peak_extra_mib / peer.peak_extra_mib:.2f} times its peak memory"
        else:
            compared = f"{SOFTMAX} is {peer.outcome}"
        lines.append(f"{tokens:,} tokens, heads of {head_size}, {NORM_AWARE}: {compared}")
    return lines


def growth_lines(results: Sequence[StepResult]) -> list[str]:
    """The power of the tokens by which time and memory grow, between the two largest images that were measured."""
    lines = []
    for head_size in HEAD_SIZES:
        for variant in ATTENTION:
            own = [r for r in results if (r.measurement.head_size, r.measurement.variant) == (head_size, variant)]
            growth = []
            for name, title in (("median_ms", "time"), ("peak_extra_mib", "peak memory")):
                points = [(r.measurement.tokens, getattr(r, name)) for r in own if getattr(r, name)]
                if len(points) > 1:
                    (fewer, low), (more, high) = points[-2:]
                    growth.append(f"{title} grows as N^{log(high / low) / log(more / fewer):.2f}")
            if growth:
                lines.append(f"heads of {head_size}, {variant}: {', '.join(growth)} between its two largest images")
    return lines


def draw_generation(results: Sequence[StepResult], path: Path, machine: Machine) -> Path:
    """Write a PNG: peak memory and time of a step against the tokens, both logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    tokens = sorted({result.measurement.tokens for result in results})
    panels = (("peak_extra_mib", "peak memory of a step (MiB)"), ("median_ms", "time of a step (ms)"))
    for number, (name, title) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 2, number)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for variant, colour in COLOURS.items():
            for head_size, dashes in DASHES.items():
                own = [r for r in results if (r.measurement.variant, r.measurement.head_size) == (variant, head_size)]
                shown = [r for r in own if getattr(r, name)]
                missing = [r.measurement.tokens for r in own if r.outcome == OUT_OF_MEMORY]
                label = f"{variant}, heads of {head_size}"
                label += f" (out of memory: {min(missing):,} tokens)" if missing else ""
                places, heights = [r.measurement.tokens for r in shown], [getattr(r, name) for r in shown]
                axes.plot(places, heights, dashes, color=colour, marker="o", markersize=4, label=label)
        axes.set_xticks(tokens, [f"{count / 1024:.3g}K" for count in tokens])
        axes.minorticks_off()
        axes.set_xlabel("tokens")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if number == 1:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    first = results[0].measurement
    made_of = f"diffusion transformer, {first.depth} blocks of {first.width} channels"
    figure.suptitle(f"{made_of}, {name_of(first.dtype)}, {machine.device_name(first.device)}", fontsize=12)
    figure.savefig(path)
    return path
