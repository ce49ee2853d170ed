"""Layer norm, and the gate that may follow it."""

import torch.nn.functional as F
from torch import Tensor

from .backend import runs_kernels

# beyond it a row does not fit on chip beside its gradient's sums
MOST_CHANNELS = 4096


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, gate: Tensor | None = None) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last dimension, times silu(gate) where there is one.

    x, gate: [..., C] -> [..., C] in the type of x.
    """
    if runs_kernels(x) and x.shape[-1] <= MOST_CHANNELS and x.numel() > 0:
        from .kernels.tokenwise.layer_norm_op import normalise

        rows, gates = rows_of_all(x, gate)
        out = normalise(rows, gates, weight, bias, eps)
        return out if rows is x else out.view(x.shape)
    out = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return out if gate is None else out * F.silu(gate)


def rows_of_all(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both as the kernels take them: as they are if they have no gaps, else as rows [R, C].

    A view has a gradient of its own, which takes the host as long as that of the norm.
    """
    if x.is_contiguous() and (y is None or y.is_contiguous()):
        return x, y
    return rows_of(x), None if y is None else rows_of(y)


def rows_of(x: Tensor) -> Tensor:
    """[R, C]: a view where the rows lie at even distances, as those of a slice of a projection do."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
