"""A learned position table that serves every grid."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PositionTable(nn.Module):
    """A vector per cell of a grid, [1, cells, C], interpolated (bicubic) to other grids."""

    def __init__(self, *, channels: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = tuple(grid)
        self.table = nn.Parameter(torch.zeros(1, grid[0] * grid[1], channels))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        # an exported program must not decide by the size of its example
        if not torch.compiler.is_exporting() and tuple(grid) == self.grid:
            return self.table
        image = self.table.transpose(1, 2).unflatten(2, self.grid)
        return F.interpolate(image, size=grid, mode="bicubic").flatten(2).transpose(1, 2)
