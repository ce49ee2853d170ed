"""Gather and scatter of some cells of a grid."""

from torch import Tensor

Grid = tuple[int, int]


def cells_at(x: Tensor, places: Tensor) -> Tensor:
    """Gather the cells `places` [B, n] of x [B, N, ...]: [B, n, ...]."""
    index = places.unflatten(1, (-1, *[1] * (x.dim() - 2)))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def on_grid(x: Tensor, grid: Grid, places: Tensor) -> Tensor:
    """Scatter x [B, n, ...] to the cells `places` [B, n] of a grid, zeros elsewhere: [B, N, ...]."""
    return put_back(x.new_zeros(len(x), grid[0] * grid[1], *x.shape[2:]), x, places)


def put_back(whole: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """Return `whole` [B, N, ...] with x [B, n, ...] in the cells `places` [B, n]."""
    index = places.unflatten(1, (-1, *[1] * (x.dim() - 2)))
    return whole.scatter(1, index.expand(-1, -1, *x.shape[2:]), x)
