"""Launch the kernels of LayerNorm and RMSNorm, on rows [R, C], or on [..., C] without gaps."""

from math import prod

import torch
from torch import Tensor

from ..common.launch import Description, Launches, empty_as, kind, processors, start
from .compiled.norm import norm_gradient_kernel, norm_kernel

# elements that a program holds at once
BLOCK = 4096
# programs per multiprocessor that share the rows of a gradient
GRADIENT_PROGRAMS = 2
# pipeline stages of the gradient kernels
GRADIENT_STAGES = 3
_launches = Launches()


def blocks(channels: int, block: int) -> tuple[int, int]:
    """Return the rows and channels of a step."""
    columns = max(16, 1 << (channels - 1).bit_length())
    return max(1, block // columns), columns


def row_stride(x: Tensor) -> int:
    """Return the distance from a row to the next; without gaps, dimensions of one may have any stride."""
    return x.stride(0) if x.dim() == 2 else x.shape[-1]


def rows_readable(x: Tensor) -> Tensor:
    """Return x, or a copy, as rows that kernels can read."""
    return x if x.dim() == 2 and x.stride(-1) == 1 else x.contiguous()


def normalize(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Normalize x to `dtype` and return moments: [2, R] for LayerNorm, with its bias, [R] for RMSNorm. total receives x + y."""
    rows, channels = prod(x.shape[:-1]), x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    moments = torch.empty((rows,) if bias is None else (2, rows), dtype=torch.float32, device=x.device)
    # unused pointers still need a valid tensor
    gates, added, shift = x if gate is None else gate, x if y is None else y, weight if bias is None else bias

    def describe() -> Description:
        size, columns = blocks(channels, BLOCK)
        parts = {"CENTRED": bias is not None, "ADDS": y is not None, "GATED": gate is not None}
        return (
            (-(-rows // size),),
            (rows, row_stride(x), row_stride(added), row_stride(gates), eps),
            {"C": channels, "BR": size, "BC": columns, **parts, "num_warps": 4, "num_stages": 1},
        )

    tensors = (x, added, gates, weight, shift, out, out if total is None else total, moments)
    start(_launches, (eps, dtype, kind(x, y, gate, weight, bias)), norm_kernel, tensors, describe)
    return out, moments


def norm_gradients(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, moments: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of x (plus dtotal), of gate (if there is one), and of weight and bias in one, [2, C], or [C]."""
    rows, channels = prod(x.shape[:-1]), x.shape[-1]
    dout, dtotal = rows_readable(dout), None if dtotal is None else rows_readable(dtotal)
    dx, dgate = empty_as(x), None if gate is None else empty_as(gate)
    size, columns = blocks(channels, BLOCK // 2)
    steps = -(-rows // size)
    split_size = -(-steps // (GRADIENT_PROGRAMS * processors(x.device)))
    programs = -(-steps // split_size)
    partial = torch.empty(programs, *moments.shape[:-1], channels, dtype=torch.float32, device=x.device)
    gates, added, shift = x if gate is None else gate, x if dtotal is None else dtotal, weight if bias is None else bias

    def describe() -> Description:
        parts = {"CENTRED": bias is not None, "ADDS": dtotal is not None, "GATED": gate is not None}
        return (
            (programs,),
            (rows, split_size, row_stride(x), row_stride(gates), row_stride(dout), row_stride(added)),
            {"C": channels, "BR": size, "BC": columns, **parts, "STAGES": GRADIENT_STAGES, "num_warps": 4},
        )

    tensors = (x, gates, weight, shift, dout, added, moments, dx, dx if dgate is None else dgate, partial)
    start(_launches, ("gradient", kind(dout, dtotal, x, gate, weight, bias)), norm_gradient_kernel, tensors, describe)
    sums = partial.sum(0)
    return dx, dgate, sums if sums.dtype == weight.dtype else sums.to(weight.dtype)
