"""Causal linear attention in chunks of tokens.

    state kernel     k, v                 -> sums of each chunk            (that of bidirectional.py)
    prefix kernel    those                -> sums before each chunk, and of all tokens
    causal kernel    q, k, v, sums before -> out
    causal dq        q, k, v, out, dout, sums before -> dq, and per row the gradient of the denominator
    dsums kernel     q, dout, those       -> gradients of the sums by the queries of each chunk
    prefix kernel    those, from the end  -> gradients of the sums after each chunk
    causal dk        q, k, v, dout, those -> dk, dv

A program owns a chunk and walks over pairs of tiles: inside the chunk attention is the masked product of features, what came
before it comes through the sums. A running state instead of sums per chunk would save their traffic, but it takes the
registers that the tiles need: measured, that was two to four times slower.

The sums have the layout that bidirectional.py describes. Only maps with bounded features and one stream run here: with a scale
per key each row would need its own.
"""

import triton
import triton.language as tl

from .bidirectional import load_rows, load_sums, rotated, sample_rows, store_per_row, store_rows
from .maps import phi_key, phi_query


@triton.jit
def prefix_kernel(
    sums_ptr,  # [splits, rows, E] -> the sums before (REVERSE: after) each split, in place
    initial_ptr,  # [rows, E] what comes before all of them
    total_ptr,  # [rows, E] everything together
    splits,
    elements: tl.int64,  # rows * E
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.arange(0, STEPS)
    ok = offsets < elements
    running = tl.zeros([BLOCK], tl.float32)
    if HAS_INITIAL:
        running += tl.load(initial_ptr + offsets, mask=ok, other=0.0)
    # many splits at a time: one after the other would wait for memory at each
    for first in range(0, splits, STEPS):
        split = first + steps
        inside = (split < splits)[:, None] & ok[None, :]
        stride = elements
        if REVERSE:
            split = splits - 1 - split
            stride = -stride
        places = sums_ptr + split.to(tl.int64)[:, None] * elements + offsets[None, :]
        own = tl.load(places, mask=inside, other=0.0)
        # the neighbour's number, not a difference of sums: a huge split must not wipe out those beside it
        previous = tl.load(places - stride, mask=inside & (steps > 0)[:, None], other=0.0)
        tl.debug_barrier()
        tl.store(places, running[None, :] + tl.cumsum(previous, axis=0), mask=inside)
        running += tl.sum(own, axis=0)
    tl.store(total_ptr + offsets, running, mask=ok)


@triton.jit
def not_later(first_row, first_column, BN: tl.constexpr):
    """[BN, BN]: True where the column's token is not later than the row's."""
    rows = tl.arange(0, BN)
    return first_row + rows[:, None] >= first_column + rows[None, :]


@triton.jit
def count_up_to(count, mask_ptr, first, start, rows, exists, HAS_MASK: tl.constexpr):
    """Visible keys up to each row of a tile, [BN, 1]; `count` came before the chunk. And the count up to its end."""
    if HAS_MASK:
        ok = (exists & (tl.load(mask_ptr + first + rows, mask=exists, other=0) != 0)).to(tl.float32)
        seen = count + tl.cumsum(ok, axis=0)
        count += tl.sum(ok)
    else:
        seen = count + (first - start + 1 + rows).to(tl.float32)
    return seen[:, None], count


@triton.jit
def weighted_values(weights, v, raw, visible, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """weights [BN, BN], zero where not visible, times v; a NaN or infinity that a row does not see must not reach it."""
    bad = (raw - raw) != 0.0
    if tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) > 0:
        finite = tl.where(bad, 0.0, v.to(tl.float32)).to(DOT)
        product = tl.dot(weights.to(DOT), finite, input_precision=PRECISION)
        reached = tl.dot(tl.where(visible, 1.0, 0.0).to(DOT), bad.to(DOT), input_precision=PRECISION)
        product = tl.where(reached > 0.0, float("nan"), product)
    else:
        product = tl.dot(weights.to(DOT), v, input_precision=PRECISION)
    return product


@triton.jit
def causal_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    mask_ptr,  # [B, N] uint8
    cu_ptr,  # [B + 1]
    param_ptr,  # [heads of the map, P]
    cos_q_ptr,  # [B or 1, N, PAIRS]
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    before_ptr,  # [splits, B * K, PARTS, D, V + 2]
    out_ptr,  # [B, N, H, V]
    inverse_ptr,  # [B, N, H, 1]: 1 / denominator, for the backward pass
    num_tokens,
    heads,
    group,  # query heads per key head
    stretch,  # tokens of a chunk
    stride_qb,
    stride_q,
    stride_qh,
    stride_kb,
    stride_k,
    stride_kh,
    stride_vb,
    stride_v,
    stride_vh,
    stride_ob,
    stride_o,
    stride_oh,
    stride_angle_q,
    stride_angle_k,
    query_param_group,
    key_param_group,
    num_params,
    norm_scale,
    alpha,
    eps,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    CUBE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    KEEP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    kv_heads = heads // group
    q_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_qb, stride_q, PACKED)
    k_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_kb, stride_k, PACKED)
    v_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_vb, stride_v, PACKED)
    o_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_ob, stride_o, PACKED)
    q_ptr += q_offset + head * stride_qh
    k_ptr += k_offset + kv_head * stride_kh
    v_ptr += v_offset + kv_head * stride_vh
    out_ptr += o_offset + head * stride_oh
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    cos_q_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_q
    sin_q_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_q
    cos_k_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_k
    sin_k_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_k
    row += tl.cast(sample, tl.int64) * num_tokens * (0 if PACKED else 1)
    inverse_ptr += row * heads + head
    query_params = param_ptr + (head // query_param_group) * num_params
    key_params = param_ptr + (kv_head // key_param_group) * num_params
    start = tl.program_id(0) * stretch
    stop = tl.minimum(start + stretch, length)
    owner = (tl.cast(tl.program_id(0), tl.int64) * (tl.num_programs(1) // group)) + sample * kv_heads + kv_head
    before = before_ptr + owner * (PARTS * D * (V + 2))
    s_a, z_a = load_sums(before, D, V, BD, BV)
    s_b, z_b = s_a, z_a
    if PARTS == 2:
        s_b, z_b = load_sums(before + D * (V + 2), D, V, BD, BV)
    count = tl.load(before + V + 1)

    s_a = s_a.to(DOT)
    s_b = s_b.to(DOT)

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    for first in range(start, stop, BN):
        exists = rows < stop - first
        y = load_rows(q_ptr, first, rows, exists, channels, in_head, stride_q).to(tl.float32)
        aq, bq, query_scale = phi_query(y, query_params, channels, norm_scale, alpha, D, MAP, 0)
        seen, count = count_up_to(count, mask_ptr, first, start, rows, exists, HAS_MASK)
        total = tl.sum(aq * z_a[None, :], axis=1)[:, None] + eps * seen
        turned_aq = rotated(aq, cos_q_ptr, sin_q_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
        above = tl.dot(turned_aq, s_a, input_precision=PRECISION)
        turned_bq = turned_aq
        if PARTS == 2:
            total += tl.sum(bq * z_b[None, :], axis=1)[:, None]
            turned_bq = rotated(bq, cos_q_ptr, sin_q_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
            above = tl.dot(turned_bq, s_b, above, input_precision=PRECISION)
        plain_aq = aq.to(DOT)
        plain_bq = bq.to(DOT)
        for other in range(start, first + BN, BN):
            ok = rows < stop - other
            if HAS_MASK:
                ok = ok & (tl.load(mask_ptr + other + rows, mask=ok, other=0) != 0)
            x = load_rows(k_ptr, other, rows, ok, channels, in_head, stride_k).to(tl.float32)
            raw = load_rows(v_ptr, other, rows, ok, columns, columns < V, stride_v)
            ak, bk = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE)
            within = tl.dot(plain_aq, tl.trans(ak.to(DOT)), input_precision=PRECISION)
            if PARTS == 2:
                within = tl.dot(plain_bq, tl.trans(bk.to(DOT)), within, input_precision=PRECISION)
            visible = not_later(first, other, BN)
            within = tl.where(visible, within, 0.0)
            total += tl.sum(within, axis=1)[:, None]
            if PAIRS > 0:
                ak = rotated(ak, cos_k_ptr, sin_k_ptr, other, rows, ok, 0, D, BD, PAIRS, False)
                within = tl.dot(turned_aq, tl.trans(ak.to(DOT)), input_precision=PRECISION)
                if PARTS == 2:
                    bk = rotated(bk, cos_k_ptr, sin_k_ptr, other, rows, ok, 1, D, BD, PAIRS, False)
                    within = tl.dot(turned_bq, tl.trans(bk.to(DOT)), within, input_precision=PRECISION)
                within = tl.where(visible, within, 0.0)
            above += weighted_values(within, raw.to(DOT), raw, visible, DOT, PRECISION)
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        if KEEP:
            store_per_row(inverse_ptr, inverse, first, rows, exists, 0, heads)
        store_rows(out_ptr, above * inverse, first, rows, exists, columns, columns < V, stride_o)
