"""Compute LayerNorm and RMSNorm as one operator, on rows [R, C], or on [..., C] without gaps. RMSNorm has no bias."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..common.launch import empty_as
from ..common.op import operator
from .norm_launch import norm_gradients, normalize


def run_forward(
    x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the output in `dtype`, x + y (if there is a y), and moments: [R], or [2, R] with a bias."""
    total = None if y is None else empty_as(x)
    out, moments = normalize(x, y, gate, weight, bias, eps, dtype, total)
    return out, total, moments


def shapes(x: Any, y: Any, gate: Any, weight: Any, bias: Any, eps: Any, dtype: Any) -> Any:
    total = x.new_empty(0, dtype=torch.float32) if y is None else x.new_empty(x.shape)
    rows = prod(x.shape[:-1])
    moments = x.new_empty((rows,) if bias is None else (2, rows), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), total, moments


def run_backward(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None, moments: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of x (plus dtotal), of gate (if there is one), and of weight [C], or weight and bias [2, C]."""
    return norm_gradients(dout, dtotal, x, gate, weight, bias, moments)


def gradient_shapes(dout: Any, dtotal: Any, x: Any, gate: Any, weight: Any, bias: Any, moments: Any) -> Any:
    dgate = x.new_empty(0, dtype=torch.float32) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), dgate, weight.new_empty(weight.shape if bias is None else (2, *weight.shape))


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, gate, weight, bias, _, _ = inputs
    # gradients need only the type of y: the sum with it is what was normalised
    ctx.y_dtype = None if y is None else y.dtype
    ctx.save_for_backward(x if y is None else output[1], gate, weight, bias, output[2])
    # a gradient that is not needed stays None instead of becoming zeros
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, run: Any, dout: Any, dtotal: Any) -> Any:
    x, gate, weight, bias, moments = ctx.saved_tensors
    has_y = ctx.y_dtype is not None
    if dout is None:
        dout = torch.zeros_like(x)
    dx, dgate, sums = run(dout, dtotal if has_y else None, x, gate, weight, bias, moments)
    dweight, dbias = sums, None
    if bias is not None:
        # unbound here: an operator may not return two views of one tensor
        dweight, dbias = sums.unbind(0)
        dbias = dbias if bias.dtype == weight.dtype else dbias.to(bias.dtype)
    return dx, dx.to(ctx.y_dtype) if has_y else None, dgate, dweight, dbias


normalise, forward, backward = operator(
    "norm", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients, outputs=2
)
