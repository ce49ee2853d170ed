"""Time and memory of hybrid attention over long prompts, beside plain torch and softmax.

Calls are eager, so the time is what a caller waits: below some thousand tokens mostly for Python. Each method is compared with
float64 before it is timed, output and gradients.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.hybrid import HybridSettings, hybrid_attention, hybrid_settings
from ..feature_maps import feature_map
from ..ops import use_backend
from .memory import can_measure, peak_extra_mib
from .models import WRONG, failure_of, give_back_memory
from .ops import BOTH, FORWARD
from .timing import median_ms

SOFTMAX, TORCH = "softmax", "still, plain torch"
LARGEST_ERROR = {torch.bfloat16: 1e-2, torch.float32: 2e-5}


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int
    key_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads} heads on {self.key_heads} of {self.head_dim}"


@dataclass(frozen=True, kw_only=True)
class PromptStudy:
    """Prompts of one sample, and what reads them."""

    shapes: tuple[Shape, ...] = (Shape(heads=8, key_heads=8, head_dim=128), Shape(heads=32, key_heads=8, head_dim=64))
    lengths: tuple[int, ...] = (8192, 32_768, 131_072)
    chunk_size: int = 64
    max_salient: int = 1024
    checked: int = 1024
    """Tokens that are compared with float64."""
    longest_torch: int = 8192
    """Beyond, plain torch only makes the reader wait."""
    seconds: float = 0.2
    """Of each measurement."""

    @property
    def methods(self) -> dict[str, HybridSettings | None]:
        """By name; None: softmax over all tokens."""
        still = hybrid_settings("still", chunk_size=self.chunk_size)
        return {
            SOFTMAX: None,
            "still, no cap": still,
            f"still, at most {self.max_salient} salient": replace(still, max_salient=self.max_salient),
            "window": hybrid_settings("window", chunk_size=self.chunk_size),
            TORCH: still,
        }


def run_prompts(
    study: PromptStudy, *, device: str, add: Callable[..., None], say: Callable[[str], object], deadline: float
) -> None:
    """All methods at all lengths, forward and with gradients; nothing is begun after the deadline."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for shape in study.shapes:
        for name, settings in study.methods.items():
            row: dict[str, Any] = {"part": "prompt", "method": name, "task": str(shape), "batch": 1}
            if time.monotonic() > deadline:
                say(f"prompt: {name}, {shape}: not begun, the time is over")
                continue
            try:
                row["error"] = checked_error(name, settings, shape, study.checked, device=device, dtype=dtype)
            except RuntimeError as failure:
                add(**row, note=failure_of(failure))
                say(f"prompt: {name}, {shape}: {failure_of(failure)}")
                continue
            # written so that NaN is wrong too
            if not row["error"] <= LARGEST_ERROR[dtype]:
                add(**row, note=WRONG)
                say(f"prompt: {name}, {shape}: {WRONG}, error {row['error']:.2g}")
                continue
            for length in study.lengths:
                if name == TORCH and length > study.longest_torch:
                    continue
                for direction in (FORWARD, BOTH):
                    if time.monotonic() > deadline:
                        break
                    row |= {"length": length, "timed": direction}
                    try:
                        found = measure(name, settings, shape, length, direction, study.seconds, device=device, dtype=dtype)
                    except RuntimeError as failure:  # what follows can still be measured
                        found = {"note": failure_of(failure)}
                    add(**row, **found)
                    say(f"prompt: {name}, {shape}, {length} tokens, {direction}: {found.get('ms', found.get('note'))}")
                    give_back_memory()


def measure(
    name: str,
    settings: HybridSettings | None,
    shape: Shape,
    length: int,
    direction: str,
    seconds: float,
    *,
    device: str,
    dtype: torch.dtype,
) -> dict[str, Any]:
    tensors, upstream = random_inputs(shape, length, device=device, dtype=dtype)
    attend = make_attention(name, settings, shape, device=device)
    call = make_call(attend, tensors, upstream if direction == BOTH else None)
    return {
        "ms": median_ms(call, device=device, seconds=seconds, capture=False),
        "peak_mib": peak_extra_mib(call, device=device) if can_measure(device) else None,
    }


def checked_error(
    name: str, settings: HybridSettings | None, shape: Shape, length: int, *, device: str, dtype: torch.dtype
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


def random_inputs(shape: Shape, length: int, *, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, k, v and gate; and the gradient of the output."""
    made = torch.Generator(device=device).manual_seed(0)
    heads = (shape.heads, shape.key_heads, shape.key_heads, shape.heads, shape.heads)
    q, k, v, gate, upstream = (
        torch.randn(1, length, count, shape.head_dim, device=device, generator=made).to(dtype) for count in heads
    )
    return [q, k, v, gate.sigmoid()], upstream


def make_attention(
    name: str, settings: HybridSettings | None, shape: Shape, *, device: str
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
