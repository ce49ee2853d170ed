"""The layer norm as torch.library operators, on rows [R, C]."""

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from ..common.op import eager, first_order
from .compiled.layer_norm import layer_norm_gradient_kernel, layer_norm_kernel

# numbers that a program holds at once
BLOCK = 4096
# programs per multiprocessor that share the rows of a gradient
GRADIENT_PROGRAMS = 2
# how far ahead they read
GRADIENT_STAGES = 3
_launches: Launches = {}


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate (empty without one), weight and bias."""
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
    dweight, dbias = partial.sum(0).to(weight.dtype).unbind(0)
    return dx, dgate, dweight, dbias if bias.dtype == weight.dtype else dbias.to(bias.dtype)


forward = torch.library.custom_op("nalaformer::layer_norm", mutates_args=())(run_forward)


@torch.library.custom_op("nalaformer::layer_norm_backward", mutates_args=())
def backward(
    dout: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, moments: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dgate, dweight, dbias = run_backward(dout, x, gate, weight, bias, moments)
    # an operator may not return two views of one tensor
    return dx, dgate, dweight.clone(), dbias.clone()


@forward.register_fake
def _(x, gate, weight, bias, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(2, x.shape[0], dtype=torch.float32)


@backward.register_fake
def _(dout, x, gate, weight, bias, moments):  # type: ignore[no-untyped-def]
    dgate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), dgate, weight.new_empty(weight.shape), bias.new_empty(bias.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:4], output[1])
    ctx.is_gated = inputs[1] is not None


def gradients(ctx, dout, run):  # type: ignore[no-untyped-def]
    dx, dgate, dweight, dbias = run(dout, *ctx.saved_tensors)
    return dx, dgate if ctx.is_gated else None, dweight, dbias, None


def _backward(ctx, dout, _):  # type: ignore[no-untyped-def]
    return gradients(ctx, dout, backward)


forward.register_autograd(first_order(_backward), setup_context=_save)

eager_normalise = eager(
    run_forward, _save, lambda ctx, dout: gradients(ctx, dout, run_backward), given=lambda output: output[0]
)


def normalise(x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Through the dispatcher while torch.compile traces, directly otherwise."""
    if torch.compiler.is_compiling():
        return forward(x, gate, weight, bias, eps)[0]
    return eager_normalise(x, gate, weight, bias, eps)
