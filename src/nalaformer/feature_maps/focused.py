"""FLatten Transformer: focused linear attention (Han et al., 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import KernelSpec
from .base import check_number
from .registry import FEATURE_MAPS
from .simple import SameForBoth


@FEATURE_MAPS.register("focused")
class Focused(SameForBoth):
    """phi(x) = focus((relu(x) + 1e-6) / softplus(scale), power); scale learned per channel, F = D.

    Both norms inside `focus` run over all heads together, as published; `norm_over="head"` takes each head by itself.
    """

    heads_have_own_keys = True

    def __init__(self, *, num_heads: int, head_dim: int, power: float = 3.0, norm_over: str = "all") -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        check_number("power", power, least=1, why="since smaller ones flatten")
        if norm_over not in ("all", "head"):
            raise ValueError(f'norm_over must be "all" (the heads together, as published) or "head", got {norm_over!r}')
        self.power = power
        self.norm_over = norm_over
        self.scale = nn.Parameter(torch.zeros(num_heads, head_dim))

    def phi(self, x: Tensor) -> Tensor:
        x = (x.relu() + 1e-6) / F.softplus(self.per_head(self.scale, x))
        return focus(x, self.power, dim=(-2, -1) if self.norm_over == "all" else (-1,))

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        inverse = 1 / F.softplus(self.scale.float())
        spans_heads = self.norm_over == "all"
        return KernelSpec("focused", parts=1, parameters=inverse.to(device), alpha=self.power, spans_heads=spans_heads)


def focus(x: Tensor, power: float, dim: tuple[int, ...] = (-1,)) -> Tensor:
    """Sharpen a positive vector and keep its length: x^p * |x| / |x^p|, norms over `dim`."""
    # divide by the largest entry before the power, so that it neither overflows nor underflows; the factor cancels exactly
    peak = x.detach().amax(dim=dim, keepdim=True)
    powered = (x / peak) ** power
    return powered * (norm(x / peak, dim) * peak / norm(powered, dim))


def norm(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    return x.square().sum(dim=dim, keepdim=True).sqrt()
