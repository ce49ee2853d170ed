"""Share code between the launches of hybrid attention's kernels: tiles, and the types of matrix operands."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backend import INTERPRETING
from ..common.launch import PRECISION, Launches

# matrix units take at least 16 rows at a time, and are no faster below 32
SMALLEST = 32
LAUNCHES = Launches()


class HybridTile(NamedTuple):
    """Hold the queries and keys of a tile, warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# by kernel, then by the padded size of the wider of both heads; for bfloat16, chosen by registers and shared memory
TILES = {
    "exact": {64: HybridTile(64, 64, 4, 3), 128: HybridTile(64, 64, 4, 2)},
    "exact_dq": {64: HybridTile(64, 64, 4, 2), 128: HybridTile(64, 64, 4, 2)},
    "exact_window": {64: HybridTile(32, 64, 4, 2), 128: HybridTile(32, 64, 4, 2)},
    "exact_store": {64: HybridTile(32, 64, 4, 3), 128: HybridTile(64, 64, 8, 2)},
    "linear": {64: HybridTile(64, 64, 8, 2), 128: HybridTile(64, 64, 8, 2)},
}
# twice the bytes per element: half the rows fit
WIDE = HybridTile(SMALLEST, SMALLEST, 8, 1)


def pad_size(size: int) -> int:
    return max(SMALLEST, triton.next_power_of_2(size))


def operand(*tensors: Tensor) -> torch.dtype:
    """Return the type in which matrices are multiplied: bfloat16 if all are, else float32."""
    # the interpreter rounds and multiplies bfloat16 wrongly
    is_half = not INTERPRETING and all(x.dtype == torch.bfloat16 for x in tensors)
    return torch.bfloat16 if is_half else torch.float32


def tile_for(kernel: str, width: int, dtype: torch.dtype) -> HybridTile:
    """Return the tile for heads of `width` channels."""
    if dtype != torch.bfloat16:
        return WIDE
    return next(tile for size, tile in TILES[kernel].items() if width <= size)


def operand_constants(dtype: torch.dtype) -> dict[str, object]:
    return {"DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "PRECISION": PRECISION[dtype]}


def with_dense_rows(x: Tensor) -> Tensor:
    """Return x with its channels side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()
