"""Depth-wise convolution of the values, which adds the locality that linear attention lacks."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import depthwise_conv


class DepthwiseConv(nn.Conv2d):
    """A kernel per channel, on tokens [B, N, C] of a grid, then `plus` is added; if there are more channels than kernels, the
    kernels repeat. residual: add the input. gelu: apply GELU to x first.
    """

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def forward(  # type: ignore[override]
        self, x: Tensor, grid: tuple[int, int], plus: Tensor | None = None, residual: bool = False, gelu: bool = False
    ) -> Tensor:
        return depthwise_conv(x, self.weight, self.bias, grid=grid, plus=plus, residual=residual, gelu=gelu)


class LocalMix(nn.Module):
    """Convolve values [B, N, H, V] of a grid depth-wise and add `plus`: [B, N, C].

    One kernel per channel, or (`shared`) one per channel of a head, used by every head.
    """

    def __init__(self, *, num_heads: int, head_dim: int, kernel_size: int, shared: bool) -> None:
        super().__init__()
        channels = head_dim if shared else num_heads * head_dim
        self.conv = DepthwiseConv(channels, kernel_size)

    def forward(self, v: Tensor, grid: tuple[int, int], plus: Tensor | None = None) -> Tensor:
        return self.conv(v.flatten(2), grid, plus)


def resize_values(v: Tensor, from_grid: tuple[int, int], to_grid: tuple[int, int], how: str) -> Tensor:
    """Resize values [B, n, H, V] of a reduced grid to the tokens of the full one.

    "flat" interpolates along the flattened tokens, across row ends, as the published code does; "grid" interpolates in 2-D.
    """
    batch, _, heads, size = v.shape
    channels = v.flatten(2).transpose(1, 2)  # [B, C, n]
    if how == "flat":
        full = F.interpolate(channels, size=to_grid[0] * to_grid[1], mode="linear")
    else:
        image = channels.reshape(batch, heads * size, *from_grid)
        full = F.interpolate(image, size=to_grid, mode="bilinear").flatten(2)
    return full.transpose(1, 2).unflatten(-1, (heads, size))
