"""A benchmark of linear attention against torch's softmax attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .feature_maps import FeatureMap, feature_map
from .ops import linear_attention, use_backend
from .timing import median_ms

# |ours - float64| / |float64|
LARGEST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
# computing more tokens in float64 would take longer than the measurement
CHECKED_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per call of linear and of softmax attention."""

    linear_ms: float
    softmax_ms: float


def default_tokens(device: str) -> list[int]:
    """Return sequence lengths around the crossover of linear and softmax attention."""
    return [256, 1024, 4096, 16_384] + ([65_536] if device == "cuda" else [])


def compare_with_softmax(
    tokens: int,
    *,
    heads: int = 4,
    head_dim: int = 64,
    feature_map: str = "norm_aware",
    causal: bool = False,
    backward: bool = False,
    device: str = "cpu",
    seconds: float = 0.5,
) -> Timing:
    """Return the time of one sequence of `tokens` tokens, in bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ArithmeticError: if the output is further from float64 than its dtype allows, which makes its time meaningless.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    phi = _make_map(feature_map, heads, head_dim).to(device)
    q, k, v = (torch.randn(1, tokens, heads, head_dim, device=device, dtype=dtype) for _ in range(3))
    linear = partial(linear_attention, feature_map=phi, causal=causal)
    _check(linear, phi, [x[:, :CHECKED_TOKENS] for x in (q, k, v)], causal)

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    times = [median_ms(_call(attend, (q, k, v), backward), device=device, seconds=seconds) for attend in (linear, softmax)]
    return Timing(linear_ms=times[0], softmax_ms=times[1])


def _make_map(name: str, heads: int, head_dim: int) -> FeatureMap:
    return feature_map(name, num_heads=heads, head_dim=head_dim)


def _call(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], backward: bool) -> Callable[[], object]:
    if not backward:
        return torch.inference_mode()(partial(attend, *inputs))
    leaves = [x.clone().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad((out := attend(*leaves)), leaves, torch.ones_like(out))


@torch.no_grad()
def _check(linear: Callable[..., Tensor], phi: FeatureMap, inputs: list[Tensor], causal: bool) -> None:
    with use_backend("reference"):
        truth = linear_attention(*(x.double() for x in inputs), feature_map=phi.double(), causal=causal)
    phi.float()
    error = float((linear(*inputs).double() - truth).norm() / truth.norm())
    largest = LARGEST_ERROR[inputs[0].dtype]
    # written so that NaN fails too
    if not error <= largest:
        raise ArithmeticError(f"linear attention is off by {error:.2g} of float64, more than {largest:g}; please report it")
