"""Compute the keys' and values' backward pass of bidirectional linear attention; bidirectional.py has the plan."""

import triton
import triton.language as tl

from ...common.compiled.fastmath import exp2
from ...common.compiled.map_gradients import phi_key_gradient
from ...common.compiled.maps import phi_key
from ...common.compiled.products import (
    digits,
    high_and_low,
    is_lean,
    left_factor,
    plus_product,
    right_factor,
    times,
    unit_matrix,
    widen,
)
from ...common.compiled.tiles import (
    angle_rows,
    head_rows,
    load_both_sums,
    load_per_row,
    load_rows,
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
from .contrast import load_value_sum, sums_size
from .mean_query import NEARLY_ALL, along_sums, has_slope, load_mean, product_with_mean, store_row


@triton.jit
def key_gradients(
    k_ptr,  # this and all that follow begin at the sample and head
    v_ptr,
    mask_ptr,
    weight_ptr,
    param_ptr,
    cos_ptr,
    sin_ptr,
    dk_ptr,
    dv_ptr,
    dweight_ptr,
    dmean_ptr,  # [splits, B * K, PARTS * D]: written BY_MEAN
    dparam_ptr,  # [splits, B * K, 2, D]
    ds_a,  # [BD, BV]: gradients of S
    ds_b,
    dz_a,  # [BD]
    dz_b,
    dvalue,  # [BV]: CONTRAST
    mean_a,  # [1, BD]: BY_MEAN, as the next three
    mean_b,
    of_mean_weight,
    nearly_all,
    log_scale,
    start,
    stop,
    stride_k,
    stride_v,
    stride_dk,
    stride_dv,
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
    HAS_WEIGHT: tl.constexpr,
    BY_MEAN: tl.constexpr,
    CONTRAST: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of keys start .. stop - 1 and their values, and add up those of the parameters."""
    ds_a, low_a = digits(ds_a, DOT)
    ds_b, low_b = digits(ds_b, DOT)
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    dmean_a = tl.zeros([16, BD], tl.float32)
    dmean_b = tl.zeros([16, BD], tl.float32)
    p0 = tl.zeros([BD], tl.float32)
    p1 = tl.zeros([BD], tl.float32)
    LEAN: tl.constexpr = is_lean(DOT, BD, BV)
    unit = unit_matrix(BD, DOT)
    TYPE: tl.constexpr = DOT if LEAN and PAIRS == 0 and not HAS_WEIGHT and not BY_MEAN else None
    ones = left_factor(tl.full([BN, 1], 1.0, tl.float32), DOT)
    wide_a = right_factor(dz_a[None, :], DOT)
    wide_b = right_factor(dz_b[None, :], DOT)
    for first in range(start, stop, BN):
        exists = rows < stop - first
        ok = visible_rows(mask_ptr, first, rows, exists, HAS_MASK)
        x = widen(load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k), unit, LEAN)
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        a, b = phi_key(x, ok, param_ptr, channels, log_scale, alpha, D, MAP, CUBE, TYPE)
        if HAS_WEIGHT:
            weight = load_per_row(weight_ptr, first, rows, ok)
            plain_a, plain_b = a, b
            a *= weight
            b *= weight
        if BY_MEAN:
            # no product exceeds the largest, but another order of rounding can make one: by 1e13 where they are near 1e20
            weight = exp2(tl.minimum(product_with_mean(a, b, mean_a, mean_b, PARTS) - log_scale, 0.0))
            weight = tl.where(ok[:, None], weight, 0.0)
            a *= weight
            b *= weight
            # in the type of the sums: the gradients of all products add up to zero only with the same values
            summed_a, summed_b = a.to(DOT), b.to(DOT)
        a = rotate_features(a, cos_ptr, sin_ptr, first, rows, ok, 0, D, BD, PAIRS, False)
        dv = tl.dot(a.to(DOT), ds_a, input_precision=PRECISION)
        if PARTS == 2:
            b = rotate_features(b, cos_ptr, sin_ptr, first, rows, ok, 1, D, BD, PAIRS, False)
            dv = tl.dot(b.to(DOT), ds_b, dv, input_precision=PRECISION)
        if CONTRAST:
            dv += tl.where(ok[:, None], dvalue[None, :], 0.0)
        # written before the gradients of the features need its registers
        store_rows(dv_ptr, dv, first, rows, exists, columns, columns < V, stride_dv)
        da = times(v, tl.trans(ds_a), tl.trans(low_a), PRECISION)
        da = rotate_features(da, cos_ptr, sin_ptr, first, rows, ok, 0, D, BD, PAIRS, True)
        da = plus_product(da, 1.0, dz_a, ones, wide_a, LEAN)
        db = da
        if PARTS == 2:
            db = times(v, tl.trans(ds_b), tl.trans(low_b), PRECISION)
            db = rotate_features(db, cos_ptr, sin_ptr, first, rows, ok, 1, D, BD, PAIRS, True)
            db = plus_product(db, 1.0, dz_b, ones, wide_b, LEAN)
        if HAS_WEIGHT:
            dweight = da * plain_a
            if PARTS == 2:
                dweight += db * plain_b
            # values beyond the head are undefined
            dweight = tl.sum(tl.where(in_head[None, :], dweight, 0.0), axis=1)[:, None]
            store_per_row(dweight_ptr, dweight, first, rows, exists)
            da *= weight
            db *= weight
        if BY_MEAN:
            dproduct = da * summed_a.to(tl.float32)
            if PARTS == 2:
                dproduct += db * summed_b.to(tl.float32)
            dproduct = tl.sum(tl.where(in_head[None, :], dproduct, 0.0), axis=1)[:, None] - weight * of_mean_weight
            # a key that has all the weight keeps it: any difference is rounding
            dproduct = tl.where(weight < nearly_all, dproduct, 0.0)
            per_weight = dproduct / tl.where(weight == 0.0, 1.0, weight)
            column = tl.trans(high_and_low(tl.zeros([BN, 16], tl.float32) + per_weight, DOT))
            dmean_a = tl.dot(column, summed_a, dmean_a, input_precision=PRECISION)
            da = da * weight + tl.where(has_slope(x), dproduct * mean_a, 0.0)
            if PARTS == 2:
                dmean_b = tl.dot(column, summed_b, dmean_b, input_precision=PRECISION)
                db = db * weight + tl.where(has_slope(x), dproduct * mean_b, 0.0)
        dx, g0, g1 = phi_key_gradient(x, da, db, param_ptr, channels, log_scale, alpha, D, MAP, CUBE)
        # masked keys get a gradient of zero, which must be written
        store_rows(
            dk_ptr, tl.where(ok[:, None], dx, 0.0) if HAS_MASK else dx, first, rows, exists, channels, in_head, stride_dk
        )
        if LEARNED:
            p0 += sum_over_rows(g0, ok, in_head)
            p1 += sum_over_rows(g1, ok, in_head)
    if BY_MEAN:
        store_row(dmean_ptr + program_index() * (PARTS * D), dmean_a, dmean_b, channels, D, PARTS)
    if LEARNED:
        store_two_parameters(dparam_ptr + program_index() * (2 * D), p0, p1, D, BD)


@triton.jit
def dk_kernel(
    k_ptr,  # [B, M, K, D]
    v_ptr,  # [B, M, K, V]
    mask_ptr,
    weight_ptr,  # [B, K, M] (packed: [K, T])
    cu_ptr,
    param_ptr,
    cos_ptr,
    sin_ptr,
    sums_ptr,  # [B * K, PARTS, D, V + 2]: read BY_MEAN
    mean_ptr,  # [B * K, PARTS * D + 1]: BY_MEAN
    dsums_ptr,  # [B * K, PARTS, D, V + 2]
    scale_ptr,  # [B * K]
    dk_ptr,  # [B, M, K, D]
    dv_ptr,  # [B, M, K, V]
    dweight_ptr,  # as weight_ptr
    dmean_ptr,  # [splits, B * K, PARTS * D]: written BY_MEAN
    dparam_ptr,  # [splits, B * K, 2, D]
    num_key_rows,
    num_keys,
    kv_heads,
    split_size,
    stride_kb,
    stride_k,
    stride_kh,
    stride_vb,
    stride_v,
    stride_vh,
    stride_dkb,
    stride_dk,
    stride_dkh,
    stride_dvb,
    stride_dv,
    stride_dvh,
    stride_angle_b,
    param_group,
    num_params,
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
    HAS_WEIGHT: tl.constexpr,
    BY_MEAN: tl.constexpr,
    CONTRAST: tl.constexpr,
    PACKED: tl.constexpr,
    GUARD: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_dkb, stride_dk, stride_dkh = row_strides(stride_dkb, stride_dk, stride_dkh, D)
    stride_dvb, stride_dv, stride_dvh = row_strides(stride_dvb, stride_dv, stride_dvh, V)
    sample = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    row, length = sample_rows(cu_ptr, sample, num_keys, PACKED)
    cos_ptr, sin_ptr = angle_rows(cos_ptr, sin_ptr, sample, row, stride_angle_b, PAIRS)
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, length)
    dsums = dsums_ptr + tl.cast(tl.program_id(1), tl.int64) * sums_size(D, V, PARTS, CONTRAST)
    dvalue = load_value_sum(dsums, D, V, BV, PARTS, CONTRAST)
    place = place_per_row(sample, head, kv_heads, row, num_key_rows, PACKED)
    ds_a, ds_b, dz_a, dz_b = load_both_sums(dsums, D, V, BD, BV, PARTS)
    mean_a, mean_b, of_mean_weight, nearly_all = None, None, None, None
    if BY_MEAN:
        mean_a, mean_b = load_mean(mean_ptr, D, BD, PARTS)
        sums = sums_ptr + tl.cast(tl.program_id(1), tl.int64) * sums_size(D, V, PARTS, CONTRAST)
        of_mean_weight = along_sums(sums, ds_a, ds_b, dz_a, dz_b, D, V, BD, BV, PARTS)
        nearly_all = tl.load(sums + V + 1) * NEARLY_ALL
    k_ptr = head_rows(k_ptr, sample, head, row, stride_kb, stride_k, stride_kh, PACKED)
    v_ptr = head_rows(v_ptr, sample, head, row, stride_vb, stride_v, stride_vh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_keys
    dk_ptr = head_rows(dk_ptr, sample, head, row, stride_dkb, stride_dk, stride_dkh, PACKED)
    dv_ptr = head_rows(dv_ptr, sample, head, row, stride_dvb, stride_dv, stride_dvh, PACKED)
    param_ptr += (head // param_group) * num_params
    log_scale = 0.0
    if GUARD or BY_MEAN:
        log_scale = tl.load(scale_ptr + tl.program_id(1))
    key_gradients(
        *(k_ptr, v_ptr, mask_ptr, weight_ptr + place, param_ptr, cos_ptr, sin_ptr, dk_ptr, dv_ptr, dweight_ptr + place),
        *(dmean_ptr, dparam_ptr, ds_a, ds_b, dz_a, dz_b, dvalue, mean_a, mean_b, of_mean_weight, nearly_all, log_scale),
        *(start, stop, stride_k, stride_v, stride_dk, stride_dv, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, HAS_WEIGHT, BY_MEAN, CONTRAST, LEARNED, DOT, PRECISION),
    )
