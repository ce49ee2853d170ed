"""Compute the residual connection with a scale per channel and dropped samples."""

from torch import Tensor

from .backend import runs_kernels
from .layer_norm import MOST_CHANNELS


def scaled_residual(x: Tensor, y: Tensor, *, scale: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
    """Return x + scale * keep * y. x, y: [B, N, C]; scale: [C]; keep: [B], which gets no gradient."""
    if scale is None and keep is None:
        return x + y
    fits = x.dtype == y.dtype and y.shape == x.shape and x.shape[-1] <= MOST_CHANNELS and x.numel() > 0
    if fits and runs_kernels(x):
        from .kernels.tokenwise.residual_op import add

        return add(x.contiguous(), y.contiguous(), scale, keep)
    if scale is not None:
        y = y * scale
    return x + (y if keep is None else y * keep[:, None, None])
