"""Time and memory of hybrid attention over long prompts, beside plain torch and softmax.

Calls are eager, so the time is what a caller waits: below some thousand tokens mostly for Python. Each method is compared with
float64 before it is timed, output and gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nalaformer.attention.hybrid import HybridSettings, hybrid_attention, hybrid_settings
from nalaformer.feature_maps import feature_map
from nalaformer.ops import use_backend

from .measurement import CallMeasurement, Result
from .ops import BOTH, FORWARD

SOFTMAX, TORCH = "softmax", "still, plain torch"
LARGEST_ERROR = {torch.bfloat16: 1e-2, torch.float32: 2e-5}


@dataclass(frozen=True, kw_only=True)
class PromptShape:
    heads: int
    key_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads} heads on {self.key_heads} of {self.head_dim}"


@dataclass(frozen=True, kw_only=True)
class PromptStudy:
    """Prompts of one sample, and what reads them."""

    shapes: tuple[PromptShape, ...] = (
        PromptShape(heads=8, key_heads=8, head_dim=128),
        PromptShape(heads=32, key_heads=8, head_dim=64),
    )
    lengths: tuple[int, ...] = (8192, 32_768, 131_072)
    chunk_size: int = 64
    max_salient: int = 1024
    checked: int = 1024
    """Tokens that are compared with float64."""
    longest_torch: int = 8192
    """Beyond, plain torch only makes the reader wait."""
    seconds: float = 0.2
    """The time that each measurement takes."""

    @property
    def methods(self) -> dict[str, HybridSettings | None]:
        """The settings of each method; None: softmax over all tokens."""
        still = hybrid_settings("still", chunk_size=self.chunk_size)
        return {
            SOFTMAX: None,
            "still, no cap": still,
            f"still, at most {self.max_salient} salient": replace(still, max_salient=self.max_salient),
            "window": hybrid_settings("window", chunk_size=self.chunk_size),
            TORCH: still,
        }


@dataclass(frozen=True, kw_only=True)
class PromptMeasurement(CallMeasurement):
    """One method over one prompt, forward or with gradients."""

    study: PromptStudy
    shape: PromptShape
    method: str
    length: int
    direction: str
    largest_errors = LARGEST_ERROR

    @property
    def label(self) -> str:
        return f"prompt: {self.method}, {self.shape}, {self.length} tokens, {self.direction}"

    @property
    def subject(self) -> object:
        return self.study, self.shape, self.method, self.device

    def check(self, built: None) -> float:
        settings = self.study.methods[self.method]
        return checked_error(self.method, settings, self.shape, self.study.checked, device=self.device, dtype=self.dtype)

    def make_call(self, built: None) -> Callable[[], object]:
        tensors, upstream = random_inputs(self.shape, self.length, device=self.device, dtype=self.dtype)
        attend = make_attention(self.method, self.study.methods[self.method], self.shape, device=self.device)
        return make_call(attend, tensors, upstream if self.direction == BOTH else None)

    def row(self, result: Result[Any]) -> dict[str, object]:
        return {
            **{"part": "prompt", "method": self.method, "task": str(self.shape), "batch": 1},
            **{"length": self.length, "timed": self.direction, "ms": result.median_ms, "peak_mib": result.peak_extra_mib},
        }

    def describe(self, result: Result[Any]) -> str:
        return f"{result.median_ms:.4g} ms"


def plan_prompts(study: PromptStudy, device: str) -> list[PromptMeasurement]:
    """All methods at all lengths, forward and with gradients."""
    return [
        PromptMeasurement(study=study, shape=shape, method=method, length=length, direction=direction, device=device)
        for shape in study.shapes
        for method in study.methods
        for length in study.lengths
        if method != TORCH or length <= study.longest_torch
        for direction in (FORWARD, BOTH)
    ]


def checked_error(
    name: str, settings: HybridSettings | None, shape: PromptShape, length: int, *, device: str, dtype: torch.dtype
) -> float:
    """The largest distance of output and gradients from those of plain torch in float64, relative to their norms."""
    if settings is not None and settings.max_salient:
        # so few that tokens lose their place within the checked ones
        settings = replace(settings, max_salient=min(settings.max_salient, 2 * settings.salient_per_chunk))
    tensors, upstream = random_inputs(shape, length, device=device, dtype=dtype)
    found = make_call(make_attention(name, settings, shape, device=device), tensors, upstream)()
    exact = [x.double() for x in (*tensors, upstream)]
    with use_backend("reference"):
        expected = make_call(make_attention(name, settings, shape, device=device), exact[:4], exact[4])()
    return max(((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True))


def random_inputs(shape: PromptShape, length: int, *, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, k, v and gate; and the gradient of the output."""
    made = torch.Generator(device=device).manual_seed(0)
    heads = (shape.heads, shape.key_heads, shape.key_heads, shape.heads, shape.heads)
    q, k, v, gate, upstream = (
        torch.randn(1, length, count, shape.head_dim, device=device, generator=made).to(dtype) for count in heads
    )
    return [q, k, v, gate.sigmoid()], upstream


def make_attention(
    name: str, settings: HybridSettings | None, shape: PromptShape, *, device: str
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    if settings is None:

        def softmax(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            is_grouped = shape.heads != shape.key_heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped).transpose(1, 2)

        return softmax
    torch.manual_seed(0)
    phi = feature_map(settings.feature_map, num_heads=shape.heads, head_dim=shape.head_dim, **settings.map_options).to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        own = phi.double() if q.dtype == torch.float64 else phi
        return hybrid_attention(q, k, v, feature_map=own, settings=settings, gate=gate)

    if name != TORCH:
        return attend

    def in_torch(*tensors: Tensor) -> Tensor:
        with use_backend("reference"):
            return attend(*tensors)

    return in_torch


def make_call(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor], upstream: Tensor | None
) -> Callable[[], list[Tensor]]:
    """Output, and with an upstream gradient those of q, k and v."""
    if upstream is None:

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [attend(*tensors)]

        return forward
    leaves = [x.detach().requires_grad_() for x in tensors]

    def both() -> list[Tensor]:
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves[:3], upstream)]

    return both
