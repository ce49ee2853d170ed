"""Compute gradients of keys in causal linear attention; causal_gradient.py has the formulas and the gradient of queries."""

import triton
import triton.language as tl

from ...common.compiled.map_gradients import phi_key_gradient
from ...common.compiled.maps import phi_key, phi_query
from ...common.compiled.products import high_and_low, is_lean, times, truncated_digits, unit_matrix, widen
from ...common.compiled.tiles import (
    angle_rows,
    head_rows,
    load_per_row,
    load_rows,
    load_sums_or_zeros,
    place_per_row,
    program_index,
    rotate_features,
    row_strides,
    sample_offset,
    sample_rows,
    store_per_row,
    store_rows,
    store_two_parameters,
    sum_over_rows,
    visible_rows,
)
from .causal_gradient import diagonal
from .decay import pair_decay, tile_decay


@triton.jit
def upper_triangle(BN: tl.constexpr):
    """Return [BN, BN], keys in the rows: True where the column's query is not earlier."""
    rows = tl.arange(0, BN)
    return rows[:, None] <= rows[None, :]


@triton.jit
def query_operands(
    q_ptr,
    dout_ptr,
    inverse_ptr,
    cos_ptr,
    sin_ptr,
    param_ptr,
    first,
    stop,
    stride_q,
    stride_do,
    norm_scale,
    alpha,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return dout, the features of both parts, and the rotated ones, of the queries of a tile and head.

    If SCALED the denominator is divided out of the features: dout then needs no pass through registers, and loses no digits.
    Otherwise out of dout: features then round as in the forward pass, with whose sums their products are weights.
    """
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    LEAN: tl.constexpr = is_lean(DOT, BD, BV) and PAIRS == 0
    TYPE: tl.constexpr = DOT if LEAN else None
    exists = rows < stop - first
    inverse = load_per_row(inverse_ptr, first, rows, exists)
    dout = load_rows(dout_ptr, first, rows, exists, columns, columns < V, stride_do)
    y = widen(load_rows(q_ptr, first, rows, exists, channels, channels < D, stride_q), unit_matrix(BD, DOT), LEAN)
    if SCALED:
        a, b, query_scale = phi_query(y, param_ptr, channels, norm_scale, alpha, D, MAP, 0, TYPE, inverse)
    else:
        a, b, query_scale = phi_query(y, param_ptr, channels, norm_scale, alpha, D, MAP, 0, TYPE)
        dout = dout.to(tl.float32) * inverse
    rotated_a = rotate_features(a, cos_ptr, sin_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
    rotated_b = rotated_a
    if PARTS == 2:
        rotated_b = rotate_features(b, cos_ptr, sin_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
    return dout.to(DOT), a.to(DOT), b.to(DOT), rotated_a, rotated_b


@triton.jit
def decayed_operand(features, decay_sum, DOT: tl.constexpr):
    """Return the features of queries as they read the sums before the tile."""
    return (features.to(tl.float32) * tl.exp(decay_sum)).to(DOT)


@triton.jit
def add_to_keys(
    v,
    ones,
    drop,
    dout,
    a,
    b,
    aq,
    bq,
    da,
    db,
    plain_a,
    plain_b,
    ds_a,
    ds_b,
    wide_a,
    wide_b,
    decay_sum,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    SAME_ANGLES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the part of a tile's queries in one head to the gradients of its keys' features (unrotated ones separately), and of
    the sums before it."""
    BN: tl.constexpr = dout.shape[0]
    weight = tl.trans(high_and_low(tl.zeros([BN, 16], tl.float32) + drop, DOT))
    toward = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    if PAIRS == 0:
        toward = tl.dot(ones, weight, toward, input_precision=PRECISION)
    else:
        minus = tl.where(upper_triangle(BN), tl.dot(ones, weight, input_precision=PRECISION), 0.0)
        if SAME_ANGLES:
            minus += tl.where(diagonal(BN), toward, 0.0)
            toward = tl.where(diagonal(BN), 0.0, toward)
    toward = tl.where(upper_triangle(BN), toward, 0.0)
    # with the decay since the sums before the tile
    far_aq = aq
    far_bq = bq
    if HAS_DECAY:
        left = tl.trans(pair_decay(decay_sum, BN))
        toward *= left
        if PAIRS > 0:
            minus *= left
        far_aq = decayed_operand(aq, decay_sum, DOT)
        far_bq = decayed_operand(bq, decay_sum, DOT)
        weight = tl.trans(high_and_low(tl.zeros([BN, 16], tl.float32) + drop * tl.exp(decay_sum), DOT))
    toward = toward.to(DOT)
    da = tl.dot(toward, aq, da, input_precision=PRECISION)
    ds_a = tl.dot(tl.trans(dout), far_aq, ds_a, input_precision=PRECISION)
    wide_a = tl.dot(weight, a, wide_a, input_precision=PRECISION)
    if PAIRS > 0:
        plain_a = tl.dot(minus.to(DOT), a, plain_a, input_precision=PRECISION)
    if PARTS == 2:
        db = tl.dot(toward, bq, db, input_precision=PRECISION)
        ds_b = tl.dot(tl.trans(dout), far_bq, ds_b, input_precision=PRECISION)
        wide_b = tl.dot(weight, b, wide_b, input_precision=PRECISION)
        if PAIRS > 0:
            plain_b = tl.dot(minus.to(DOT), b, plain_b, input_precision=PRECISION)
    return da, db, plain_a, plain_b, ds_a, ds_b, wide_a, wide_b


@triton.jit
def causal_dk_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    dout_ptr,  # [B, N, H, V]
    mask_ptr,
    cu_ptr,
    param_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    inverse_ptr,  # [1, B, H, N] or [1, H, T]
    drop_ptr,
    after_ptr,  # [splits, B * K, PARTS, D, V + 2]: gradients of the sums, from the tokens after each split
    log_decay_ptr,  # [B, K, N] or [K, T]
    dlog_decay_ptr,  # the same shape: the gradient through the decay of each key
    dk_ptr,  # [B, N, K, D]
    dparam_ptr,  # [splits, B * K, 2, D]
    num_rows,
    num_tokens,
    kv_heads,
    group,
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
    stride_dob,
    stride_do,
    stride_doh,
    stride_dkb,
    stride_dk,
    stride_dkh,
    stride_angle_q,
    stride_angle_k,
    query_param_group,
    key_param_group,
    num_params,
    norm_scale,
    alpha,
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
    SAME_ANGLES: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    GROUPED: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dk, from the last tile of a split to the first."""
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_dob, stride_do, stride_doh = row_strides(stride_dob, stride_do, stride_doh, V)
    stride_dkb, stride_dk, stride_dkh = row_strides(stride_dkb, stride_dk, stride_dkh, D)
    sample = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    row, length = sample_rows(cu_ptr, sample, num_tokens, PACKED)
    q_offset = sample_offset(sample, row, stride_qb, stride_q, PACKED)
    do_offset = sample_offset(sample, row, stride_dob, stride_do, PACKED)
    k_ptr = head_rows(k_ptr, sample, head, row, stride_kb, stride_k, stride_kh, PACKED)
    v_ptr = head_rows(v_ptr, sample, head, row, stride_vb, stride_v, stride_vh, PACKED)
    dk_ptr = head_rows(dk_ptr, sample, head, row, stride_dkb, stride_dk, stride_dkh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    cos_q_ptr, sin_q_ptr = angle_rows(cos_q_ptr, sin_q_ptr, sample, row, stride_angle_q, PAIRS)
    cos_k_ptr, sin_k_ptr = angle_rows(cos_k_ptr, sin_k_ptr, sample, row, stride_angle_k, PAIRS)
    of_keys = place_per_row(sample, head, kv_heads, row, num_rows, PACKED)
    log_decay_ptr += of_keys
    dlog_decay_ptr += of_keys
    heads = kv_heads * group
    key_params = param_ptr + (head // key_param_group) * num_params
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, length)
    place = program_index()
    after = after_ptr + place * (PARTS * D * (V + 2))
    ds_a, ds_b, dz_a, dz_b, count = load_sums_or_zeros(after, D, V, BD, BV, PARTS, HAS_AFTER)
    # transposed: then a product of tiles in memory adds to them
    ds_a = tl.trans(ds_a)
    ds_b = tl.trans(ds_b)
    # the rows are added up, so the first one begins with everything
    first_row = tl.arange(0, 16)[:, None] == 0
    wide_a = tl.where(first_row, dz_a[None, :], 0.0)
    wide_b = tl.where(first_row, dz_b[None, :], 0.0)

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    LEAN: tl.constexpr = is_lean(DOT, BD, BV) and PAIRS == 0
    unit = unit_matrix(BD, DOT)
    ones = tl.full([BN, 16], 1.0, DOT)
    p0 = tl.zeros([BD], tl.float32)
    p1 = tl.zeros([BD], tl.float32)
    tiles = tl.cdiv(tl.maximum(stop - start, 0), BN)
    for tile in range(0, tiles):
        first = start + (tiles - 1 - tile) * BN
        exists = rows < stop - first
        ok = visible_rows(mask_ptr, first, rows, exists, HAS_MASK)
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        # gradients of the rotated features
        high, low = truncated_digits(ds_a, DOT)
        da = times(v, high, low, PRECISION)
        db = da
        if PARTS == 2:
            high, low = truncated_digits(ds_b, DOT)
            db = times(v, high, low, PRECISION)
        # the part of the unrotated features, from z: the sixteen rows add up
        high, low = truncated_digits(wide_a, DOT)
        plain_a = da if PAIRS == 0 else tl.zeros([BN, BD], tl.float32)
        plain_a = tl.dot(ones, low, tl.dot(ones, high, plain_a, input_precision=PRECISION), input_precision=PRECISION)
        plain_b = plain_a
        if PARTS == 2:
            high, low = truncated_digits(wide_b, DOT)
            plain_b = db if PAIRS == 0 else tl.zeros([BN, BD], tl.float32)
            plain_b = tl.dot(ones, low, tl.dot(ones, high, plain_b, input_precision=PRECISION), input_precision=PRECISION)
        if PAIRS == 0:
            da = plain_a
            db = plain_b
        decay_sum = 0.0
        if HAS_DECAY:
            decay_sum, end = tile_decay(log_decay_ptr, first, rows, exists)
            da *= tl.exp(end - decay_sum)
            db *= tl.exp(end - decay_sum)
            plain_a *= tl.exp(end - decay_sum)
            plain_b *= tl.exp(end - decay_sum)
            ds_a *= tl.exp(end)
            ds_b *= tl.exp(end)
            wide_a *= tl.exp(end)
            wide_b *= tl.exp(end)
        # a loop of one is no loop: the next tile is then read while this one is computed
        for member in range(0, group if GROUPED else 1):
            query_head = head * group + member if GROUPED else head
            own = place_per_row(sample, query_head, heads, row, num_rows, PACKED)
            dout, a, b, aq, bq = query_operands(
                q_ptr + q_offset + query_head * stride_qh,
                dout_ptr + do_offset + query_head * stride_doh,
                inverse_ptr + own,
                *(cos_q_ptr, sin_q_ptr, param_ptr + (query_head // query_param_group) * num_params, first, stop),
                *(stride_q, stride_do, norm_scale, alpha, D, V, BD, BV, BN, MAP, PARTS, PAIRS, True, DOT),
            )
            drop = load_per_row(drop_ptr + own, first, rows, exists)
            da, db, plain_a, plain_b, ds_a, ds_b, wide_a, wide_b = add_to_keys(
                *(v, ones, drop, dout, a, b, aq, bq, da, db, plain_a, plain_b, ds_a, ds_b, wide_a, wide_b, decay_sum),
                *(PARTS, PAIRS, HAS_DECAY, SAME_ANGLES, DOT, PRECISION),
            )
        if PAIRS > 0:
            da = plain_a + rotate_features(da, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, True)
            if PARTS == 2:
                db = plain_b + rotate_features(db, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, True)
        if PARTS == 1:
            db = da
        # last: until here its registers belong to the gradients
        x = widen(load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k), unit, LEAN)
        if HAS_DECAY:
            # how much the outputs would change if the key had decayed less
            a, b = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE, None)
            loss = tl.sum(a * da + b * db if PARTS == 2 else a * da, axis=1)[:, None]
            store_per_row(dlog_decay_ptr, loss, first, rows, exists)
        dx, g0, g1 = phi_key_gradient(x, da, db, key_params, channels, 0.0, alpha, D, MAP, CUBE)
        # masked keys get a gradient of zero, which must be written
        store_rows(
            dk_ptr, tl.where(ok[:, None], dx, 0.0) if HAS_MASK else dx, first, rows, exists, channels, in_head, stride_dk
        )
        if LEARNED:
            p0 += sum_over_rows(g0, ok, in_head)
            p1 += sum_over_rows(g1, ok, in_head)
    if LEARNED:
        store_two_parameters(dparam_ptr + place * (2 * D), p0, p1, D, BD)
