"""Compute the backward pass of causal linear attention; causal.py has the plan.

With g = dout / den, e_i = g_i . out_i, the products G_ij = g_i . v_j and P_ij = phi(q_i) . phi(k_j), zero for j > i:

    dphi(q_i) = sum_j (G_ij - e_i) phi(k_j)
    dphi(k_j) = sum_i (G_ij - e_i) phi(q_i)
    dv_j      = sum_i P_ij g_i

where with rotary the terms with G and P take the rotated features. The sums S, z before the tile and their gradients after it
provide the tokens outside the tile. out and 1 / den come from the forward pass.

G_ij and e_i nearly cancel where a row sees little but itself, or where values have a mean, so they are subtracted before either
is rounded: everywhere without rotary; with it on the diagonal, where rotating there and back leaves a token unchanged
(SAME_ANGLES). For the same reason the sums are multiplied with all their digits, and e_i is corrected: out has few digits, but
features that all grow by one factor change an output through eps alone, so dphi(q_i) . phi(q_i) shows the error of e_i.
"""

import triton
import triton.language as tl

from ...common.compiled.map_gradients import along_query, phi_query_gradient
from ...common.compiled.maps import phi_key
from ...common.compiled.products import is_lean, left_factor, right_factor, times, truncated_digits, unit_matrix, widen
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
    sample_rows,
    store_per_row,
    store_rows,
    store_two_parameters,
    sum_over_rows,
    visible_rows,
)
from .causal import lower_triangle, seen_keys
from .decay import pair_decay, tile_decay


@triton.jit
def diagonal(BN: tl.constexpr):
    """Return [BN, BN]: True where row and column are the same token."""
    rows = tl.arange(0, BN)
    return rows[:, None] == rows[None, :]


@triton.jit
def causal_dq_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    out_ptr,  # [B, N, H, V]
    dout_ptr,  # [B, N, H, V]
    inverse_ptr,  # [1, B, H, N] or [1, H, T]
    mask_ptr,
    cu_ptr,
    param_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    before_ptr,  # [splits, B * K, PARTS, D, V + 2]
    log_decay_ptr,  # [B, K, N] or [K, T]
    dq_ptr,  # [B, N, H, D]
    drop_ptr,  # [1, B, H, N] or [1, H, T]: minus dout . out, corrected
    dparam_ptr,  # [splits, B * H, 2, D]
    num_rows,  # N, or T if packed
    num_tokens,
    heads,
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
    stride_ob,
    stride_o,
    stride_oh,
    stride_dob,
    stride_do,
    stride_doh,
    stride_dqb,
    stride_dq,
    stride_dqh,
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
    SAME_ANGLES: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_ob, stride_o, stride_oh = row_strides(stride_ob, stride_o, stride_oh, V)
    stride_dob, stride_do, stride_doh = row_strides(stride_dob, stride_do, stride_doh, V)
    stride_dqb, stride_dq, stride_dqh = row_strides(stride_dqb, stride_dq, stride_dqh, D)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    kv_heads = heads // group
    row, length = sample_rows(cu_ptr, sample, num_tokens, PACKED)
    q_ptr = head_rows(q_ptr, sample, head, row, stride_qb, stride_q, stride_qh, PACKED)
    k_ptr = head_rows(k_ptr, sample, kv_head, row, stride_kb, stride_k, stride_kh, PACKED)
    v_ptr = head_rows(v_ptr, sample, kv_head, row, stride_vb, stride_v, stride_vh, PACKED)
    out_ptr = head_rows(out_ptr, sample, head, row, stride_ob, stride_o, stride_oh, PACKED)
    dout_ptr = head_rows(dout_ptr, sample, head, row, stride_dob, stride_do, stride_doh, PACKED)
    dq_ptr = head_rows(dq_ptr, sample, head, row, stride_dqb, stride_dq, stride_dqh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    cos_q_ptr, sin_q_ptr = angle_rows(cos_q_ptr, sin_q_ptr, sample, row, stride_angle_q, PAIRS)
    cos_k_ptr, sin_k_ptr = angle_rows(cos_k_ptr, sin_k_ptr, sample, row, stride_angle_k, PAIRS)
    place_of_rows = place_per_row(sample, head, heads, row, num_rows, PACKED)
    inverse_ptr += place_of_rows
    drop_ptr += place_of_rows
    log_decay_ptr += place_per_row(sample, kv_head, kv_heads, row, num_rows, PACKED)
    query_params = param_ptr + (head // query_param_group) * num_params
    key_params = param_ptr + (kv_head // key_param_group) * num_params
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, length)
    owner = (tl.cast(tl.program_id(0), tl.int64) * (tl.num_programs(1) // group)) + sample * kv_heads + kv_head
    before = before_ptr + owner * (PARTS * D * (V + 2))
    s_a, s_b, z_a, z_b, count = load_sums_or_zeros(before, D, V, BD, BV, PARTS, HAS_BEFORE)
    # transposed: then a product of tiles in memory adds to them; z grows by products with ones, as in the forward pass
    s_a = tl.trans(s_a)
    s_b = tl.trans(s_b)
    ones = tl.full([16, BN], 1.0, DOT)
    wide_a = tl.zeros([16, BD], tl.float32) + z_a[None, :]
    wide_b = tl.zeros([16, BD], tl.float32) + z_b[None, :]

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    p0 = tl.zeros([BD], tl.float32)
    p1 = tl.zeros([BD], tl.float32)
    LEAN: tl.constexpr = is_lean(DOT, BD, BV) and PAIRS == 0
    # decayed keys are weighted before they are rounded
    TYPE: tl.constexpr = DOT if LEAN and not HAS_DECAY else None
    unit = unit_matrix(BD, DOT)
    unit_v = unit_matrix(BV, DOT)
    for first in range(start, stop, BN):
        exists = rows < stop - first
        ok = visible_rows(mask_ptr, first, rows, exists, HAS_MASK)
        dout = load_rows(dout_ptr, first, rows, exists, columns, columns < V, stride_do)
        out = load_rows(out_ptr, first, rows, exists, columns, columns < V, stride_o)
        inverse = load_per_row(inverse_ptr, first, rows, exists)
        drop = tl.sum(widen(dout, unit_v, LEAN) * widen(out, unit_v, LEAN), axis=1)[:, None]
        dout = dout.to(DOT)
        # the part of the tokens before the tile; the denominator is divided out at the end
        high, low = truncated_digits(s_a, DOT)
        da = times(dout, high, low, PRECISION)
        db_rotated = da
        if PARTS == 2:
            high, low = truncated_digits(s_b, DOT)
            db_rotated = times(dout, high, low, PRECISION)
        left = 1.0
        if HAS_DECAY:
            decay_sum, end = tile_decay(log_decay_ptr, first, rows, exists)
            left = tl.exp(decay_sum)
            da *= left
            db_rotated *= left
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        toward = tl.where(lower_triangle(BN), tl.dot(dout, tl.trans(v), input_precision=PRECISION), 0.0)
        minus = tl.where(lower_triangle(BN), drop, 0.0)
        if PAIRS == 0:
            toward -= minus
        elif SAME_ANGLES:
            minus -= tl.where(diagonal(BN), toward, 0.0)
            toward = tl.where(diagonal(BN), 0.0, toward)
        if HAS_DECAY:
            pairs_left = pair_decay(decay_sum, BN)
            toward *= pairs_left
            minus *= pairs_left
        toward = toward.to(DOT)
        x = widen(load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k), unit, LEAN)
        a, b = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE, TYPE)
        rotated_a = rotate_features(a, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
        rotated_b = rotated_a
        if PARTS == 2:
            rotated_b = rotate_features(b, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
        # the features that the sums add
        kept_a = rotated_a
        kept_b = rotated_b
        kept_plain_a = a.to(DOT)
        kept_plain_b = b.to(DOT)
        if HAS_DECAY:
            s_a *= tl.exp(end)
            s_b *= tl.exp(end)
            decayed_a = a * tl.exp(end - decay_sum)
            decayed_b = b * tl.exp(end - decay_sum)
            kept_a = rotate_features(decayed_a, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
            if PARTS == 2:
                kept_b = rotate_features(decayed_b, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
            kept_plain_a = decayed_a.to(DOT)
            kept_plain_b = decayed_b.to(DOT)
        a = a.to(DOT)
        b = b.to(DOT)
        lost = left_factor(-drop * left, DOT)
        before_a = right_factor(wide_a, DOT)
        before_b = right_factor(wide_b, DOT)
        if HAS_DECAY:
            wide_a *= tl.exp(end)
            wide_b *= tl.exp(end)
        da = tl.dot(toward, rotated_a, da, input_precision=PRECISION)
        s_a = tl.dot(tl.trans(v), kept_a, s_a, input_precision=PRECISION)
        da = rotate_features(da, cos_q_ptr, sin_q_ptr, first, rows, exists, 0, D, BD, PAIRS, True)
        da = tl.dot(lost, before_a, da, input_precision=PRECISION)
        if PAIRS > 0:
            da -= tl.dot(minus.to(DOT), a, input_precision=PRECISION)
        wide_a = tl.dot(ones, kept_plain_a, wide_a, input_precision=PRECISION)
        db = da
        if PARTS == 2:
            db = tl.dot(toward, rotated_b, db_rotated, input_precision=PRECISION)
            s_b = tl.dot(tl.trans(v), kept_b, s_b, input_precision=PRECISION)
            db = rotate_features(db, cos_q_ptr, sin_q_ptr, first, rows, exists, 1, D, BD, PAIRS, True)
            db = tl.dot(lost, before_b, db, input_precision=PRECISION)
            if PAIRS > 0:
                db -= tl.dot(minus.to(DOT), b, input_precision=PRECISION)
            wide_b = tl.dot(ones, kept_plain_b, wide_b, input_precision=PRECISION)
        y = widen(load_rows(q_ptr, first, rows, exists, channels, in_head, stride_q), unit, LEAN)
        # a factor of all features changes an output only through eps, which shows how the rounding of out changed the drop
        seen, count = seen_keys(count, ok, HAS_MASK)
        if HAS_DECAY:
            seen = 1.0
        of_eps = drop * (eps * seen)
        error = along_query(y, da, db, query_params, channels, norm_scale, alpha, of_eps, D, MAP, PARTS)
        error = (error - of_eps) * inverse
        lost = left_factor(-error * left, DOT)
        errors = tl.where(lower_triangle(BN), -error, 0.0)
        if HAS_DECAY:
            errors *= pairs_left
        errors = errors.to(DOT)
        da = tl.dot(errors, a, tl.dot(lost, before_a, da, input_precision=PRECISION), input_precision=PRECISION)
        if PARTS == 2:
            db = tl.dot(errors, b, tl.dot(lost, before_b, db, input_precision=PRECISION), input_precision=PRECISION)
        else:
            db = da
        dy, g0, g1 = phi_query_gradient(y, da, db, query_params, channels, norm_scale, alpha, D, MAP, 0)
        store_per_row(drop_ptr, -(drop + error), first, rows, exists)
        store_rows(dq_ptr, dy * inverse, first, rows, exists, channels, in_head, stride_dq)
        if LEARNED:
            p0 += sum_over_rows(g0 * inverse, exists, in_head)
            p1 += sum_over_rows(g1 * inverse, exists, in_head)
    if LEARNED:
        store_two_parameters(dparam_ptr + program_index() * (2 * D), p0, p1, D, BD)
