"""Compute the end of a SwiGLU network as an operator; its product is recomputed, which costs less than storing it."""

from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, start
from ..common.op import operator
from .compiled.gated_product import gated_product_gradient_kernel, gated_product_kernel

BLOCK = 2048
_launches = Launches()


def describe_for(x: Tensor) -> Description:
    return (-(-x.numel() // BLOCK),), (x.numel(),), {"BLOCK": BLOCK, "num_warps": 4, "num_stages": 1}


def run_forward(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """Return (silu(a) * b) weight^T. a, b: [R, F] side by side; weight: [C, F] -> [R, C]."""
    product = torch.empty_like(a)
    start(_launches, kind(a, b), gated_product_kernel, (a, b, product), lambda: describe_for(a))
    return product @ weight.t()


def shapes(a: Any, b: Any, weight: Any) -> Any:
    return a.new_empty(a.shape[0], weight.shape[0])


def run_backward(dout: Tensor, a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a, b and the weight."""
    dproduct = dout @ weight
    product, da, db = (torch.empty_like(a) for _ in range(3))
    tensors = (a, b, dproduct, product, da, db)
    start(_launches, ("gradient", kind(a, b, dproduct)), gated_product_gradient_kernel, tensors, lambda: describe_for(a))
    return da, db, dout.t() @ product


def gradient_shapes(dout: Any, a: Any, b: Any, weight: Any) -> Any:
    return a.new_empty(a.shape), b.new_empty(b.shape), weight.new_empty(weight.shape)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    return run(dout, *ctx.saved_tensors)


apply, forward, backward = operator(
    "gated_linear", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
