"""A contrast whose scale is learned from the norm of the query."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..feature_maps.norm_preserving import norm
from ..ops import compute_dtype


class LearnedContrast(nn.Module):
    """z = softplus(a + b |q| / sqrt D), a and b learned per head: q [B, N, H, D] -> [B, N, H].

    Our own form. MALA's scale, the mean score, grows with the head size and is not learned; this one starts at 1.3 for queries
    of unit variance (a = `offset`, 0 by default), and b sets how much more sharply a larger query attends.
    """

    def __init__(self, *, num_heads: int, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((num_heads,), float(offset)))
        self.slope = nn.Parameter(torch.ones(num_heads))

    def forward(self, q: Tensor) -> Tensor:
        dtype = compute_dtype(q)
        size = norm(q.to(dtype))[..., 0] * q.shape[-1] ** -0.5
        return F.softplus(self.offset.to(dtype) + self.slope.to(dtype) * size)
