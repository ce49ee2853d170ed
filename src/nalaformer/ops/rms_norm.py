"""Compute RMSNorm, with the residual sum before it or the gate behind it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .layer_norm import fits_norm, to_dense_rows


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, gate: Tensor | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, times silu(gate) where there is one.

    x, gate: [..., C] -> [..., C] in the type of x, or in that of autocast, in which the product behind it computes.
    """
    dtype = product_dtype(x)
    if fits_norm(x):
        from .kernels.tokenwise.norm_op import normalise

        rows, gates = to_dense_rows(x, gate)
        out, _ = normalise(rows, None, gates, weight, None, eps, dtype)
        return out if rows is x else out.view(x.shape)
    out = _normalize(x, weight, eps)
    return (out if gate is None else out * F.silu(gate)).to(dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + y, and its rms_norm. x, y: [..., C]."""
    if fits_norm(x) and torch.promote_types(x.dtype, y.dtype) == x.dtype and x.shape == y.shape:
        from .kernels.tokenwise.norm_op import normalise

        rows, added = to_dense_rows(x, y)
        out, total = normalise(rows, added, None, weight, None, eps, product_dtype(x))
        return (total, out) if rows is x else (total.view(x.shape), out.view(x.shape))
    total = x + y
    return total, rms_norm(total, weight, eps=eps)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a matrix product of x computes: that of autocast where it is on."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # one type for both: torch warns about two, and is slow in them
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)
