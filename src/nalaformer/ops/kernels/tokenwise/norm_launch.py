"""Launches of the kernels of LayerNorm and RMSNorm, on rows [R, C]."""

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from .compiled.norm import norm_gradient_kernel, norm_kernel

# numbers that a program holds at once
BLOCK = 4096
# programs per multiprocessor that share the rows of a gradient
GRADIENT_PROGRAMS = 2
# how far ahead they read
GRADIENT_STAGES = 3
_launches = Launches()


def blocks(channels: int, block: int) -> tuple[int, int]:
    """Rows and channels of a step."""
    columns = max(16, 1 << (channels - 1).bit_length())
    return max(1, block // columns), columns


def normalised(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """[R, C] in `dtype`, and moments: [2, R] for LayerNorm, which has a bias, [R] for RMSNorm. total: takes x + y."""
    rows, channels = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    moments = torch.empty((rows,) if bias is None else (2, rows), dtype=torch.float32, device=x.device)
    # unused pointers still need a valid tensor
    gates, added, shift = x if gate is None else gate, x if y is None else y, weight if bias is None else bias

    def describe() -> Description:
        size, columns = blocks(channels, BLOCK)
        parts = {"CENTRED": bias is not None, "ADDS": y is not None, "GATED": gate is not None}
        return (
            (-(-rows // size),),
            (rows, x.stride(0), added.stride(0), gates.stride(0), eps),
            {"C": channels, "BR": size, "BC": columns, **parts, "num_warps": 4, "num_stages": 1},
        )

    tensors = (x, added, gates, weight, shift, out, out if total is None else total, moments)
    start(_launches, (eps, dtype, kind(x, y, gate, weight, bias)), norm_kernel, tensors, describe)
    return out, moments


def norm_gradients(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, moments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (to which dtotal is added), of gate (empty without one), and of weight and bias in one, [2, C], or [C]."""
    rows, channels = x.shape
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dtotal = dtotal if dtotal is None or dtotal.stride(-1) == 1 else dtotal.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(0 if gate is None else gate.shape, dtype=x.dtype if gate is None else gate.dtype, device=x.device)
    size, columns = blocks(channels, BLOCK // 2)
    steps = -(-rows // size)
    stretch = -(-steps // (GRADIENT_PROGRAMS * processors(x.device)))
    programs = -(-steps // stretch)
    partial = torch.empty(programs, *moments.shape[:-1], channels, dtype=torch.float32, device=x.device)
    gates, added, shift = x if gate is None else gate, x if dtotal is None else dtotal, weight if bias is None else bias

    def describe() -> Description:
        parts = {"CENTRED": bias is not None, "ADDS": dtotal is not None, "GATED": gate is not None}
        return (
            (programs,),
            (rows, stretch, x.stride(0), gates.stride(0), dout.stride(0), added.stride(0)),
            {"C": channels, "BR": size, "BC": columns, **parts, "STAGES": GRADIENT_STAGES, "num_warps": 4},
        )

    tensors = (x, gates, weight, shift, dout, added, moments, dx, dx if gate is None else dgate, partial)
    start(_launches, ("gradient", kind(dout, dtotal, x, gate, weight, bias)), norm_gradient_kernel, tensors, describe)
    return dx, dgate, partial.sum(0).to(weight.dtype)
