"""A learned position table that serves every grid."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.exporting import is_jit_tracing


class PositionTable(nn.Module):
    """A vector per cell of a grid, [1, cells, C], interpolated (bicubic) to other grids."""

    def __init__(self, *, channels: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = (grid[0], grid[1])
        self.table = nn.Parameter(torch.zeros(1, grid[0] * grid[1], channels))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        # an exported or traced program must not decide by the size of its example
        is_exported = torch.compiler.is_exporting() or is_jit_tracing()
        return self.table if not is_exported and tuple(grid) == self.grid else interpolated(self.table, self.grid, grid)

    @torch.no_grad()
    def resample(self, grid: tuple[int, int]) -> None:
        """Resample the table to another grid in place, to learn it there."""
        if tuple(grid) != self.grid:
            self.table = nn.Parameter(resampled(self.table, self.grid, grid), requires_grad=self.table.requires_grad)
            self.grid = (grid[0], grid[1])


def interpolated(table: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """The table [1, cells, C] of a grid at the cells of another, a view."""
    image = table.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(image, size=new_grid, mode="bicubic").flatten(2).transpose(1, 2)


def resampled(table: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """The same as a table of its own."""
    return interpolated(table, grid, new_grid).contiguous()
