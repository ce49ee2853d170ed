"""RMSNorm as an operator, on rows [R, C]."""

from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from ..common.op import operator
from .compiled.rms_norm import rms_norm_gradient_kernel, rms_norm_kernel
from .layer_norm_op import BLOCK, GRADIENT_PROGRAMS, GRADIENT_STAGES, blocks

_launches = Launches()


def run_forward(
    x: Tensor, y: Tensor | None, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The output in `dtype`, x + y (empty without y), and 1 / root mean square [R]."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = torch.empty(0 if y is None else x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    gates, added = x if gate is None else gate, x if y is None else y

    def describe() -> Description:
        rows, channels = x.shape
        size, columns = blocks(channels, BLOCK)
        return (
            (-(-rows // size),),
            (rows, x.stride(0), added.stride(0), gates.stride(0), eps),
            {
                "C": channels,
                "BR": size,
                "BC": columns,
                "ADDS": y is not None,
                "GATED": gate is not None,
                "num_warps": 4,
                "num_stages": 1,
            },
        )

    tensors = (x, added, gates, weight, out, out if y is None else total, inverse)
    start(_launches, (eps, dtype, kind(x, y, gate, weight)), rms_norm_kernel, tensors, describe)
    return out, total, inverse


def shapes(x: Any, y: Any, gate: Any, weight: Any, eps: Any, dtype: Any) -> Any:
    total = x.new_empty(0) if y is None else x.new_empty(x.shape)
    return x.new_empty(x.shape, dtype=dtype), total, x.new_empty(x.shape[0], dtype=torch.float32)


def run_backward(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, gate: Tensor | None, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (to which dtotal is added), of gate (empty without one) and of the weight."""
    rows, channels = x.shape
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dtotal = dtotal if dtotal is None or dtotal.stride(-1) == 1 else dtotal.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(0 if gate is None else gate.shape, dtype=x.dtype if gate is None else gate.dtype, device=x.device)
    size, columns = blocks(channels, BLOCK // 2)
    steps = -(-rows // size)
    stretch = -(-steps // (GRADIENT_PROGRAMS * processors(x.device)))
    programs = -(-steps // stretch)
    partial = torch.empty(programs, channels, dtype=torch.float32, device=x.device)
    gates, added = x if gate is None else gate, x if dtotal is None else dtotal

    def describe() -> Description:
        return (
            (programs,),
            (rows, stretch, x.stride(0), gates.stride(0), dout.stride(0), added.stride(0)),
            {
                "C": channels,
                "BR": size,
                "BC": columns,
                "ADDS": dtotal is not None,
                "GATED": gate is not None,
                "STAGES": GRADIENT_STAGES,
                "num_warps": 4,
            },
        )

    tensors = (x, gates, weight, dout, added, inverse, dx, dx if gate is None else dgate, partial)
    start(_launches, ("gradient", kind(dout, dtotal, x, gate, weight)), rms_norm_gradient_kernel, tensors, describe)
    return dx, dgate, partial.sum(0).to(weight.dtype)


def gradient_shapes(dout: Any, dtotal: Any, x: Any, gate: Any, weight: Any, inverse: Any) -> Any:
    dgate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
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
    return dx, dx.to(ctx.y_dtype) if has_y else None, None if gate is None else dgate, dweight


normalise, forward, backward = operator(
    "rms_norm", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients, outputs=2
)
