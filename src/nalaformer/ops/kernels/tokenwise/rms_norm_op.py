"""RMSNorm as an operator, on rows [R, C], or on [..., C] without gaps."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..common.launch import empty_as
from ..common.op import operator
from .norm_launch import norm_gradients, normalised


def run_forward(
    x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The output in `dtype`, x + y (if there is a y), and 1 / root mean square [R]."""
    total = None if y is None else empty_as(x)
    out, inverse = normalised(x, y, gate, weight, None, eps, dtype, total)
    return out, total, inverse


def shapes(x: Any, y: Any, gate: Any, weight: Any, eps: Any, dtype: Any) -> Any:
    total = x.new_empty(0, dtype=torch.float32) if y is None else x.new_empty(x.shape)
    return x.new_empty(x.shape, dtype=dtype), total, x.new_empty(prod(x.shape[:-1]), dtype=torch.float32)


def run_backward(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, gate: Tensor | None, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of x (to which dtotal is added), of gate (if there is one) and of the weight."""
    return norm_gradients(dout, dtotal, x, gate, weight, None, inverse)


def gradient_shapes(dout: Any, dtotal: Any, x: Any, gate: Any, weight: Any, inverse: Any) -> Any:
    dgate = x.new_empty(0, dtype=torch.float32) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), dgate, weight.new_empty(weight.shape)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, gate, weight, _, _ = inputs
    # y has no place in the gradients but for its type; where there is one, the sum is what was normalised
    ctx.y_dtype = None if y is None else y.dtype
    ctx.save_for_backward(x if y is None else output[1], gate, weight, output[2])
    # a gradient that nobody asked for stays None instead of becoming zeros
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, run: Any, dout: Any, dtotal: Any) -> Any:
    x, gate, weight, inverse = ctx.saved_tensors
    has_y = ctx.y_dtype is not None
    if dout is None:
        dout = torch.zeros_like(x)
    dx, dgate, dweight = run(dout, dtotal if has_y else None, x, gate, weight, inverse)
    return dx, dx.to(ctx.y_dtype) if has_y else None, dgate, dweight


normalise, forward, backward = operator(
    "rms_norm", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients, outputs=2
)
