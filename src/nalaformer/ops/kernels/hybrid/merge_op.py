"""Merge hybrid attention's branches as an operator; compiled/merge.py has the formula."""

from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, kind, start
from ..common.op import operator
from .compiled.merge import merge_branches_kernel, merge_gradient_kernel
from .launch import LAUNCHES, pad_size

# elements that a program holds at once
BLOCK = 4096


def run_forward(
    row_max: Tensor,
    total: Tensor,
    weighted: Tensor,
    linear_total: Tensor | None,
    linear_weighted: Tensor | None,
    gate: Tensor | None,
    share: Tensor | None,
    is_released: bool,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return [..., V] in `dtype`, from weighted sums [..., V] and totals [...] of both branches and the gate [..., V or 1].

    share: factors of the linear sums, each for an equal number of consecutive rows [...].
    """
    out = torch.empty(weighted.shape, dtype=dtype, device=weighted.device)
    tensors = _contiguous(row_max, total, weighted, linear_total, linear_weighted, gate, share)
    _start("merge", merge_branches_kernel, tensors, (out,), linear_weighted is not None, gate, share, is_released, eps)
    return out


def run_backward(
    dout: Tensor,
    row_max: Tensor,
    total: Tensor,
    weighted: Tensor,
    linear_total: Tensor | None,
    linear_weighted: Tensor | None,
    gate: Tensor | None,
    share: Tensor | None,
    is_released: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of all tensors but share; empty ones for tensors that are None."""
    tensors = _contiguous(row_max, total, weighted, linear_total, linear_weighted, gate, share)
    found = tuple(
        torch.empty(0 if x is None else x.shape, dtype=(weighted if x is None else x).dtype, device=weighted.device)
        for x in (total, weighted, linear_total, linear_weighted, gate)
    )
    dtotal, dweighted, dlinear_total, dlinear, dgate = found
    dmax = torch.empty_like(total)
    places = (dout.contiguous(), dweighted, dtotal, dlinear, dlinear_total, dgate, dmax)
    _start("merge gradient", merge_gradient_kernel, tensors, places, linear_weighted is not None, gate, share, is_released, eps)
    return dmax, dtotal, dweighted, dlinear_total, dlinear, dgate


def _contiguous(row_max: Tensor, total: Tensor, weighted: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
    """Return contiguous tensors in the order of the kernels; unused pointers need a tensor too.

    rest: linear_total, linear_weighted, gate, share.
    """
    linear_total, linear_weighted, gate, share = rest
    tensors = (weighted, total, row_max, linear_weighted, linear_total, gate, share)
    return tuple((weighted if x is None else x).contiguous() for x in tensors)


def _start(
    name: str,
    kernel: object,
    tensors: tuple[Tensor, ...],
    places: tuple[Tensor, ...],
    has_linear: bool,
    gate: Tensor | None,
    share: Tensor | None,
    is_released: bool,
    eps: float,
) -> None:
    rows, values = tensors[1].numel(), tensors[0].shape[-1]
    rows_per_share = 0 if share is None else rows // max(1, share.numel())
    numbers = 0 if gate is None else gate.shape[-1]
    if not rows:
        return

    def describe() -> Description:
        columns = pad_size(values)
        size = max(1, BLOCK // columns)
        constants = {"V": values, "BR": size, "BV": columns, "HAS_LINEAR": has_linear, "GATE": numbers}
        constants |= {"RELEASED": is_released, "BOUNDED": share is not None, "num_warps": 4, "num_stages": 1}
        return (-(-rows // size),), (rows, rows_per_share, eps), constants

    key = (name, has_linear, numbers, rows_per_share, is_released, eps, kind(*tensors, *places))
    start(LAUNCHES, key, kernel, (*tensors, *places), describe)


def shapes(row_max: Any, total: Any, weighted: Any, *rest: Any) -> Any:
    return weighted.new_empty(weighted.shape, dtype=rest[-1])


def gradient_shapes(dout: Any, row_max: Any, total: Any, weighted: Any, *rest: Any) -> Any:
    return tuple(weighted.new_empty(0) if x is None else x.new_empty(x.shape) for x in (row_max, total, weighted, *rest[:3]))


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:9]


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    return run(dout, *ctx.saved_tensors, *ctx.settings)


merge, forward, backward = operator(
    "hybrid_merge", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
