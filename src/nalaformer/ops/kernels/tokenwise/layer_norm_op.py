"""The layer norm as an operator, on rows [R, C], or on [..., C] without gaps."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..common.op import operator
from .norm_launch import norm_gradients, normalised


def run_forward(x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Like x, and its moments [2, R]."""
    return normalised(x, None, gate, weight, bias, eps, x.dtype, None)


def run_backward(
    dout: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, moments: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of x, of gate (if there is one), and of weight and bias in one, [2, C]."""
    return norm_gradients(dout, None, x, gate, weight, bias, moments)


def shapes(x: Any, gate: Any, weight: Any, bias: Any, eps: Any) -> Any:
    return x.new_empty(x.shape), x.new_empty(2, prod(x.shape[:-1]), dtype=torch.float32)


def gradient_shapes(dout: Any, x: Any, gate: Any, weight: Any, bias: Any, moments: Any) -> Any:
    dgate = x.new_empty(0, dtype=torch.float32) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), dgate, weight.new_empty(2, *weight.shape)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], output[1])


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    weight, bias = ctx.saved_tensors[2:4]
    dx, dgate, sums = run(dout, *ctx.saved_tensors)
    # taken apart here: an operator may not return two views of one tensor
    dweight, dbias = sums.unbind(0)
    return dx, dgate, dweight, dbias if bias.dtype == weight.dtype else dbias.to(bias.dtype)


normalise, forward, backward = operator(
    "layer_norm", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
