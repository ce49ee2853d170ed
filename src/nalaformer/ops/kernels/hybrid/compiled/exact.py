"""Compute the exact branch of hybrid attention: softmax over a window of two chunks and a store of salient tokens.

    exact kernel         q, keys, store          -> row maximum, sum of weights, weighted values; a program has some queries
    exact dq kernel      those, their gradients  -> dq, the same way
    exact window kernel  those                   -> dk, dv of the slots; a program has some keys and the groups that see them
    exact store kernel   those                   -> gradients of the store, over some of the groups; partial sums are added up

Queries are rows [B, R * l, H, D] in groups of a chunk, l rows each; keys stand in slots [B, (R + 1) * l, K, D]. Group r sees
slots l r .. l (r + 2) - 1 up to its own, from `first` on, and the first `old + r * per_chunk` entries of the store, each while
r < until. Scores are in powers of two: the row maximum is log2 of the maximum of exp. A row that sees nothing has zeros.

Nothing of size queries x keys reaches memory, each loop runs in a fixed order and nothing is added atomically.
"""

import triton
import triton.language as tl

from ...common.compiled.fastmath import constant, exp2
from ...common.compiled.tiles import load_rows, store_rows

LN_2 = constant(0.6931471805599453)


@triton.jit
def masked_scores(x, y, visible, scale, PRECISION: tl.constexpr):
    """Return the scores of the rows of x and y; -inf where masked."""
    s = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
    return tl.where(visible, s, float("-inf"))


@triton.jit
def attend_tile(
    q,
    k,
    v,
    visible,
    number,  # index of the first key
    scale,
    row_max,
    best,
    total,
    weighted,
    KEEP_BEST: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one step of the online softmax."""
    s = masked_scores(q, k, visible, scale, PRECISION)
    if KEEP_BEST:
        tile_max, place = tl.max(s, axis=1, return_indices=True)
        best = tl.where(tile_max > row_max, number + place, best)
    else:
        tile_max = tl.max(s, axis=1)
    larger = tl.maximum(row_max, tile_max)
    # rows that have seen nothing yet can use any finite number
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    p = exp2(s - safe[:, None])
    keep = exp2(row_max - safe)
    total = total * keep + tl.sum(p, axis=1)
    weighted = tl.dot(p.to(DOT), v, weighted * keep[:, None], input_precision=PRECISION)
    return larger, best, total, weighted


@triton.jit
def add_query_gradient(
    q,
    k,
    v,
    dout,
    visible,
    numbers,  # [BN] indices of the keys
    scale,
    row_max,
    dtotal,
    best,
    dmax,
    dq,
    KEEP_BEST: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the gradients of scores, exp(s - max) (dout . v + dtotal), plus that of the maximum at its key, to dq."""
    p = exp2(masked_scores(q, k, visible, scale, PRECISION) - row_max[:, None])
    ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) + dtotal[:, None])
    if KEEP_BEST:
        ds += tl.where(numbers[None, :] == best[:, None], dmax[:, None], 0.0)
    return tl.dot(ds.to(DOT), k, dq, input_precision=PRECISION)


@triton.jit
def add_key_gradients(
    q,
    k,
    v,
    dout,
    visible,
    numbers,  # [BN] indices of the keys
    scale,
    row_max,
    dtotal,
    best,
    dmax,
    dk,
    dv,
    KEEP_BEST: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the gradients of scores to those of keys, which are the rows here, [BN, BM]: products then need no transpose."""
    p = exp2(masked_scores(k, q, visible, scale, PRECISION) - row_max[None, :])
    ds = p * (tl.dot(v, tl.trans(dout), input_precision=PRECISION) + dtotal[None, :])
    if KEEP_BEST:
        ds += tl.where(numbers[:, None] == best[None, :], dmax[None, :], 0.0)
    dv = tl.dot(p.to(DOT), dout, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(DOT), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def entries_seen(group, entries, old, per_chunk):
    """Return how many of the store's entries entered before this group."""
    return tl.minimum(old + group * per_chunk, entries)


@triton.jit
def program_queries(groups, chunk, heads, BM: tl.constexpr):
    """Return sample, head, group, and part of the chunk."""
    sample = tl.cast(tl.program_id(1) // heads, tl.int64)
    head = tl.program_id(1) % heads
    parts = tl.cdiv(chunk, BM)
    # late groups see most of the store, so they begin first
    group = groups - 1 - tl.program_id(0) // parts
    return sample, head, group, tl.program_id(0) % parts


@triton.jit
def head_store(k_ptr, v_ptr, until_ptr, sample, head, heads, store_heads, entries, D: tl.constexpr, V: tl.constexpr):
    """Return the pointers to the keys, values and last groups of a head's store."""
    owner = sample * (heads // store_heads) + head // store_heads
    return k_ptr + owner * entries * D, v_ptr + owner * entries * V, until_ptr + owner * entries


@triton.jit
def load_keys(
    k_ptr,
    v_ptr,
    first,
    keys,  # [BN]
    ok,  # [BN]
    stride_k,
    stride_v,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
):
    """Load a tile of keys and of values."""
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    k = load_rows(k_ptr, first, keys, ok, channels, channels < D, stride_k).to(DOT)
    v = load_rows(v_ptr, first, keys, ok, columns, columns < V, stride_v).to(DOT)
    return k, v


@triton.jit
def load_queries(
    q_ptr,
    dout_ptr,
    max_ptr,
    dtotal_ptr,
    best_ptr,
    dmax_ptr,
    first,  # index of the first row
    rows,  # [BM]
    ok,  # [BM]
    heads,
    stride_q,
    stride_do,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    KEEP_BEST: tl.constexpr,
    DOT: tl.constexpr,
):
    """Load queries, gradients of weighted values; per row the maximum, the gradient of the sum, the best key, its gradient."""
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    q = load_rows(q_ptr, first, rows, ok, channels, channels < D, stride_q).to(DOT)
    dout = load_rows(dout_ptr, first, rows, ok, columns, columns < V, stride_do).to(DOT)
    place = (tl.cast(first, tl.int64) + rows) * heads
    row_max = tl.load(max_ptr + place, mask=ok, other=0.0)
    dtotal = tl.load(dtotal_ptr + place, mask=ok, other=0.0)
    best = tl.zeros_like(rows) - 1
    dmax = row_max
    if KEEP_BEST:
        best = tl.load(best_ptr + place, mask=ok, other=-1)
        dmax = tl.load(dmax_ptr + place, mask=ok, other=0.0)
    return q, dout, row_max, dtotal, best, dmax


@triton.jit(do_not_specialize=["groups", "entries", "old"])
def exact_kernel(
    q_ptr,  # [B, R * l, H, D]
    k_ptr,  # [B, slots, K, D]
    v_ptr,  # [B, slots, K, V]
    store_k_ptr,  # [B, S, E, D]
    store_v_ptr,  # [B, S, E, V]
    until_ptr,  # [B, S, E] int32
    first_ptr,  # [B] int32: the first slot that exists
    max_ptr,  # [B, R * l, H] float32
    total_ptr,  # [B, R * l, H] float32
    out_ptr,  # [B, R * l, H, V] float32
    best_ptr,  # [B, R * l, H] int32: the key of the row maximum, entries after slots; only with KEEP_BEST
    groups,
    chunk,
    entries,
    old,
    per_chunk,
    heads,
    group_heads,  # query heads per key head
    store_heads,  # query heads per head of the store
    stride_qb,
    stride_q,
    stride_qh,
    stride_kb,
    stride_k,
    stride_kh,
    stride_vb,
    stride_v,
    stride_vh,
    scale,  # times log2 e
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAPPED: tl.constexpr,
    KEEP_BEST: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample, head, group, part = program_queries(groups, chunk, heads, BM)
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BM)
    keys = tl.arange(0, BN)
    ok = part * BM + rows < chunk
    row = group * chunk + part * BM
    slot = row + chunk + rows
    q_ptr += sample * stride_qb + head * stride_qh
    q = load_rows(q_ptr, row, rows, ok, channels, channels < D, stride_q).to(DOT)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    best = tl.full([BM], -1, tl.int32)
    total = tl.zeros([BM], tl.float32)
    weighted = tl.zeros([BM, BV], tl.float32)

    k_ptr += sample * stride_kb + (head // group_heads) * stride_kh
    v_ptr += sample * stride_vb + (head // group_heads) * stride_vh
    begin = tl.load(first_ptr + sample)
    stop = group * chunk + chunk + tl.minimum(chunk, (part + 1) * BM)
    for first in range(group * chunk, stop, BN):
        there = first + keys < stop
        k, v = load_keys(k_ptr, v_ptr, first, keys, there, stride_k, stride_v, D, V, BD, BV, DOT)
        seen = there & (first + keys >= begin)
        visible = seen[None, :] & (first + keys[None, :] <= slot[:, None])
        row_max, best, total, weighted = attend_tile(
            q, k, v, visible, first, scale, row_max, best, total, weighted, KEEP_BEST, DOT, PRECISION
        )

    store_k_ptr, store_v_ptr, until_ptr = head_store(
        store_k_ptr, store_v_ptr, until_ptr, sample, head, heads, store_heads, entries, D, V
    )
    stop = entries_seen(group, entries, old, per_chunk)
    slots = (groups + 1) * chunk
    for first in range(0, stop, BN):
        there = first + keys < stop
        seen = there & (tl.load(until_ptr + first + keys, mask=there, other=0) > group)
        is_needed = True
        if CAPPED:
            # most earlier entries may have left again; without a cap this check would only cost the pipeline
            is_needed = tl.max(seen.to(tl.int32), axis=0) > 0
        if is_needed:
            k, v = load_keys(store_k_ptr, store_v_ptr, first, keys, seen, D, V, D, V, BD, BV, DOT)
            row_max, best, total, weighted = attend_tile(
                q, k, v, seen[None, :], slots + first, scale, row_max, best, total, weighted, KEEP_BEST, DOT, PRECISION
            )

    place = (sample * groups * chunk + row + rows) * heads + head
    tl.store(max_ptr + place, tl.where(row_max == float("-inf"), 0.0, row_max), mask=ok)
    tl.store(total_ptr + place, total, mask=ok)
    if KEEP_BEST:
        tl.store(best_ptr + place, best, mask=ok)
    out_ptr += (sample * groups * chunk * heads + head) * V
    store_rows(out_ptr, weighted, row, rows, ok, columns, columns < V, heads * V)


@triton.jit(do_not_specialize=["groups", "entries", "old"])
def exact_dq_kernel(
    q_ptr,  # [B, R * l, H, D]
    k_ptr,  # [B, slots, K, D]
    v_ptr,  # [B, slots, K, V]
    store_k_ptr,  # [B, S, E, D]
    store_v_ptr,  # [B, S, E, V]
    until_ptr,  # [B, S, E] int32
    first_ptr,  # [B] int32
    max_ptr,  # [B, R * l, H] float32
    dtotal_ptr,  # [B, R * l, H] float32
    dout_ptr,  # [B, R * l, H, V]
    best_ptr,  # [B, R * l, H] int32; only with KEEP_BEST
    dmax_ptr,  # [B, R * l, H] float32; only with KEEP_BEST
    dq_ptr,  # [B, R * l, H, D]
    groups,
    chunk,
    entries,
    old,
    per_chunk,
    heads,
    group_heads,
    store_heads,
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
    CAPPED: tl.constexpr,
    KEEP_BEST: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample, head, group, part = program_queries(groups, chunk, heads, BM)
    channels = tl.arange(0, BD)
    rows = tl.arange(0, BM)
    keys = tl.arange(0, BN)
    ok = part * BM + rows < chunk
    row = group * chunk + part * BM
    slot = row + chunk + rows
    line = sample * groups * chunk * heads + head
    q, dout, row_max, dtotal, best, dmax = load_queries(
        q_ptr + sample * stride_qb + head * stride_qh,
        *(dout_ptr + line * V, max_ptr + line, dtotal_ptr + line, best_ptr + line, dmax_ptr + line),
        *(row, rows, ok, heads, stride_q, heads * V, D, V, BD, BV, KEEP_BEST, DOT),
    )
    dq = tl.zeros([BM, BD], tl.float32)

    k_ptr += sample * stride_kb + (head // group_heads) * stride_kh
    v_ptr += sample * stride_vb + (head // group_heads) * stride_vh
    begin = tl.load(first_ptr + sample)
    stop = group * chunk + chunk + tl.minimum(chunk, (part + 1) * BM)
    for first in range(group * chunk, stop, BN):
        there = first + keys < stop
        k, v = load_keys(k_ptr, v_ptr, first, keys, there, stride_k, stride_v, D, V, BD, BV, DOT)
        seen = there & (first + keys >= begin)
        visible = seen[None, :] & (first + keys[None, :] <= slot[:, None])
        numbers = first + keys
        dq = add_query_gradient(
            q, k, v, dout, visible, numbers, scale, row_max, dtotal, best, dmax, dq, KEEP_BEST, DOT, PRECISION
        )

    store_k_ptr, store_v_ptr, until_ptr = head_store(
        store_k_ptr, store_v_ptr, until_ptr, sample, head, heads, store_heads, entries, D, V
    )
    stop = entries_seen(group, entries, old, per_chunk)
    slots = (groups + 1) * chunk
    for first in range(0, stop, BN):
        there = first + keys < stop
        seen = there & (tl.load(until_ptr + first + keys, mask=there, other=0) > group)
        is_needed = True
        if CAPPED:
            is_needed = tl.max(seen.to(tl.int32), axis=0) > 0
        if is_needed:
            k, v = load_keys(store_k_ptr, store_v_ptr, first, keys, seen, D, V, D, V, BD, BV, DOT)
            numbers = slots + first + keys
            dq = add_query_gradient(
                q, k, v, dout, seen[None, :], numbers, scale, row_max, dtotal, best, dmax, dq, KEEP_BEST, DOT, PRECISION
            )
    store_rows(dq_ptr + line * D, dq * (scale * LN_2), row, rows, ok, channels, channels < D, heads * D)
