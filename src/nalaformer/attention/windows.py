"""Attention inside windows of a grid, shifted or not, with a learned bias for each offset (Swin)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cells import Grid

MOST_PARTS = 4  #  parts of a shifted window that do not see each other


class Groups(NamedTuple):
    """Tokens that see only their own group: the group of each token [B, N], and the group numbers that occur."""

    of_tokens: Tensor
    numbers: Sequence[int]

    def join(self, compute: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
        """Run compute(mask of a group, [B, N] bool) -> [B, N, ...] for each group; each token takes the result of its group."""
        # a token without a group must not look like a result
        out = torch.full_like(like, torch.nan)
        for number in self.numbers:
            inside = self.of_tokens == number
            out = torch.where(inside.unflatten(1, (-1, *[1] * (like.dim() - 2))), compute(inside), out)
        return out


class Windows:
    """A partition of a grid of tokens into windows of at most `size` x `size`.

    Shifted: the grid is rolled by half a window first, so that windows straddle the borders of unshifted ones. Wrapped tokens
    and padding are masked from all other tokens. A side that fits into one window is neither padded nor shifted.
    """

    def __init__(self, grid: Grid, *, size: int, shifted: bool) -> None:
        self.grid = grid
        self.shape = (min(size, grid[0]), min(size, grid[1]))
        self.shift = tuple(size // 2 if shifted and side > size else 0 for side in grid)
        self.padding = tuple(-side % step for side, step in zip(grid, self.shape, strict=True))
        self.counts = tuple(-(-side // step) for side, step in zip(grid, self.shape, strict=True))

    @property
    def count(self) -> int:
        """The number of windows of one image."""
        return self.counts[0] * self.counts[1]

    @property
    def tokens(self) -> int:
        """The number of tokens of one window."""
        return self.shape[0] * self.shape[1]

    def split(self, x: Tensor) -> Tensor:
        """Split tokens into windows: [B, N, ...] -> [B * count, tokens, ...]; padding holds zeros (False)."""
        image = x.unflatten(1, self.grid)
        if any(self.padding):
            image = F.pad(image, (0, 0) * (x.dim() - 2) + (0, self.padding[1], 0, self.padding[0]))
        if any(self.shift):
            image = image.roll((-self.shift[0], -self.shift[1]), dims=(1, 2))
        cells = image.unflatten(2, (self.counts[1], self.shape[1])).unflatten(1, (self.counts[0], self.shape[0]))
        return cells.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def join(self, x: Tensor) -> Tensor:
        """Join windows, the inverse of `split`: [B * count, tokens, ...] -> [B, N, ...]."""
        cells = x.unflatten(1, self.shape).unflatten(0, (-1, *self.counts))
        image = cells.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            image = image.roll(self.shift, dims=(1, 2))
        return image[:, : self.grid[0], : self.grid[1]].flatten(1, 2)

    def visible(self, key_mask: Tensor | None, like: Tensor) -> Tensor | None:
        """Return which tokens of each window are real, [B * count, tokens] bool; None: all. `like` is [B, N, ...]."""
        if key_mask is None:
            if not any(self.padding):
                return None
            key_mask = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
        return self.split(key_mask)

    def groups(self, like: Tensor) -> Groups | None:
        """Return the parts of each window as groups [B * count, tokens]; None: all tokens see each other."""
        if not any(self.shift):
            return None
        rows, columns = (
            torch.arange(side, device=like.device) < shift for side, shift in zip(self.grid, self.shift, strict=True)
        )
        # a token wrapped around vertically, horizontally, both ways or not at all
        kind = 2 * rows[:, None].long() + columns
        return Groups(self.split(kind.flatten().expand(like.shape[0], -1)), range(MOST_PARTS))


def held_to_sizes(grid: Grid, x: Tensor) -> tuple[Grid, Tensor]:
    """Return the grid as ints, and x in a traced program that fails on every other grid.

    torch.jit.trace records how the windows of its example are split, padded and shifted, which is wrong for other sizes.
    """
    known = (int(grid[0]), int(grid[1]))
    zero = sum(x.new_zeros((side,)).view(number).sum() for side, number in zip(grid, known, strict=True))
    return known, x + zero


class RelativeBias(nn.Module):
    """A learned bias for each head and offset (rows, columns) between a query and a key: [1, H, tokens, tokens]."""

    def __init__(self, *, num_heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.bias = nn.Parameter(torch.zeros((2 * size - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.bias, std=0.02)

    def forward(self, shape: Grid) -> Tensor:
        device = self.bias.device
        rows, columns = (torch.arange(side, device=device) for side in shape)
        row_offset = (rows[:, None] - rows + self.size - 1)[:, None, :, None]
        column_offset = (columns[:, None] - columns + self.size - 1)[None, :, None, :]
        index = (row_offset * (2 * self.size - 1) + column_offset).flatten(2).flatten(0, 1)  # [tokens, tokens]
        # F.embedding, since the backward pass of indexing with a tensor is slow on a GPU
        return F.embedding(index, self.bias).permute(2, 0, 1)[None]
