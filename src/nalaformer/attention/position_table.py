"""A learned position table for grids of any size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.exporting import is_jit_tracing


class PositionTable(nn.Module):
    """A learned vector per cell of a grid, [1, cells, C], interpolated (bicubic) to other grids."""

    def __init__(self, *, channels: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = (grid[0], grid[1])
        self.table = nn.Parameter(torch.zeros(1, grid[0] * grid[1], channels))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        # an exported or traced program must not branch on the size of its example
        is_exported = torch.compiler.is_exporting() or is_jit_tracing()
        return self.table if not is_exported and tuple(grid) == self.grid else interpolate_table(self.table, self.grid, grid)

    @torch.no_grad()
    def resample(self, grid: tuple[int, int]) -> None:
        """Resample the table to another grid in place, to train it there."""
        if tuple(grid) != self.grid:
            self.table = nn.Parameter(resample_table(self.table, self.grid, grid), requires_grad=self.table.requires_grad)
            self.grid = (grid[0], grid[1])


def interpolate_table(table: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Return a view of the table [1, cells, C], interpolated to another grid."""
    image = table.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(image, size=new_grid, mode="bicubic").flatten(2).transpose(1, 2)


def resample_table(table: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Return a contiguous copy of the table, interpolated to another grid."""
    return interpolate_table(table, grid, new_grid).contiguous()
