"""Compute gradients of values in causal linear attention; causal_gradient.py has the formulas and the gradient of queries."""

import triton
import triton.language as tl

from ...common.compiled.maps import phi_key
from ...common.compiled.products import is_lean, unit_matrix, widen
from ...common.compiled.tiles import (
    angle_rows,
    head_rows,
    load_rows,
    load_sums_or_zeros,
    place_per_row,
    program_index,
    rotate_features,
    row_strides,
    sample_offset,
    sample_rows,
    store_rows,
    visible_rows,
)
from .causal_gradient_of_keys import decayed_operand, query_operands, upper_triangle
from .decay import pair_decay, tile_decay


@triton.jit
def add_to_values(
    ak,
    bk,
    dout,
    aq,
    bq,
    dv,
    ds_a,
    ds_b,
    decay_sum,
    PARTS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the part of a tile's queries in one head to the gradients of its values, and of the sums before it."""
    weights = tl.dot(ak, tl.trans(aq), input_precision=PRECISION)
    if PARTS == 2:
        weights = tl.dot(bk, tl.trans(bq), weights, input_precision=PRECISION)
    weights = tl.where(upper_triangle(dout.shape[0]), weights, 0.0)
    if HAS_DECAY:
        weights *= tl.trans(pair_decay(decay_sum, dout.shape[0]))
        aq = decayed_operand(aq, decay_sum, DOT)
        bq = decayed_operand(bq, decay_sum, DOT)
    dv = tl.dot(weights.to(DOT), dout, dv, input_precision=PRECISION)
    ds_a = tl.dot(tl.trans(dout), aq, ds_a, input_precision=PRECISION)
    if PARTS == 2:
        ds_b = tl.dot(tl.trans(dout), bq, ds_b, input_precision=PRECISION)
    return dv, ds_a, ds_b


@triton.jit
def causal_dv_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    dout_ptr,  # [B, N, H, V]
    mask_ptr,
    cu_ptr,
    param_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    inverse_ptr,  # [1, B, H, N] or [1, H, T]
    after_ptr,  # [splits, B * K, PARTS, D, V + 2]: gradients of the sums, from the tokens after each split
    log_decay_ptr,  # [B, K, N] or [K, T]
    dv_ptr,  # [B, N, K, V]
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
    stride_dob,
    stride_do,
    stride_doh,
    stride_dvb,
    stride_dv,
    stride_dvh,
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
    HAS_AFTER: tl.constexpr,
    GROUPED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dv, from the last tile of a split to the first. dk is separate, because the two together exceed the registers."""
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_dob, stride_do, stride_doh = row_strides(stride_dob, stride_do, stride_doh, V)
    stride_dvb, stride_dv, stride_dvh = row_strides(stride_dvb, stride_dv, stride_dvh, V)
    sample = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    row, length = sample_rows(cu_ptr, sample, num_tokens, PACKED)
    q_offset = sample_offset(sample, row, stride_qb, stride_q, PACKED)
    do_offset = sample_offset(sample, row, stride_dob, stride_do, PACKED)
    k_ptr = head_rows(k_ptr, sample, head, row, stride_kb, stride_k, stride_kh, PACKED)
    dv_ptr = head_rows(dv_ptr, sample, head, row, stride_dvb, stride_dv, stride_dvh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    cos_q_ptr, sin_q_ptr = angle_rows(cos_q_ptr, sin_q_ptr, sample, row, stride_angle_q, PAIRS)
    cos_k_ptr, sin_k_ptr = angle_rows(cos_k_ptr, sin_k_ptr, sample, row, stride_angle_k, PAIRS)
    log_decay_ptr += place_per_row(sample, head, kv_heads, row, num_rows, PACKED)
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

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    LEAN: tl.constexpr = is_lean(DOT, BD, BV) and PAIRS == 0
    unit = unit_matrix(BD, DOT)
    TYPE: tl.constexpr = DOT if LEAN else None
    tiles = tl.cdiv(tl.maximum(stop - start, 0), BN)
    for tile in range(0, tiles):
        first = start + (tiles - 1 - tile) * BN
        exists = rows < stop - first
        ok = visible_rows(mask_ptr, first, rows, exists, HAS_MASK)
        x = widen(load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k), unit, LEAN)
        a, b = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE, TYPE)
        ak = rotate_features(a, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
        bk = ak
        dv = tl.dot(ak, tl.trans(ds_a.to(DOT)), input_precision=PRECISION)
        if PARTS == 2:
            bk = rotate_features(b, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
            dv = tl.dot(bk, tl.trans(ds_b.to(DOT)), dv, input_precision=PRECISION)
        decay_sum = 0.0
        if HAS_DECAY:
            decay_sum, end = tile_decay(log_decay_ptr, first, rows, exists)
            dv *= tl.exp(end - decay_sum)
            ds_a *= tl.exp(end)
            ds_b *= tl.exp(end)
        # a loop of one is no loop: the next tile is then read while this one is computed
        for member in range(0, group if GROUPED else 1):
            query_head = head * group + member if GROUPED else head
            own = place_per_row(sample, query_head, heads, row, num_rows, PACKED)
            dout, plain_aq, plain_bq, aq, bq = query_operands(
                q_ptr + q_offset + query_head * stride_qh,
                dout_ptr + do_offset + query_head * stride_doh,
                inverse_ptr + own,
                *(cos_q_ptr, sin_q_ptr, param_ptr + (query_head // query_param_group) * num_params, first, stop),
                *(stride_q, stride_do, norm_scale, alpha, D, V, BD, BV, BN, MAP, PARTS, PAIRS, False, DOT),
            )
            dv, ds_a, ds_b = add_to_values(
                *(ak, bk, dout, aq, bq, dv, ds_a, ds_b, decay_sum),
                *(PARTS, HAS_DECAY, DOT, PRECISION),
            )
        # masked keys get a gradient of zero, which must be written
        store_rows(
            dv_ptr, tl.where(ok[:, None], dv, 0.0) if HAS_MASK else dv, first, rows, exists, columns, columns < V, stride_dv
        )
