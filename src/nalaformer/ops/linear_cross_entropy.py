"""Compute the cross-entropy of a projection without storing the logits of all rows."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .backend import runs_kernels
from .features import compute_dtype, outside_autocast
from .kept_tensors import is_transformed
from .rms_norm import product_dtype

# logits of a chunk in plain torch
LOGITS = 1 << 24


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Sum log sum_j exp(w_j . h) - w_target . h over all rows except those whose target is ignore_index.

    hidden: [..., C]; weight: [V, C]; targets: [...] integers below V -> a number, in float32 (float64 for float64).
    Memory: the logits of one chunk of rows exist at a time. On a GPU their gradients are computed at once; in plain torch the
    backward pass computes the logits again.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten().to(hidden.device)
    if runs_kernels(hidden):
        from .kernels.tokenwise import linear_cross_entropy_op

        dtype = product_dtype(hidden)
        keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        with outside_autocast(hidden):
            return linear_cross_entropy_op.sum_losses(
                hidden.to(dtype).contiguous(), weight.to(dtype), targets.contiguous(), ignore_index, keep
            )
    rows, size = hidden.shape[0], max(1, LOGITS // max(1, weight.shape[0]))
    # torch.compile cannot trace a loop over a changing number of tokens
    if rows <= size or torch.compiler.is_compiling():
        return _sum_losses(hidden, weight, targets, ignore_index)
    total = hidden.new_zeros((), dtype=compute_dtype(hidden))
    for some, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        if torch.is_grad_enabled() and not is_transformed():
            total = total + checkpoint(_sum_losses, some, weight, wanted, ignore_index, use_reentrant=False)
        else:
            total = total + _sum_losses(some, weight, wanted, ignore_index)
    return total


def _sum_losses(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(compute_dtype(logits)), targets, ignore_index=ignore_index, reduction="sum")
