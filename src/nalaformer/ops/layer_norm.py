"""Compute layer norm, with the residual sum before it or the gate behind it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import runs_kernels

# a longer row does not fit on chip beside its gradient's sums
MOST_CHANNELS = 4096


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, gate: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return (x - mean) / standard deviation * weight + bias over the last dimension, times silu(gate) where there is one.

    x, gate: [..., C] -> [..., C] in the type of x, or in `dtype`.
    """
    dtype = dtype or x.dtype
    if fits_norm(x):
        from .kernels.tokenwise.norm_op import normalise

        rows, gates = to_dense_rows(x, gate)
        out, _ = normalise(rows, None, gates, weight, bias, eps, dtype)
        return out if rows is x else out.view(x.shape)
    # torch needs one type for both on a GPU
    wide = torch.promote_types(x.dtype, weight.dtype)
    out = F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps)
    return (out if gate is None else out * F.silu(gate)).to(dtype)


def add_layer_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, *, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + y in the type of both together, and its layer norm in the same type, or in `dtype`. x, y: [..., C]."""
    if fits_norm(x) and torch.promote_types(x.dtype, y.dtype) == x.dtype and x.shape == y.shape:
        from .kernels.tokenwise.norm_op import normalise

        rows, added = to_dense_rows(x, y)
        out, total = normalise(rows, added, None, weight, bias, eps, dtype or x.dtype)
        return (total, out) if rows is x else (total.view(x.shape), out.view(x.shape))
    total = x + y
    return total, layer_norm(total, weight, bias, eps=eps, dtype=dtype)


def fits_norm(x: Tensor) -> bool:
    """True if the kernels of norms support x."""
    return runs_kernels(x) and x.shape[-1] <= MOST_CHANNELS and x.numel() > 0


def to_dense_rows(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return both tensors as the kernels take them: unchanged if they have no gaps, else as rows [R, C].

    A view has a gradient of its own, which costs the host as much as that of the norm.
    """
    if x.is_contiguous() and (y is None or y.is_contiguous()):
        return x, y
    return to_rows(x), None if y is None else to_rows(y)


def to_rows(x: Tensor) -> Tensor:
    """Reshape to [R, C]: a view where the rows lie at even distances, as in a slice of a projection."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
