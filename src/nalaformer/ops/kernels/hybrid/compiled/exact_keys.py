"""Compute gradients of the keys and values of hybrid attention's exact branch; exact.py explains them."""

import triton
import triton.language as tl

from ...common.compiled.tiles import store_rows
from .exact import LN_2, add_key_gradients, load_keys, load_queries


@triton.jit(do_not_specialize=["groups"])
def exact_window_kernel(
    q_ptr,  # [B, R * l, H, D]
    k_ptr,  # [B, slots, K, D]
    v_ptr,  # [B, slots, K, V]
    first_ptr,  # [B] int32: the first slot that exists
    max_ptr,  # [B, R * l, H] float32
    dtotal_ptr,  # [B, R * l, H] float32
    dout_ptr,  # [B, R * l, H, V]
    best_ptr,  # [B, R * l, H] int32; only with KEEP_BEST
    dmax_ptr,  # [B, R * l, H] float32; only with KEEP_BEST
    dk_ptr,  # [B, slots, K, D]
    dv_ptr,  # [B, slots, K, V]
    groups,
    chunk,
    heads,
    group_heads,
    stride_qb,
    stride_q,
    stride_qh,
    stride_kb,
    stride_k,
    stride_kh,
    stride_vb,
    stride_v,
    stride_vh,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KEEP_BEST: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    key_heads = heads // group_heads
    sample = tl.cast(tl.program_id(1) // key_heads, tl.int64)
    key_head = tl.program_id(1) % key_heads
    blocks = tl.cdiv(chunk, BN)
    place = tl.program_id(0) // blocks
    within = (tl.program_id(0) % blocks) * BN
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BM)
    keys = tl.arange(0, BN)
    first = place * chunk + within
    there = within + keys < chunk
    k_ptr += sample * stride_kb + key_head * stride_kh
    v_ptr += sample * stride_vb + key_head * stride_vh
    k, v = load_keys(k_ptr, v_ptr, first, keys, there, stride_k, stride_v, D, V, BD, BV, DOT)
    seen = there & (first + keys >= tl.load(first_ptr + sample))
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BV], tl.float32)
    q_ptr += sample * stride_qb
    parts = tl.cdiv(chunk, BM)
    # a chunk is seen by its own group, number place - 1, and by the next one; the last chunk has no next one
    begin = tl.maximum(place - 1, 0)
    count = tl.minimum(place + 1, groups) - begin
    for step in range(0, count * group_heads * parts):
        group = begin + step // (group_heads * parts)
        head = key_head * group_heads + (step // parts) % group_heads
        part = step % parts
        ok = part * BM + rows < chunk
        row = group * chunk + part * BM
        line = sample * groups * chunk * heads + head
        q, dout, row_max, dtotal, best, dmax = load_queries(
            q_ptr + head * stride_qh,
            *(dout_ptr + line * V, max_ptr + line, dtotal_ptr + line, best_ptr + line, dmax_ptr + line),
            *(row, rows, ok, heads, stride_q, heads * V, D, V, BD, BV, KEEP_BEST, DOT),
        )
        visible = ok[None, :] & seen[:, None] & (first + keys[:, None] <= row + chunk + rows[None, :])
        dk, dv = add_key_gradients(
            q, k, v, dout, visible, first + keys, scale, row_max, dtotal, best, dmax, dk, dv, KEEP_BEST, DOT, PRECISION
        )
    line = sample * (groups + 1) * chunk * key_heads + key_head
    store_rows(dk_ptr + line * D, dk * (scale * LN_2), first, keys, there, channels, channels < D, key_heads * D)
    store_rows(dv_ptr + line * V, dv, first, keys, there, columns, columns < V, key_heads * V)


@triton.jit(do_not_specialize=["groups", "split_size", "entries", "old"])
def exact_store_kernel(
    q_ptr,  # [B, R * l, H, D]
    store_k_ptr,  # [B, S, E, D]
    store_v_ptr,  # [B, S, E, V]
    until_ptr,  # [B, S, E] int32
    max_ptr,  # [B, R * l, H] float32
    dtotal_ptr,  # [B, R * l, H] float32
    dout_ptr,  # [B, R * l, H, V]
    best_ptr,  # [B, R * l, H] int32; only with KEEP_BEST
    dmax_ptr,  # [B, R * l, H] float32; only with KEEP_BEST
    dk_ptr,  # [splits, B, S, E, D]
    dv_ptr,  # [splits, B, S, E, V]
    groups,
    split_size,  # groups of a split
    chunk,
    entries,
    old,
    per_chunk,
    heads,
    store_heads,
    stride_qb,
    stride_q,
    stride_qh,
    scale,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KEEP_BEST: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    owner = tl.cast(tl.program_id(1), tl.int64)
    sample = owner // (heads // store_heads)
    store_head = tl.program_id(1) % (heads // store_heads)
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BM)
    keys = tl.arange(0, BN)
    first = tl.program_id(0) * BN
    there = first + keys < entries
    k, v = load_keys(
        *(store_k_ptr + owner * entries * D, store_v_ptr + owner * entries * V),
        *(first, keys, there, D, V, D, V, BD, BV, DOT),
    )
    until = tl.load(until_ptr + owner * entries + first + keys, mask=there, other=0)
    numbers = (groups + 1) * chunk + first + keys
    # the first group that sees an entry: entries that enter with a chunk are seen from the group after its own on
    born = tl.where(first + keys < old, 0, (tl.maximum(first + keys - old, 0)) // tl.maximum(per_chunk, 1) + 1)
    begin = tl.maximum(tl.program_id(2) * split_size, tl.min(born, axis=0))
    stop = tl.minimum(tl.minimum((tl.program_id(2) + 1) * split_size, groups), tl.max(until, axis=0))
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BV], tl.float32)
    q_ptr += sample * stride_qb
    parts = tl.cdiv(chunk, BM)
    for step in range(0, tl.maximum(stop - begin, 0) * store_heads * parts):
        group = begin + step // (store_heads * parts)
        head = store_head * store_heads + (step // parts) % store_heads
        part = step % parts
        ok = part * BM + rows < chunk
        line = sample * groups * chunk * heads + head
        q, dout, row_max, dtotal, best, dmax = load_queries(
            q_ptr + head * stride_qh,
            *(dout_ptr + line * V, max_ptr + line, dtotal_ptr + line, best_ptr + line, dmax_ptr + line),
            *(group * chunk + part * BM, rows, ok, heads, stride_q, heads * V, D, V, BD, BV, KEEP_BEST, DOT),
        )
        visible = ok[None, :] & ((born <= group) & (group < until))[:, None]
        dk, dv = add_key_gradients(
            q, k, v, dout, visible, numbers, scale, row_max, dtotal, best, dmax, dk, dv, KEEP_BEST, DOT, PRECISION
        )
    line = (tl.program_id(2) * tl.num_programs(1) + owner) * entries
    store_rows(dk_ptr + line * D, dk * (scale * LN_2), first, keys, there, channels, channels < D, D)
    store_rows(dv_ptr + line * V, dv, first, keys, there, columns, columns < V, V)
