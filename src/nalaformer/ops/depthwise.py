"""Depth-wise convolution of tokens on a grid."""

import torch.nn.functional as F
from torch import Tensor

from .backend import runs_kernels

# sides of kernels that the GPU kernels know
FUSED_SIZES = (3, 5)


def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    grid: tuple[int, int],
    plus: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Each channel convolved over its neighbours on the grid, zeros outside, and `plus` added; x itself makes it residual.

    x, plus: [B, N, C], row by row; weight: [W, 1, K, K], K odd; bias: [W]; C a multiple of W, whose kernels the heads share.
    gelu: gelu(x) stands for x, as the kernels compute it where they read x.
    """
    batch, tokens, channels = x.shape
    if tokens != grid[0] * grid[1]:
        raise ValueError(f"grid must cover the tokens: {grid[0]} x {grid[1]} = {grid[0] * grid[1]}, got {tokens} tokens")
    if channels % weight.shape[0]:
        raise ValueError(f"channels must be a multiple of the kernels ({weight.shape[0]}), got {channels}")
    same = plus is None or plus.dtype == x.dtype
    if weight.shape[-1] in FUSED_SIZES and same and runs_kernels(x) and batch > 0:
        from .kernels.tokenwise.depthwise_op import convolve

        # told by a flag: a compiled program hands the same tensor over as two
        is_residual = plus is x
        x = x if x.stride(-1) == 1 else x.contiguous()
        plus = None if is_residual else plus if plus is None or plus.stride(-1) == 1 else plus.contiguous()
        return convolve(x, plus, weight.contiguous(), bias, *grid, is_residual, gelu)
    if gelu:
        y = F.gelu(x)
        x, plus = y, y if plus is x else plus
    heads = channels // weight.shape[0]
    image = x.transpose(1, 2).reshape(batch * heads, weight.shape[0], *grid)
    mixed = F.conv2d(image, weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    mixed = mixed.reshape(batch, channels, tokens).transpose(1, 2)
    return mixed if plus is None else plus + mixed
