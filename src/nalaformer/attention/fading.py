"""Data-dependent decay of each head: log_decay = -exp(rate) softplus(W x + step), as in Mamba 2 (arXiv 2405.21060)."""

import math

import torch
from torch import Tensor, nn

from ..ops import compute_dtype


def initial_decay(num_heads: int) -> tuple[Tensor, Tensor]:
    """Return the initial rate and step, [H] each: rates of 1 to 16, time steps of 0.001 to 0.1 on a logarithmic scale.

    The memories of the heads then last from one token to a thousand.
    """
    rate = 1 + 15 * torch.rand(num_heads)
    step = torch.exp(math.log(1e-3) + math.log(100.0) * torch.rand(num_heads))
    # the inverse of softplus
    return rate.log(), step + torch.log(-torch.expm1(-step))


def compute_log_decay(projected: Tensor, rate: Tensor, step: Tensor) -> Tensor:
    """Return -exp(rate) softplus(projected + step), <= 0: projected [B, N, H], rate and step [H]."""
    # float32, since a decay near 1 is raised to the power of thousands of tokens
    dtype = compute_dtype(projected)
    steps = projected.to(dtype) + step.to(dtype)
    # this is softplus, whose own gradient makes torch.compile choose a wrong memory layout
    return -rate.to(dtype).exp() * torch.logaddexp(steps, steps.new_zeros(()))


class Fading(nn.Module):
    """The learned log decay of each head and token: x [B, N, C] -> log_decay [B, N, H]."""

    def __init__(self, *, dim: int, num_heads: int) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, num_heads, bias=False)
        rate, step = initial_decay(num_heads)
        self.rate, self.step = nn.Parameter(rate), nn.Parameter(step)

    def forward(self, x: Tensor) -> Tensor:
        return compute_log_decay(self.projection(x), self.rate, self.step)
