"""Compute the gate of a SwiGLU network and the projection behind it."""

import torch.nn.functional as F
from torch import Tensor

from .backend import runs_kernels
from .features import outside_autocast
from .rms_norm import product_dtype


def gated_linear(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """Return (silu(a) * b) weight^T. a, b: [..., F]; weight: [C, F] -> [..., C].

    On a GPU the backward pass computes silu(a) * b again instead of storing it.
    """
    if runs_kernels(a) and a.numel() > 0:
        from .kernels.tokenwise import gated_linear_op

        dtype = product_dtype(a)
        with outside_autocast(a):
            a, b, weight = a.to(dtype), b.to(dtype), weight.to(dtype)
            out = gated_linear_op.apply(a.flatten(0, -2).contiguous(), b.flatten(0, -2).contiguous(), weight)
        return out.view(*a.shape[:-1], weight.shape[0])
    return F.linear(F.silu(a) * b, weight)
