"""Compute causal linear attention: a program owns a split of tokens and scans it with a running state.

    state kernel     k, v                 -> sums of each split              (that of bidirectional.py)
    prefix kernel    those                -> sums before each split, and of all tokens     (split_sums.py)
    causal kernel    q, k, v, sums before -> out
    causal dq        q, k, v, out, dout, sums before   -> dq, and per row the gradient of the denominator
    dsums kernel     q, dout, those       -> gradients of the sums by each split of queries
    prefix kernel    those, from the end  -> gradients of the sums after each split
    causal dk        q, k, v, dout, those -> dk
    causal dv        q, k, dout, those    -> dv

A single short split needs no sums: the causal kernel forward, and the three of the backward pass in one launch
(causal_whole_gradient.py).

Inside a tile of tokens attention is the masked product of the tile's features; the state provides what came before the tile.
bidirectional.py describes the layout of the sums. Only maps with bounded features and one stream run here: with a scale per
key each row would need its own.
"""

import triton
import triton.language as tl

from ...common.compiled.maps import phi_key, phi_query
from ...common.compiled.products import high_and_low, is_lean, unit_matrix, widen
from ...common.compiled.tiles import (
    angle_rows,
    head_rows,
    load_rows,
    load_sums,
    load_sums_or_zeros,
    place_per_row,
    rotate_features,
    row_strides,
    sample_rows,
    store_per_row,
    store_rows,
    visible_rows,
)
from .decay import pair_decay, tile_decay


@triton.jit
def lower_triangle(BN: tl.constexpr):
    """Return [BN, BN]: True where the column's token is not later than the row's."""
    rows = tl.arange(0, BN)
    return rows[:, None] >= rows[None, :]


@triton.jit
def products_within(aq, bq, ak, bk, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Return feature products of a tile's queries (rows) and keys (columns), zero for later keys."""
    within = tl.dot(aq, tl.trans(ak), input_precision=PRECISION)
    if PARTS == 2:
        within = tl.dot(bq, tl.trans(bk), within, input_precision=PRECISION)
    return tl.where(lower_triangle(aq.shape[0]), within, 0.0)


@triton.jit
def seen_keys(count, ok, HAS_MASK: tl.constexpr):
    """Return the number of visible keys up to each row of a tile, [BN, 1], and up to its end."""
    if HAS_MASK:
        seen = count + tl.cumsum(ok.to(tl.float32), axis=0)
        count += tl.sum(ok.to(tl.float32))
    else:
        seen = count + 1.0 + tl.arange(0, ok.shape[0]).to(tl.float32)
        count += ok.shape[0]
    return seen[:, None], count


@triton.jit
def invert_denominator(before, within, eps_seen):
    """Return 1 / denominator of the rows, [BN, 1]; 1 where a row sees nothing."""
    total = before + tl.sum(within, axis=1)[:, None] + eps_seen
    return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def add_weighted_values(above, weights, sees, raw, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Return above + weights times values, zero for later tokens, which a row does not see: NaN or infinity in them must not
    reach the row, in no order of addition. sees: [queries, keys], as the weights."""
    bad = (raw - raw) != 0.0
    finite = tl.where(bad, 0.0, raw.to(tl.float32)).to(DOT)
    above = tl.dot(weights.to(DOT), finite, above, input_precision=PRECISION)
    reach = tl.where(sees, 1.0, 0.0).to(DOT)
    reached = tl.dot(reach, bad.to(DOT), input_precision=PRECISION)
    return tl.where(reached > 0.0, float("nan"), above)


@triton.jit
def has_nan_or_infinity(ptr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):
    """True if the sums of a part hold NaN or infinity, because some value up to here does."""
    s, z = load_sums(ptr, D, V, BD, BV)
    return tl.max(tl.max(((s - s) != 0.0).to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def write_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    log_decay_ptr,
    out_ptr,
    inverse_ptr,
    query_params,
    key_params,
    s_a,
    s_b,
    wide_a,
    wide_b,
    count,
    first,
    stop,
    stride_q,
    stride_k,
    stride_v,
    stride_o,
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
    HAS_DECAY: tl.constexpr,
    KEEP: tl.constexpr,
    IS_SUSPECT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the outputs of tokens from `first` on; return the later state: S^T of both parts, z in sixteen columns, count."""
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    LEAN: tl.constexpr = is_lean(DOT, BD, BV) and PAIRS == 0
    TYPE: tl.constexpr = DOT if LEAN else None
    # decayed keys are weighted before they are rounded
    KEY_TYPE: tl.constexpr = None if HAS_DECAY else TYPE
    unit = unit_matrix(BD, DOT)
    # products update and read z: sums over rows would make the warps wait for each other at every step
    ones = tl.full([BN, 16], 1.0, DOT)
    exists = rows < stop - first
    ok = visible_rows(mask_ptr, first, rows, exists, HAS_MASK)
    # each pair of feature tiles shrinks to operands before the next is made, because registers limit this kernel
    y = widen(load_rows(q_ptr, first, rows, exists, channels, in_head, stride_q), unit, LEAN)
    aq, bq, query_scale = phi_query(y, query_params, channels, norm_scale, alpha, D, MAP, 0, TYPE)
    plain_aq = aq.to(DOT)
    plain_bq = bq.to(DOT)
    rotated_aq = rotate_features(aq, cos_q_ptr, sin_q_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
    rotated_bq = rotated_aq
    if PARTS == 2:
        rotated_bq = rotate_features(bq, cos_q_ptr, sin_q_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
    total = tl.dot(plain_aq, high_and_low(wide_a, DOT), input_precision=PRECISION)
    if PARTS == 2:
        total = tl.dot(plain_bq, high_and_low(wide_b, DOT), total, input_precision=PRECISION)
    above = tl.dot(rotated_aq, tl.trans(s_a.to(DOT)), input_precision=PRECISION)
    if PARTS == 2:
        above = tl.dot(rotated_bq, tl.trans(s_b.to(DOT)), above, input_precision=PRECISION)
    if HAS_DECAY:
        decay_sum, end = tile_decay(log_decay_ptr, first, rows, exists)
        total *= tl.exp(decay_sum)
        above *= tl.exp(decay_sum)
    x = widen(load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k), unit, LEAN)
    raw = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v)
    v = raw.to(DOT)
    ak, bk = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE, KEY_TYPE)
    plain_ak = ak.to(DOT)
    plain_bk = bk.to(DOT)
    rotated_ak = rotate_features(ak, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
    rotated_bk = rotated_ak
    if PARTS == 2:
        rotated_bk = rotate_features(bk, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
    within = products_within(plain_aq, plain_bq, plain_ak, plain_bk, PARTS, PRECISION)
    if HAS_DECAY:
        within *= pair_decay(decay_sum, BN)
    seen, count = seen_keys(count, ok, HAS_MASK)
    if HAS_DECAY:
        seen = 1.0
    inverse = invert_denominator(tl.sum(total, axis=1)[:, None], within, eps * seen)
    if KEEP:
        store_per_row(inverse_ptr, inverse, first, rows, exists)
    if PAIRS > 0:
        within = products_within(rotated_aq, rotated_bq, rotated_ak, rotated_bk, PARTS, PRECISION)
        if HAS_DECAY:
            within *= pair_decay(decay_sum, BN)
    if IS_SUSPECT:
        above = add_weighted_values(above, within, lower_triangle(BN), raw, DOT, PRECISION)
    else:
        above = tl.dot(within.to(DOT), v, above, input_precision=PRECISION)
    store_rows(out_ptr, above * inverse, first, rows, exists, columns, columns < V, stride_o)
    if HAS_DECAY:
        s_a *= tl.exp(end)
        s_b *= tl.exp(end)
        wide_a *= tl.exp(end)
        wide_b *= tl.exp(end)
        ak *= tl.exp(end - decay_sum)
        bk *= tl.exp(end - decay_sum)
        plain_ak = ak.to(DOT)
        plain_bk = bk.to(DOT)
        rotated_ak = rotate_features(ak, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
        if PARTS == 2:
            rotated_bk = rotate_features(bk, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
    wide_a = tl.dot(tl.trans(plain_ak), ones, wide_a, input_precision=PRECISION)
    s_a = tl.dot(tl.trans(v), rotated_ak, s_a, input_precision=PRECISION)
    if PARTS == 2:
        wide_b = tl.dot(tl.trans(plain_bk), ones, wide_b, input_precision=PRECISION)
        s_b = tl.dot(tl.trans(v), rotated_bk, s_b, input_precision=PRECISION)
    return s_a, s_b, wide_a, wide_b, count


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
    total_ptr,  # [B * K, PARTS, D, V + 2]
    log_decay_ptr,  # [B, K, N] (packed: [K, T]): logarithms of decays
    out_ptr,  # [B, N, H, V]
    inverse_ptr,  # [1, B, H, N] (packed: [1, H, T]): 1 / denominator, for the backward pass
    num_rows,  # N, or T if packed
    num_tokens,
    heads,
    group,  # query heads per key head
    split_size,
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
    HAS_DECAY: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_ob, stride_o, stride_oh = row_strides(stride_ob, stride_o, stride_oh, V)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    kv_heads = heads // group
    row, length = sample_rows(cu_ptr, sample, num_tokens, PACKED)
    q_ptr = head_rows(q_ptr, sample, head, row, stride_qb, stride_q, stride_qh, PACKED)
    k_ptr = head_rows(k_ptr, sample, kv_head, row, stride_kb, stride_k, stride_kh, PACKED)
    v_ptr = head_rows(v_ptr, sample, kv_head, row, stride_vb, stride_v, stride_vh, PACKED)
    out_ptr = head_rows(out_ptr, sample, head, row, stride_ob, stride_o, stride_oh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    cos_q_ptr, sin_q_ptr = angle_rows(cos_q_ptr, sin_q_ptr, sample, row, stride_angle_q, PAIRS)
    cos_k_ptr, sin_k_ptr = angle_rows(cos_k_ptr, sin_k_ptr, sample, row, stride_angle_k, PAIRS)
    inverse_ptr += place_per_row(sample, head, heads, row, num_rows, PACKED)
    log_decay_ptr += place_per_row(sample, kv_head, kv_heads, row, num_rows, PACKED)
    query_params = param_ptr + (head // query_param_group) * num_params
    key_params = param_ptr + (kv_head // key_param_group) * num_params
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, length)
    owner = (tl.cast(tl.program_id(0), tl.int64) * (tl.num_programs(1) // group)) + sample * kv_heads + kv_head
    before = before_ptr + owner * (PARTS * D * (V + 2))
    s_a, s_b, z_a, z_b, count = load_sums_or_zeros(before, D, V, BD, BV, PARTS, HAS_BEFORE)
    # the sums after this split show if one of its values is NaN or infinite; without them the kernel assumes it
    is_suspect = tl.program_id(0) >= 0
    if HAS_TOTAL:
        size = PARTS * D * (V + 2)
        after = total_ptr + (sample * kv_heads + kv_head) * size
        if tl.program_id(0) + 1 < tl.num_programs(0):
            after = before + (tl.num_programs(1) // group) * size
        is_suspect = has_nan_or_infinity(after, D, V, BD, BV)
    wide_a = tl.zeros([BD, 16], tl.float32) + z_a[:, None]
    wide_b = tl.zeros([BD, 16], tl.float32) + z_b[:, None]
    s_a = tl.trans(s_a)
    s_b = tl.trans(s_b)
    # two loops: a branch in each step would cost the steps that need none
    if is_suspect:
        for first in range(start, stop, BN):
            s_a, s_b, wide_a, wide_b, count = write_tile(
                *(q_ptr, k_ptr, v_ptr, mask_ptr, cos_q_ptr, sin_q_ptr, cos_k_ptr, sin_k_ptr),
                *(log_decay_ptr, out_ptr, inverse_ptr),
                *(query_params, key_params, s_a, s_b, wide_a, wide_b, count, first, stop),
                *(stride_q, stride_k, stride_v, stride_o, norm_scale, alpha, eps),
                *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, HAS_DECAY, KEEP, True, DOT, PRECISION),
            )
    else:
        for first in range(start, stop, BN):
            s_a, s_b, wide_a, wide_b, count = write_tile(
                *(q_ptr, k_ptr, v_ptr, mask_ptr, cos_q_ptr, sin_q_ptr, cos_k_ptr, sin_k_ptr),
                *(log_decay_ptr, out_ptr, inverse_ptr),
                *(query_params, key_params, s_a, s_b, wide_a, wide_b, count, first, stop),
                *(stride_q, stride_k, stride_v, stride_o, norm_scale, alpha, eps),
                *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, HAS_DECAY, KEEP, False, DOT, PRECISION),
            )
