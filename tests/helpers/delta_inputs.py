"""Inputs of the delta rule, and what comes of them."""

import pytest
import torch
from torch import Tensor

import nalaformer
from nalaformer.ops.backend import INTERPRETING

DEVICE = "cpu" if INTERPRETING else "cuda"
# float32 sums of some hundred products in two matrix products behind each other, against float64
BAR = 3e-6
GATES = pytest.mark.parametrize("gated", [False, True], ids=["delta", "gated"])


def inputs(
    tokens: int, *, gated: bool, batch: int = 2, heads: int = 3, features: int = 6, values: int = 5, dtype=torch.float64
) -> tuple[list[Tensor], Tensor | None]:
    """Unit keys, corrections between 0 and 1, and decays from almost none to almost all."""
    q, k = (torch.nn.functional.normalize(torch.randn(batch, tokens, heads, features), dim=-1) for _ in range(2))
    v, beta = torch.randn(batch, tokens, heads, values), torch.rand(batch, tokens, heads)
    decay = -torch.rand(batch, tokens, heads).pow(4) * 12 if gated else None
    return [x.to(dtype) for x in (q, k, v, beta)], None if decay is None else decay.to(dtype)


def outcome(backend, dtype, tensors, decay, state, upstream, bounds=None):
    """Outputs, last state, and the gradients of everything."""
    leaves = [None if x is None else x.to(DEVICE, dtype).requires_grad_() for x in (*tensors, decay, state)]
    *given, fade, before = leaves
    with nalaformer.use_backend(backend):
        found = nalaformer.delta_rule(*given, log_decay=fade, state=before, cu_seqlens=bounds)
    given = [x.to(DEVICE, dtype) for x in upstream]
    return [*found, *torch.autograd.grad(found, [x for x in leaves if x is not None], given)]


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-6)).item()
