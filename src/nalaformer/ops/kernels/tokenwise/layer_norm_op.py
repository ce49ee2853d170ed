"""The layer norm as an operator, on rows [R, C]."""

from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from ..common.op import operator
from .compiled.layer_norm import layer_norm_gradient_kernel, layer_norm_kernel

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


def run_forward(x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[R, C] in the type of x, and its moments [2, R]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    moments = torch.empty(2, x.shape[0], dtype=torch.float32, device=x.device)
    gates = x if gate is None else gate

    def describe() -> Description:
        rows, channels = x.shape
        size, columns = blocks(channels, BLOCK)
        return (
            (-(-rows // size),),
            (rows, x.stride(0), gates.stride(0), eps),
            {"C": channels, "BR": size, "BC": columns, "GATED": gate is not None, "num_warps": 4, "num_stages": 1},
        )

    start(_launches, (eps, kind(x, gate, weight, bias)), layer_norm_kernel, (x, gates, weight, bias, out, moments), describe)
    return out, moments


def run_backward(
    dout: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, moments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of gate (empty without one), and of weight and bias in one, [2, C]."""
    rows, channels = x.shape
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(0 if gate is None else gate.shape, dtype=x.dtype if gate is None else gate.dtype, device=x.device)
    size, columns = blocks(channels, BLOCK // 2)
    steps = -(-rows // size)
    stretch = -(-steps // (GRADIENT_PROGRAMS * processors(x.device)))
    programs = -(-steps // stretch)
    partial = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
    gates = x if gate is None else gate

    def describe() -> Description:
        return (
            (programs,),
            (rows, stretch, x.stride(0), gates.stride(0), dout.stride(0)),
            {
                "C": channels,
                "BR": size,
                "BC": columns,
                "GATED": gate is not None,
                "STAGES": GRADIENT_STAGES,
                "num_warps": 4,
            },
        )

    tensors = (x, gates, weight, bias, dout, moments, dx, dx if gate is None else dgate, partial)
    start(_launches, kind(dout, x, gate, weight, bias), layer_norm_gradient_kernel, tensors, describe)
    return dx, dgate, partial.sum(0).to(weight.dtype)


def shapes(x: Any, gate: Any, weight: Any, bias: Any, eps: Any) -> Any:
    return x.new_empty(x.shape), x.new_empty(2, x.shape[0], dtype=torch.float32)


def gradient_shapes(dout: Any, x: Any, gate: Any, weight: Any, bias: Any, moments: Any) -> Any:
    dgate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
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
