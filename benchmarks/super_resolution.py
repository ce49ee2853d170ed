"""Memory and time of enlarging one image against its tokens: norm-aware attention over the whole image, and softmax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nalaformer.attention import Attention
from nalaformer.ops import use_backend

from .cases import check_device
from .image_cost import ChartStyle, ImageMeasurement, by_place, run_image_costs
from .measurement import Result
from .models import DIRECTIONS, FORWARD, TRAINING
from .runner import Say, say_on_stdout

if TYPE_CHECKING:
    from nalaformer.models.vision import SuperResolution

SUPER_RESOLUTION_COLUMNS = (
    "model", "variant", "device", "threads", "dtype", "scale", "side", "tokens", "direction", "outcome", "median_ms",
    "peak_extra_mib", "peak_extra_means", "relative_error", "others_cpu", "torch", "triton", "timm", "nalaformer", "commit",
    "date",
)  # fmt: skip
NORM_AWARE, MATERIALISED, FUSED, WINDOWS = "norm-aware", "softmax, materialised", "softmax, SDPA", "softmax, windows of 8"
# by variant
ATTENTION = {NORM_AWARE: "nalaformer", MATERIALISED: "softmax", FUSED: "softmax", WINDOWS: "softmax_windows"}
COLOURS = {NORM_AWARE: "#D55E00", MATERIALISED: "#000000", FUSED: "#0072B2", WINDOWS: "#009E73"}
STYLE = ChartStyle(
    title="Enlarging one image",
    tokens="tokens (pixels of the small image)",
    colours=COLOURS,
    dashes={FORWARD: "-", TRAINING: "--"},
)
# 264 x 264 = 69,696 tokens
SIDES = {"cpu": (32, 64), "cuda": (100, 128, 180, 264, 376, 530)}
SCALE = 2
# less memory than softmax "beyond 70K tokens"
PUBLISHED = "92.3% less, published"
LEAST_TOKENS = 69_000
SECONDS = 1.0


class MaterialisedSoftmax(Attention):
    """Softmax attention as the formula reads, with all weights in memory at once."""

    def _attend_globally(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        weights = (q * self.head_dim**-0.5) @ k.mT  # [B, H, N, N]
        return (weights.softmax(dim=-1) @ v).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class EnlargementMeasurement(ImageMeasurement):
    """A variant on one image, forward or in training."""

    side: int
    """The side of the image that is enlarged."""
    direction: str
    model: str = "super_resolution_light"
    what_counts = "parameters and the images are held before and do not count; activations, gradients and the result count"

    @property
    def tokens(self) -> int:
        return self.side**2

    @property
    def setting(self) -> str:
        return self.direction

    @property
    def label(self) -> str:
        return f"{self.tokens:,} tokens, {self.variant}, {self.direction}"

    def check(self, built: None) -> float | None:
        """Against the reference path, or torch's softmax, on an image of 32 x 32 pixels."""
        if self.variant in (FUSED, WINDOWS):
            return None
        images = replace(self, side=32).make_images()[0]
        with torch.no_grad():
            found = self.make_model()(images).double()
            with use_backend("reference"):
                other = FUSED if self.variant == MATERIALISED else self.variant
                expected = replace(self, variant=other).make_model()(images).double()
        return ((found - expected).norm() / expected.norm()).item()

    def make_model(self) -> "SuperResolution":
        """The network with the same random weights every time."""
        from nalaformer.models.vision import build_super_resolution

        torch.manual_seed(0)
        model = build_super_resolution(self.model, scale=SCALE, attention=ATTENTION[self.variant])
        if self.variant == MATERIALISED:
            materialise(model)
        return model.to(self.device, self.dtype)

    def make_images(self) -> tuple[Tensor, Tensor]:
        """A random image, and a large one."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.side, SCALE * self.side)
        low, high = (torch.rand(1, 3, side, side, generator=generator).to(self.device, self.dtype) for side in sizes)
        return low, high

    def make_call(self, built: None) -> Callable[[], object]:
        model, (low, high) = self.make_model(), self.make_images()
        if self.direction == FORWARD:
            return torch.no_grad()(lambda: model(low))
        parameters = list(model.parameters())
        return lambda: torch.autograd.grad(F.l1_loss(model(low), high), parameters)

    def small(self) -> Self:
        return replace(self, side=16)

    def row(self, result: Result[Any]) -> dict[str, object]:
        names = ("model", "variant", "side", "tokens", "direction")
        return {"scale": SCALE} | {name: getattr(self, name) for name in names}


def materialise(model: nn.Module) -> None:
    """Replace softmax attention by the formula, in place."""
    for module in model.modules():
        found = getattr(module, "attention", None)
        if isinstance(found, Attention):
            plain = MaterialisedSoftmax(found.config, dim=found.dim, num_heads=found.num_heads)
            plain.load_state_dict(found.state_dict())
            module.attention = plain


EnlargementResult = Result[EnlargementMeasurement]


def plan_super_resolution(
    device: str, sides: Sequence[int] | None = None, *, model: str = "super_resolution_light"
) -> list[EnlargementMeasurement]:
    """Return the plan, the smallest first."""
    check_device(device)
    sides = SIDES[device] if sides is None else sides
    if not sides or min(sides) < 1:
        raise ValueError(f"sides must be positive, got {list(sides)}")
    return [
        EnlargementMeasurement(variant=variant, side=side, direction=direction, device=device, model=model)
        for side in sorted(set(sides))
        for direction in DIRECTIONS
        for variant in ATTENTION
    ]


def run_super_resolution(
    device: str,
    out: str | Path | None = None,
    sides: Sequence[int] | None = None,
    *,
    seconds: float = SECONDS,
    model: str = "super_resolution_light",
    say: Say = say_on_stdout,
) -> list[EnlargementResult]:
    """Measure the plan, print each result and write its row; then draw a plot beside the file and return the savings.

    out: default benchmarks/results/super_resolution_<device>.csv.
    """
    plan = plan_super_resolution(device, sides, model=model)
    path = Path(out or f"benchmarks/results/super_resolution_{device}.csv")
    return run_image_costs(plan, path, SUPER_RESOLUTION_COLUMNS, STYLE, lines=saving_lines, seconds=seconds, say=say)


def saving_lines(results: Sequence[EnlargementResult]) -> list[str]:
    """Return how much less memory ours takes than each softmax, where the paper says so."""
    found, lines = by_place(results), []
    for (tokens, direction, variant), peer in found.items():
        ours = found.get((tokens, direction, NORM_AWARE))
        if tokens < LEAST_TOKENS or variant == NORM_AWARE or ours is None or not ours.peak_extra_mib:
            continue
        if peer.peak_extra_mib:
            less = 1 - ours.peak_extra_mib / peer.peak_extra_mib
            saved = f"{abs(less):.1%} {'less' if less >= 0 else 'more'} peak memory than {variant}"
        else:
            saved = f"{variant} is {peer.outcome}"
        claim = f" ({PUBLISHED})" if variant in (MATERIALISED, FUSED) else ""
        lines.append(f"{tokens:,} tokens, {direction}, {NORM_AWARE}: {saved}{claim}")
    return lines
