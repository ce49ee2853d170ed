"""Compute one token of hybrid attention as an operator; compiled/step.py explains it."""

from typing import Any

import torch
import triton
from torch import Tensor

from ...backend import INTERPRETING
from ..common.launch import use_device
from ..common.op import custom_op
from .compiled.step import join_kernel, split_kernel

# the target of programs on a GPU, the most splits of a head, and places of a tile
PROGRAMS, MOST_SPLITS, TILE = 512, 64, 64
# more tokens than any text has
UNLIMITED = 2**31 - 1


def run_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    is_poisoned: Tensor,
    state: Tensor | None,
    key_sum: Tensor | None,
    features: Tensor | None,
    matrix: Tensor | None,
    gate: Tensor | None,
    chunk_size: int,
    salient_per_chunk: int,
    largest_store: int | None,
    linear_mass: int | None,
    scale: float,
    eps: float,
    is_exact: bool,
) -> Tensor:
    """Return the output [B, 1, H, V] of one token.

    q: [B, 1, H, D], k, v: [B, 1, K, *]; keys, values: [B, S, A, *]; count, is_poisoned: [B]; state, key_sum: None without a
    linear branch; features [B, 1, H, F], or the matrix [H, D, D] from which the norm preserving map is computed here;
    gate: [B, 1, H, V or 1]; linear_mass: see HybridSettings.
    """
    (batch, _, heads, head_dim), value_dim = q.shape, v.shape[-1]
    store_heads, places = keys.shape[1:3]
    group = heads // store_heads
    padded_group, padded_head, padded_value = (max(16, triton.next_power_of_2(size)) for size in (group, head_dim, value_dim))
    all_tiles = -(-places // TILE)
    splits = min(all_tiles, MOST_SPLITS, max(1, PROGRAMS // (batch * store_heads)))
    tiles = -(-all_tiles // splits)
    splits = -(-all_tiles // tiles)
    # the interpreter's products of bfloat16 are wrong
    is_half = not INTERPRETING and q.dtype == keys.dtype == values.dtype != torch.float32
    row_max, total = (torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    share = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    weighted = torch.empty(batch, heads, splits, value_dim, dtype=torch.float32, device=q.device)
    with use_device(q):
        split_kernel[(batch * store_heads, splits)](
            *(q, k, v, keys, values, count, is_poisoned, row_max, total, weighted, share),
            *(store_heads, store_heads // k.shape[2], places, splits, tiles, chunk_size, salient_per_chunk),
            *(UNLIMITED if largest_store is None else largest_store, UNLIMITED if linear_mass is None else linear_mass, scale),
            *(q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2)),
            G=group,
            D=head_dim,
            V=value_dim,
            BG=padded_group,
            BA=TILE,
            BD=padded_head,
            BV=padded_value,
            HALF=is_half,
            num_warps=4,
            num_stages=2 if is_half else 1,
        )
    out = torch.empty(batch, 1, heads, value_dim, dtype=q.dtype, device=q.device)
    # any tensor can stand for one that the kernel does not read
    absent = [row_max if x is None else x for x in (matrix, features, state, key_sum, gate)]
    gate_strides = (0, 0, 0) if gate is None else (gate.stride(0), gate.stride(2), gate.stride(3) if gate.shape[3] > 1 else 0)
    with use_device(q):
        join_kernel[(batch * heads,)](
            *(row_max, total, weighted, share, q, *absent, count, out),
            *(heads, splits, 0 if key_sum is None else key_sum.shape[-1], eps, q.stride(0), q.stride(2), *gate_strides),
            D=head_dim,
            V=value_dim,
            BD=padded_head,
            BV=padded_value,
            BP=triton.next_power_of_2(splits),
            BF=64,
            LINEAR=state is not None,
            HAS_MATRIX=matrix is not None,
            GATED=gate is not None,
            EXACT=is_exact,
            num_warps=4,
        )
    return out


def shapes(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


hybrid_step = custom_op("hybrid_step", run_step, shapes, mutates=("keys", "values", "count"))
