"""STILL's NP-Map (arXiv 2602.02180): turn the direction freely, keep the norm."""

import torch
from torch import Tensor, nn

from .base import FeatureMap
from .registry import FEATURE_MAPS
from .simple import softmax_of_both_signs

SMALLEST_NORM = 1e-5


@FEATURE_MAPS.register("norm_preserving")
class NormPreserving(FeatureMap):
    """u = |x| * normalise(W_h (x - 2 (x.n_h) n_h)),  phi(x) = [softmax(u) ; softmax(-u)]; F = 2 D.

    W_h is a matrix and n_h a unit vector per head, learned, separate for queries and keys. W starts as the identity.
    """

    heads_have_own_keys = True

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.query_weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))
        self.key_weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))
        self.query_normal = nn.Parameter(torch.randn(num_heads, head_dim))
        self.key_normal = nn.Parameter(torch.randn(num_heads, head_dim))

    def query(self, q: Tensor) -> Tensor:
        return softmax_of_both_signs(self.turn(q, self.query_weight, self.query_normal))

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        return softmax_of_both_signs(self.turn(k, self.key_weight, self.key_normal))

    def turn(self, x: Tensor, weight: Tensor, normal: Tensor) -> Tensor:
        """x in another direction with the same norm: a reflection, then W, then the old norm."""
        unit = nn.functional.normalize(self.per_head(normal, x), dim=-1, eps=SMALLEST_NORM)
        mirrored = x - 2 * (x * unit).sum(-1, keepdim=True) * unit
        turned = torch.einsum("bnhd,hed->bnhe", mirrored, self.per_head(weight, x))
        return turned * (norm(x) / norm(turned))


def norm(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True).clamp(min=SMALLEST_NORM**2).sqrt()
