"""Convolve tokens on a grid depth-wise."""

import torch.nn.functional as F
from torch import Tensor

from .backend import runs_kernels

# kernel sizes that the GPU kernels support
FUSED_SIZES = (3, 5)


def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    grid: tuple[int, int],
    plus: Tensor | None = None,
    residual: bool = False,
    gelu: bool = False,
) -> Tensor:
    """Convolve each channel over its neighbours on the grid, zeros outside, and add `plus`, or with `residual` the input.

    x, plus: [B, N, C], row by row; weight: [W, 1, K, K], K odd; bias: [W]; C a multiple of W, whose kernels the heads share.
    gelu: convolve gelu(x) instead of x, which the kernels compute as they read x; `plus` is added unchanged.
    """
    _, tokens, channels = x.shape
    if tokens != grid[0] * grid[1]:
        raise ValueError(f"grid must cover the tokens: {grid[0]} x {grid[1]} = {grid[0] * grid[1]}, got {tokens} tokens")
    if channels % weight.shape[0]:
        raise ValueError(f"channels must be a multiple of the kernels ({weight.shape[0]}), got {channels}")
    if residual and plus is not None:
        raise ValueError("residual=True already adds the input, but plus was given too; pass only one of them")
    same = plus is None or plus.dtype == x.dtype
    if weight.shape[-1] in FUSED_SIZES and same and runs_kernels(x) and x.numel() > 0:
        from .kernels.tokenwise.depthwise_op import convolve

        # a flag: hooks of torch and compiled programs pass the same tensor as two tensors
        is_residual = residual or (plus is x and not gelu)
        x = x if x.stride(-1) == 1 else x.contiguous()
        plus = None if is_residual else plus if plus is None or plus.stride(-1) == 1 else plus.contiguous()
        return convolve(x, plus, weight.contiguous(), bias, *grid, is_residual, gelu)
    x = F.gelu(x) if gelu else x
    plus = x if residual else plus
    heads = channels // weight.shape[0]
    if heads > 1:
        weight, bias = weight.repeat(heads, 1, 1, 1), None if bias is None else bias.repeat(heads)
    # this view is channels_last to a batch of one too, for which a CPU would otherwise copy to the slower format and back
    image = x.unflatten(1, grid).permute(0, 3, 1, 2)
    mixed = F.conv2d(image, weight, bias, padding=weight.shape[-1] // 2, groups=channels)
    mixed = mixed.flatten(2).transpose(1, 2)
    return mixed if plus is None else plus + mixed
