"""Rows of attention as maps over the image: exact for the server, compressed for a page."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...attention.cells import Grid
from .. import LayerRecord, attention_entropy

# finer cells would not be visible on the page
MOST_CELLS = 28
# bytes of all maps of a page; base64 adds a third
MOST_BYTES = 6_000_000
QUERY_SIDES = (16, 14, 12, 10, 8, 7, 6, 5, 4)
CELL_SIDES = (MOST_CELLS, 14, 7)
# the number of queries whose rows exist at the same time
CHUNK = 64
ACCURACY = 1 / 255
"""Largest error of a stored weight, relative to the largest weight of its map: |u^2 - v^2| <= 1/255 for |u - v| <= 1/510."""


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Attention of R queries in all heads, as fractions of one."""

    entropy: Tensor
    """The entropy of the whole row in bits, [R, H]."""
    beside: Tensor
    """The attention to tokens that are no patches, [R, H, prefix]."""
    cells: Tensor
    """The attention to the cells of the image, [R, H, height, width]; a cell sums its tokens."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The layout of one layer's maps."""

    name: str
    kind: str
    heads: int
    grid: Grid
    """The grid of the query patches."""
    key_grid: Grid
    """The grid of the key patches, which is smaller if the layer reduces its keys."""
    prefix: int
    """The number of tokens before both grids."""
    queries: Grid
    """The patches whose rows are stored, evenly over the grid."""
    cells: Grid
    """The rows and columns of a map."""

    @property
    def beside(self) -> list[str]:
        return ["class token", *(f"register {number}" for number in range(1, self.prefix))][: self.prefix]

    def stored_queries(self) -> Tensor:
        """Return token indices: the middle patch of each part of the grid, then the tokens before the grid."""
        rows, columns = (
            torch.tensor([math.floor((part + 0.5) * side / count) for part in range(count)])
            for side, count in zip(self.grid, self.queries, strict=True)
        )
        patches = (rows[:, None] * self.grid[1] + columns).flatten() + self.prefix
        return torch.cat((patches, torch.arange(self.prefix)))

    def query_at(self, y: float, x: float) -> int:
        """Return the token of the patch at these fractions of height and width."""
        row, column = (min(side - 1, max(0, math.floor(part * side))) for part, side in zip((y, x), self.grid, strict=True))
        return self.prefix + row * self.grid[1] + column

    @property
    def keys(self) -> int:
        return math.prod(self.key_grid) + self.prefix

    @property
    def bytes(self) -> int:
        return (math.prod(self.queries) + self.prefix) * self.heads * (4 * (2 + self.prefix) + math.prod(self.cells))

    def describe(self) -> dict[str, Any]:
        """Return the layout as the page reads it."""
        shown = {name: list(getattr(self, name)) for name in ("grid", "queries", "cells", "beside")}
        return {"name": self.name, "kind": self.kind, "heads": self.heads, "keys": self.keys, **shown}


def full_layout(record: LayerRecord) -> Layer:
    """Return the full layout of a record: every patch is a query, and a cell is a patch."""
    grid, key_grid = record.grid, record.key_grid or record.grid
    assert grid is not None
    assert key_grid is not None
    kind = record.method if record.method in ("softmax", "hybrid") else f"linear, {record.method}"
    return Layer(
        name=record.name,
        kind=kind,
        heads=record.num_heads,
        grid=grid,
        key_grid=key_grid,
        prefix=record.prefix,
        queries=grid,
        cells=key_grid,
    )


def fit_layers(layers: Sequence[Layer], *, images: int, most_bytes: int = MOST_BYTES) -> list[Layer]:
    """Reduce the stored queries, and then the cells, until the maps of all layers fit into the page."""
    for cells in CELL_SIDES:
        for queries in QUERY_SIDES:
            chosen = [
                replace(layer, queries=at_most(layer.grid, queries), cells=at_most(layer.key_grid, cells)) for layer in layers
            ]
            if images * sum(layer.bytes for layer in chosen) <= most_bytes:
                return chosen
    raise ValueError(
        f"a page holds maps of {most_bytes:,} bytes, got more for {images} images of {len(layers)} layers; show fewer images"
    )


def at_most(grid: Grid, side: int) -> Grid:
    return min(grid[0], side), min(grid[1], side)


@torch.no_grad()
def compute_maps(record: LayerRecord, layer: Layer, queries: Tensor, *, image: int = 0) -> Maps:
    """Return rows of these tokens [R], some at a time, summed over the cells of the map."""
    height, width = (pooling_matrix(*sides) for sides in zip(layer.key_grid, layer.cells, strict=True))
    parts = []
    for some in queries.split(CHUNK):
        shares = record.shares(some.to(record.q.device))[image].transpose(0, 1).double().cpu()  # [R, H, keys]
        beside, patches = shares[..., : layer.prefix], shares[..., layer.prefix :].unflatten(-1, layer.key_grid)
        cells = torch.einsum("rhyx,ay,bx->rhab", patches, height, width)
        parts.append((attention_entropy(shares) / math.log(2), beside, cells))
    entropy, beside, cells = (torch.cat(each) for each in zip(*parts, strict=True))
    return Maps(entropy=entropy, beside=beside, cells=cells)


def pooling_matrix(side: int, cells: int) -> Tensor:
    """Return the fraction of each token in each of `cells` equal parts of the side, [cells, side]; columns sum to one."""
    ends = torch.arange(cells + 1, dtype=torch.float64) * side / cells
    start = torch.arange(side, dtype=torch.float64)
    overlap = torch.minimum(ends[1:, None], start + 1) - torch.maximum(ends[:-1, None], start)
    return overlap.clamp(min=0)


def encode_maps(maps: Maps) -> str:
    """Encode maps in base64: float32 [R, H, 2 + prefix] (largest weight, entropy, prefix), then codes [R, H, cells].

    code = round(255 sqrt(weight / largest)) in a byte, which keeps the differences of small weights.
    """
    largest = maps.cells.flatten(2).amax(-1)
    facts = torch.cat((largest[..., None], maps.entropy[..., None], maps.beside), dim=-1)
    codes = (255 * (maps.cells.flatten(2) / largest.clamp(min=1e-30)[..., None]).sqrt()).round().to(torch.uint8)
    return base64.b64encode(facts.numpy().astype("<f4").tobytes() + codes.numpy().tobytes()).decode()


def whole(maps: Maps) -> bytes:
    """Return the map of one query for the server: float32 [H, 1 + prefix + cells]."""
    facts = torch.cat((maps.entropy[..., None], maps.beside, maps.cells.flatten(2)), dim=-1)
    return facts[0].numpy().astype("<f4").tobytes()
