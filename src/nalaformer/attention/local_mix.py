"""Depth-wise convolution of the values: what linear attention lacks nearby."""

import torch.nn.functional as F
from torch import Tensor, nn


class LocalMix(nn.Module):
    """Values [B, N, H, V] of a grid -> [B, N, C], each channel convolved over its neighbours.

    One kernel per channel, or (`shared`) one per channel of a head, used by every head.
    """

    def __init__(self, *, num_heads: int, head_dim: int, kernel_size: int, shared: bool) -> None:
        super().__init__()
        channels = head_dim if shared else num_heads * head_dim
        self.shared = shared
        self.conv = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def forward(self, v: Tensor, grid: tuple[int, int]) -> Tensor:
        batch, tokens, heads, size = v.shape
        image = v.permute(0, 2, 3, 1)  # [B, H, V, N]
        image = image.reshape(batch * heads, size, *grid) if self.shared else image.reshape(batch, heads * size, *grid)
        return self.conv(image).reshape(batch, heads * size, tokens).transpose(1, 2)


def resize_values(v: Tensor, from_grid: tuple[int, int], to_grid: tuple[int, int], how: str) -> Tensor:
    """Bring values [B, n, H, V] of a reduced grid to the tokens of the full one.

    "flat" interpolates along the flattened tokens, across row ends, as the published code does; "grid" in two dimensions.
    """
    batch, _, heads, size = v.shape
    channels = v.flatten(2).transpose(1, 2)  # [B, C, n]
    if how == "flat":
        full = F.interpolate(channels, size=to_grid[0] * to_grid[1], mode="linear")
    else:
        image = channels.reshape(batch, heads * size, *from_grid)
        full = F.interpolate(image, size=to_grid, mode="bilinear").flatten(2)
    return full.transpose(1, 2).unflatten(-1, (heads, size))
