"""STILL's NP-Map (arXiv 2602.02180): rotate the direction freely, keep the norm."""

from functools import partial

import torch
from torch import Tensor, nn

from ..ops import KernelSpec
from ..ops.rotary import length_of
from .base import FeatureMap
from .registry import FEATURE_MAPS
from .simple import softmax_both_signs

SMALLEST_NORM = 1e-5


@FEATURE_MAPS.register("norm_preserving")
class NormPreserving(FeatureMap):
    """u = |x| * normalize(W_h (x - 2 (x.n_h) n_h)),  phi(x) = [softmax(u) ; softmax(-u)]; F = 2 D.

    W_h is a matrix and n_h a unit vector per head, learned, separate for queries and keys. W starts as the identity.
    """

    queries_are_bounded = True
    heads_have_own_keys = True

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.query_weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))
        self.key_weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))
        self.query_normal = nn.Parameter(torch.randn(num_heads, head_dim))
        self.key_normal = nn.Parameter(torch.randn(num_heads, head_dim))

    def query(self, q: Tensor) -> Tensor:
        return softmax_both_signs(self.change_direction(q, self.query_weight, self.query_normal))

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        return softmax_both_signs(self.change_direction(k, self.key_weight, self.key_normal))

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        before = (
            partial(self.change_direction, weight=self.query_weight, normal=self.query_normal),
            partial(self.change_direction, weight=self.key_weight, normal=self.key_normal),
        )
        return KernelSpec("softmax", parts=2, before=before)

    def change_direction(self, x: Tensor, weight: Tensor, normal: Tensor) -> Tensor:
        """Change the direction of x and keep its norm: a reflection, then W, then the old norm."""
        # the reflection is folded into the matrix: one product per token and no temporary of the size of x
        matrix = fold_reflection(self.per_head(weight, x), self.per_head(normal, x))
        changed = torch.einsum("bnhd,hed->bnhe", x, matrix)
        return changed * (norm(x) / norm(changed))

    def query_matrix(self) -> Tensor:
        """Return reflection and W of the queries as one matrix, [H, D, D], for kernels that map one token."""
        return fold_reflection(self.query_weight.float(), self.query_normal.float())


def fold_reflection(weight: Tensor, normal: Tensor) -> Tensor:
    """Return W (1 - 2 n n^T) for n of any length. weight: [H, D, D]; normal: [H, D]."""
    unit = nn.functional.normalize(normal, dim=-1, eps=SMALLEST_NORM)
    return weight - 2 * torch.einsum("hed,hd,hf->hef", weight, unit, unit)


def norm(x: Tensor) -> Tensor:
    """Return the norm over the channels, clamped away from zero."""
    # computed in units of 2^40, which is exact, since the square of 1e20 does not fit into float32
    return length_of(x * 2.0**-40)[..., None].clamp(min=SMALLEST_NORM * 2.0**-40) * 2.0**40
