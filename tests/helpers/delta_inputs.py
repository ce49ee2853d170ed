"""Inputs of the delta rule."""

import pytest
import torch
from torch import Tensor

GATES = pytest.mark.parametrize("gated", [False, True], ids=["delta", "gated"])


def inputs(
    tokens: int, *, gated: bool, batch: int = 2, heads: int = 3, features: int = 6, values: int = 5, dtype=torch.float64
) -> tuple[list[Tensor], Tensor | None]:
    """Unit keys, corrections between 0 and 1, and decays from almost none to almost all."""
    q, k = (torch.nn.functional.normalize(torch.randn(batch, tokens, heads, features), dim=-1) for _ in range(2))
    v, beta = torch.randn(batch, tokens, heads, values), torch.rand(batch, tokens, heads)
    decay = -torch.rand(batch, tokens, heads).pow(4) * 12 if gated else None
    return [x.to(dtype) for x in (q, k, v, beta)], None if decay is None else decay.to(dtype)
