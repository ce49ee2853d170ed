"""Learned mixing of the states of key blocks for each query block (MHLA)."""

import math

import torch
from torch import Tensor, nn


class BlockMix(nn.Module):
    """A learned positive weight for each pair of blocks, shared by the heads: [M, M].

    It starts as published: the cosine of the distance, pi / 4 between the blocks that lie farthest apart, scaled to equal sums
    over the blocks of queries. The published code lets the weights be negative, or clamps them; here they are the exponential
    of the learned parameter.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        rows, columns = shape
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
        distance = torch.cdist(places, places)
        near = torch.cos(math.pi / 4 * distance / distance.max().clamp(min=1))
        self.log_mixing = nn.Parameter((near / near.sum(0, keepdim=True)).log())

    def forward(self) -> Tensor:
        return self.log_mixing.exp()
