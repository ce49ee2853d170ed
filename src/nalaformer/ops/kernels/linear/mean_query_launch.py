"""Sum the queries whose mean weighs the keys; compiled/mean_query.py has the formulas."""

import torch
from torch import Tensor

from ..common.launch import processors, strides
from .call import Call
from .compiled.mean_query import query_sums_kernel

# elements in a tile, 32 per thread; warps; tiles read ahead
TILE_NUMBERS, WARPS, AHEAD = 4096, 4, 3
PROGRAMS_PER_PROCESSOR = 8
# every program that reads keys adds up the sums of all splits
MOST_SPLITS = 64


def mean_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of the mean query's features with D^-1/2 / n behind them; empty where it weighs no keys."""
    if not call.settings.by_mean_query:
        return (0,)
    return call.samples * call.heads, call.settings.parts * call.head_dim + 1


def mask_kind(call: Call, mask: Tensor | None) -> object:
    """Return what a launch depends on of the mask of queries, which the caller provides."""
    return call.settings.by_mean_query and mask is not None and (mask.data_ptr() % 16,)


def sum_queries(call: Call, q: Tensor, mask: Tensor | None) -> Tensor:
    """Sum features of queries over splits of them, and count them: [splits, B * H, PARTS * D + 1].

    mask: [B, N], or None.
    """
    rows = call.samples * call.heads
    tile = max(16, TILE_NUMBERS // call.block_d)
    tiles = -(-call.num_queries // tile)
    most = min(MOST_SPLITS, PROGRAMS_PER_PROCESSOR * processors(call.device) // rows)
    split_size = -(-tiles // max(1, min(tiles, most))) * tile
    splits = -(-call.num_queries // split_size)
    sums = torch.empty((splits, *mean_shape(call)), dtype=torch.float32, device=call.device)
    call.start(
        ("query_sums", mask_kind(call, mask)),
        query_sums_kernel,
        (q, sums if mask is None else mask, sums),
        lambda: (
            call.state_kernel,
            (splits, rows),
            (call.num_queries, call.heads, split_size, *strides(q)),
            {
                **{"BN": tile, "HAS_QUERY_MASK": mask is not None, "AHEAD": AHEAD},
                **{"num_warps": WARPS, "num_stages": AHEAD},
            },
        ),
    )
    return sums
