"""Compute the cross-entropy of a projection as an operator: logits exist for some rows at a time, and become gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.launch import Description, Launches, kind, start
from ..common.op import operator
from .compiled.cross_entropy import cross_entropy_kernel

# logits that exist at once: 512 MiB in half precision, and still products of thousands of rows
LOGITS = 1 << 28
MOST_BLOCK = 4096
# matrix products are fast for multiples of this many rows
ALIGNED = 8
_launches = Launches()


def rows_at_once(classes: int) -> int:
    """Return the rows of a chunk, a multiple of 64, for which matrix products are fast."""
    return max(64, LOGITS // max(classes, 1) // 64 * 64)


def row_losses(logits: Tensor, targets: Tensor, ignored: int, keep: bool) -> Tensor:
    """Return the losses [R] float32; with `keep` the logits become the gradients of the losses."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)

    def describe() -> Description:
        rows, classes = logits.shape
        block = min(MOST_BLOCK, 1 << (classes - 1).bit_length())
        return (rows,), (classes, ignored), {"KEEP": keep, "BLOCK": block, "num_warps": 8, "num_stages": 1}

    key = (ignored, keep, kind(logits, targets))
    start(_launches, key, cross_entropy_kernel, (logits, targets, losses), describe)
    return losses


def product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def run_forward(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses and, with `keep`, its gradients by hidden [R, C] and by weight [V, C] in float32."""
    rows, size = hidden.shape[0], rows_at_once(weight.shape[0])
    # an odd number of rows would need slow matrix kernels
    missing = -rows % ALIGNED
    if missing:
        hidden, targets = F.pad(hidden, (0, 0, 0, missing)), F.pad(targets, (0, missing), value=ignored)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    dhidden = torch.empty(hidden.shape if keep else 0, dtype=hidden.dtype, device=hidden.device)
    dweight = torch.empty(0, dtype=torch.float32, device=hidden.device)
    for first in range(0, rows + missing, size):
        some = hidden[first : first + size]
        logits = some @ weight.t()
        total += row_losses(logits, targets[first : first + size], ignored, keep).sum()
        if keep:
            torch.mm(logits, weight, out=dhidden[first : first + size])
            part = product_in_float32(logits.t(), some)
            dweight = part if first == 0 else dweight.add_(part)
    return total, dhidden[:rows], dweight


def shapes(hidden: Any, weight: Any, targets: Any, ignored: Any, keep: Any) -> Any:
    total = hidden.new_empty((), dtype=torch.float32)
    return (
        total,
        hidden.new_empty(hidden.shape if keep else 0),
        weight.new_empty(weight.shape if keep else 0, dtype=torch.float32),
    )


def run_backward(dtotal: Tensor, dhidden: Tensor, dweight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gradients by hidden and by weight, the latter in `dtype`."""
    # in float32: a factor in half precision would round all gradients alike, and a gradient scaler's factor may overflow
    return (dhidden.float() * dtotal).to(dhidden.dtype), (dweight * dtotal).to(dtype)


def gradient_shapes(dtotal: Any, dhidden: Any, dweight: Any, dtype: Any) -> Any:
    return dhidden.new_empty(dhidden.shape), dweight.new_empty(dweight.shape, dtype=dtype)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    # the inputs stay in the graph, so that gradients of gradients raise their error
    ctx.save_for_backward(*inputs[:2], *output[1:])


def gradients(ctx: Any, run: Any, dtotal: Any) -> Any:
    _, weight, dhidden, dweight = ctx.saved_tensors
    return run(dtotal, dhidden, dweight, weight.dtype)


sum_losses, forward, backward = operator(
    "linear_cross_entropy", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
