"""Compute the scaled residual as an operator, on tokens [B, N, C] without gaps."""

from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from ..common.op import operator
from .compiled.residual import residual_gradient_kernel, residual_kernel
from .norm_launch import BLOCK, GRADIENT_PROGRAMS, GRADIENT_STAGES, blocks

_launches = Launches()


def run_forward(x: Tensor, y: Tensor, scale: Tensor | None, keep: Tensor | None) -> Tensor:
    """Return x + scale * keep * y: [B, N, C] in the type of x; scale: [C]; keep: [B]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors = (x, y, x if scale is None else scale, x if keep is None else keep, out)

    def describe() -> Description:
        batch, tokens, channels = x.shape
        size, columns = blocks(channels, BLOCK)
        constants = {"C": channels, "BR": size, "BC": columns, "SCALED": scale is not None, "DROPPED": keep is not None}
        return (-(-batch * tokens // size),), (batch * tokens, tokens), {**constants, "num_warps": 4, "num_stages": 1}

    start(_launches, kind(x, y, scale, keep), residual_kernel, tensors, describe)
    return out


def run_backward(dout: Tensor, y: Tensor, scale: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the scale (empty without one)."""
    batch, tokens, channels = y.shape
    dout = dout.contiguous()
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    size, columns = blocks(channels, BLOCK // 2)
    steps = -(-batch * tokens // size)
    split_size = -(-steps // (GRADIENT_PROGRAMS * processors(y.device)))
    programs = -(-steps // split_size)
    partial = torch.empty(programs if scale is not None else 0, channels, dtype=torch.float32, device=y.device)
    tensors = (y, y if scale is None else scale, y if keep is None else keep, dout, dy, partial)

    def describe() -> Description:
        constants = {"C": channels, "BR": size, "BC": columns, "SCALED": scale is not None, "DROPPED": keep is not None}
        return (programs,), (batch * tokens, tokens, split_size), {**constants, "STAGES": GRADIENT_STAGES, "num_warps": 4}

    start(_launches, ("backward", kind(dout, y, scale, keep)), residual_gradient_kernel, tensors, describe)
    return dy, partial.sum(0).to(scale.dtype) if scale is not None else y.new_empty(0)


def shapes(x: Any, y: Any, scale: Any, keep: Any) -> Any:
    return x.new_empty(x.shape)


def gradient_shapes(dout: Any, y: Any, scale: Any, keep: Any) -> Any:
    return y.new_empty(y.shape), y.new_empty(0) if scale is None else scale.new_empty(scale.shape)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    return dout, *run(dout, *ctx.saved_tensors)


add, forward, backward = operator(
    "residual", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
