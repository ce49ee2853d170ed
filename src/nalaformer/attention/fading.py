"""How much a head forgets at each token."""

import math

import torch
from torch import Tensor, nn

from ..ops import compute_dtype


class Fading(nn.Module):
    """log_decay = -exp(rate) softplus(W x + step) for each head, rate and step learned: x [B, N, C] -> [B, N, H], <= 0.

    Started as in Mamba 2 (arXiv 2405.21060): rates of 1 to 16, time steps of 0.001 to 0.1 on a logarithmic scale, so that heads
    begin with memories from one token to a thousand.
    """

    def __init__(self, *, dim: int, num_heads: int) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, num_heads, bias=False)
        self.rate = nn.Parameter((1 + 15 * torch.rand(num_heads)).log())
        step = torch.exp(math.log(1e-3) + math.log(100.0) * torch.rand(num_heads))
        # the inverse of softplus
        self.step = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor) -> Tensor:
        # float32: a decay near 1 is raised to the power of thousands of tokens
        dtype = compute_dtype(x)
        steps = self.projection(x).to(dtype) + self.step.to(dtype)
        # softplus, whose own gradient tells torch.compile a wrong memory layout
        return -self.rate.to(dtype).exp() * torch.logaddexp(steps, steps.new_zeros(()))
