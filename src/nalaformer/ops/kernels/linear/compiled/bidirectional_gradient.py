"""Compute the queries' backward pass of bidirectional linear attention; bidirectional.py has the plan and the sums' layout.

With g = dout / den the gradient of a query's features is g S^T - (g . out) z; 1 / den comes from the forward pass.

Both terms grow with the mean of the values, and their difference does not: with S = C + z m it is g C^T - (g . (out - m)) z.
So m, the values as seen by a query that favours no channel, is subtracted from S before S is rounded, and out - m, which a
rounded output does not show, is computed from C again. With rotary m is 0: there S sums rotated features and z plain ones, and
the part of the mean does not cancel. It is also 0 with a contrast, which has its own mean.
"""

import triton
import triton.language as tl

from ...common.compiled.map_gradients import phi_query_gradient, shared_phi_gradient
from ...common.compiled.maps import is_unbounded, phi_query
from ...common.compiled.products import (
    high_and_low,
    is_lean,
    left_factor,
    plus_product,
    right_factor,
    unit_matrix,
    widen,
)
from ...common.compiled.tiles import (
    angle_rows,
    head_rows,
    load_per_row,
    load_rows,
    place_per_row,
    program_index,
    rotate_features,
    row_strides,
    sample_rows,
    store_both_sums,
    store_per_row,
    store_rows,
    store_two_parameters,
    stream_columns,
    sum_over_rows,
    visible_rows,
)
from .bidirectional import LARGEST_INVERSE, gradient_factor, scaled_eps
from .centred_sums import centred_sums
from .contrast import drop_with_contrast, load_value_sum, store_value_sum, sums_size, to_contrast_scale
from .mean_query import has_slope, mean_gradient


@triton.jit
def query_gradients(
    q_ptr,  # this and all that follow begin at the sample and head
    dout_ptr,
    inverse_ptr,
    drop_ptr,
    mask_ptr,
    param_ptr,
    cos_ptr,
    sin_ptr,
    dq_ptr,
    dparam_ptr,  # [splits, B * H, 4, D]
    s_a,  # [BV, BD], without the mean of the values, in DOT
    s_b,
    z_a,  # [BD]
    z_b,
    row_a,  # [1, BD]: the mean query's gradient for each query, BY_MEAN
    row_b,
    per_score,
    eps_count,
    start,
    stop,
    per_stream,
    stride_q,
    stride_do,
    stride_dq,
    norm_scale,
    alpha,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    STREAMS: tl.constexpr,
    PAIRS: tl.constexpr,
    CONTRAST: tl.constexpr,
    BY_MEAN: tl.constexpr,
    HAS_QUERY_MASK: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of queries start .. stop - 1, and add up those of the parameters."""
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    p0 = tl.zeros([BD], tl.float32)
    p1 = tl.zeros([BD], tl.float32)
    p2 = tl.zeros([BD], tl.float32)
    p3 = tl.zeros([BD], tl.float32)
    LEAN: tl.constexpr = is_lean(DOT, BD, BV)
    unit = unit_matrix(BD, DOT)
    wide_a = right_factor(z_a[None, :], DOT)
    wide_b = right_factor(z_b[None, :], DOT)
    for first in range(start, stop, BN):
        ok = rows < stop - first
        x = widen(load_rows(q_ptr, first, rows, ok, channels, in_head, stride_q), unit, LEAN)
        dout = load_rows(dout_ptr, first, rows, ok, columns, columns < V, stride_do)
        dx = tl.zeros([BN, BD], tl.float32)
        for stream in tl.static_range(STREAMS):
            inverse = load_per_row(inverse_ptr + stream * per_stream, first, rows, ok)
            factor = gradient_factor(inverse, MAP)
            if CONTRAST:
                factor = inverse * (1.0 + to_contrast_scale(inverse, per_score, eps_count))
            drop = load_per_row(drop_ptr + stream * per_stream, first, rows, ok)
            share = stream_columns(dout, columns, stream, V, STREAMS)
            # the denominator is divided out at the end, where the two halves have become one tile
            minus = left_factor(drop, DOT)
            da = tl.dot(share.to(DOT), s_a, input_precision=PRECISION)
            da = rotate_features(da, cos_ptr, sin_ptr, first, rows, ok, 0, D, BD, PAIRS, True)
            da = plus_product(da, drop, z_a, minus, wide_a, LEAN)
            db = da
            if PARTS == 2:
                db = tl.dot(share.to(DOT), s_b, input_precision=PRECISION)
                db = rotate_features(db, cos_ptr, sin_ptr, first, rows, ok, 1, D, BD, PAIRS, True)
                db = plus_product(db, drop, z_b, minus, wide_b, LEAN)
            step, g0, g1 = phi_query_gradient(x, da, db, param_ptr, channels, norm_scale, alpha, D, MAP, stream)
            dx += step * factor
            if LEARNED:
                g0 = sum_over_rows(g0 * factor, ok, in_head)
                g1 = sum_over_rows(g1 * factor, ok, in_head)
                if stream == 0:
                    p0 += g0
                    p1 += g1
                else:
                    p2 += g0
                    p3 += g1
        if BY_MEAN:
            # every query that counts is a part of the mean
            counts = visible_rows(mask_ptr, first, rows, ok, HAS_QUERY_MASK)[:, None] & has_slope(x)
            step, g0, g1 = shared_phi_gradient(x, row_a, row_b, None, channels, 0.0, D, MAP)
            dx += tl.where(counts, step, 0.0)
        store_rows(dq_ptr, dx, first, rows, ok, channels, in_head, stride_dq)
    if LEARNED:
        place = program_index()
        dparam_ptr += place * (4 * D)
        store_two_parameters(dparam_ptr, p0, p1, D, BD)
        tl.store(dparam_ptr + 2 * D + channels, p2, mask=in_head)
        tl.store(dparam_ptr + 3 * D + channels, p3, mask=in_head)


@triton.jit
def dq_kernel(
    q_ptr,  # [B, N, H, D]
    dout_ptr,  # [B, N, H, V]
    inverse_ptr,  # [STREAMS, B, H, N] (packed: [STREAMS, H, T]): 1 / denominator
    drop_ptr,  # the same: minus dout . (out - m)
    mask_ptr,  # [B, N] uint8: mask of queries, BY_MEAN and HAS_QUERY_MASK
    mean_ptr,  # [B * H, PARTS * D + 1]: BY_MEAN
    dmean_ptr,  # [key_splits, B * H, PARTS * D]: BY_MEAN
    cu_ptr,
    param_ptr,
    cos_ptr,
    sin_ptr,
    sums_ptr,  # [B * K, PARTS, D, V + 2]
    dq_ptr,  # [B, N, H, D]
    dparam_ptr,  # [splits, B * H, 4, D]
    num_rows,  # N, or T if packed
    per_stream,  # size of a stream
    num_queries,
    heads,
    group,
    split_size,
    key_splits,
    stride_qb,
    stride_q,
    stride_qh,
    stride_dob,
    stride_do,
    stride_doh,
    stride_dqb,
    stride_dq,
    stride_dqh,
    stride_angle_b,
    param_group,
    num_params,
    norm_scale,
    alpha,
    eps,
    contrast,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    STREAMS: tl.constexpr,
    PAIRS: tl.constexpr,
    CONTRAST: tl.constexpr,
    BY_MEAN: tl.constexpr,
    HAS_QUERY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_dob, stride_do, stride_doh = row_strides(stride_dob, stride_do, stride_doh, V)
    stride_dqb, stride_dq, stride_dqh = row_strides(stride_dqb, stride_dq, stride_dqh, D)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    row, length = sample_rows(cu_ptr, sample, num_queries, PACKED)
    cos_ptr, sin_ptr = angle_rows(cos_ptr, sin_ptr, sample, row, stride_angle_b, PAIRS)
    place = place_per_row(sample, head, heads, row, num_rows, PACKED)
    q_ptr = head_rows(q_ptr, sample, head, row, stride_qb, stride_q, stride_qh, PACKED)
    dout_ptr = head_rows(dout_ptr, sample, head, row, stride_dob, stride_do, stride_doh, PACKED)
    dq_ptr = head_rows(dq_ptr, sample, head, row, stride_dqb, stride_dq, stride_dqh, PACKED)
    inverse_ptr += place
    drop_ptr += place
    param_ptr += (head // param_group) * num_params
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, length)
    owner = tl.cast(sample, tl.int64) * (heads // group) + head // group
    sums = sums_ptr + owner * sums_size(D, V, PARTS, CONTRAST)
    s_a, s_b, z_a, z_b, mean = centred_sums(sums, D, V, BD, BV, PARTS, PAIRS == 0 and not CONTRAST)
    count = tl.load(sums + V + 1)
    per_score = contrast / tl.maximum(count, 1.0)
    row_a, row_b = None, None
    if BY_MEAN:
        mask_ptr += tl.cast(sample, tl.int64) * num_queries
        row_a, row_b = mean_gradient(mean_ptr, dmean_ptr, key_splits, D, BD, PARTS)
    query_gradients(
        *(q_ptr, dout_ptr, inverse_ptr, drop_ptr, mask_ptr, param_ptr, cos_ptr, sin_ptr, dq_ptr, dparam_ptr),
        *(tl.trans(s_a.to(DOT)), tl.trans(s_b.to(DOT)), z_a, z_b, row_a, row_b, per_score, eps * count),
        *(start, stop, per_stream, stride_q, stride_do, stride_dq, norm_scale, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, STREAMS, PAIRS, CONTRAST, BY_MEAN, HAS_QUERY_MASK, LEARNED, DOT, PRECISION),
    )


@triton.jit
def sums_gradients(
    q_ptr,  # this and all that follow begin at the sample and head
    dout_ptr,
    inverse_ptr,
    drop_ptr,
    param_ptr,
    cos_ptr,
    sin_ptr,
    s_a,  # [BD, BV], without the mean of the values, in DOT; this and the next five unless IS_KNOWN
    s_b,
    mean,  # [BV]
    per_score,
    eps_count,
    key_scale,
    start,
    stop,
    per_stream,
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
    STREAMS: tl.constexpr,
    PAIRS: tl.constexpr,
    CONTRAST: tl.constexpr,
    IS_KNOWN: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the gradients of S [BV, BD], z [BD] and the sum of values [BV] from queries start .. stop - 1; write `drop`."""
    CENTRED: tl.constexpr = PAIRS == 0 and not CONTRAST
    if not IS_KNOWN:
        wide_mean = high_and_low(tl.zeros([BV, 16], tl.float32) + mean[:, None], DOT)
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    ds_a = tl.zeros([BV, BD], tl.float32)
    ds_b = tl.zeros([BV, BD], tl.float32)
    # dz is a product too, with a tile of few rows: a sum over rows would cost a shuffle per channel
    dz_a = tl.zeros([16, BD], tl.float32)
    dz_b = tl.zeros([16, BD], tl.float32)
    dvalue_sum = tl.zeros([16, BV], tl.float32)
    LEAN: tl.constexpr = is_lean(DOT, BD, BV)
    unit = unit_matrix(BD, DOT)
    unit_v = unit_matrix(BV, DOT)
    TYPE: tl.constexpr = DOT if LEAN and PAIRS == 0 else None
    for first in range(start, stop, BN):
        ok = rows < stop - first
        x = widen(load_rows(q_ptr, first, rows, ok, channels, in_head, stride_q), unit, LEAN)
        dout = load_rows(dout_ptr, first, rows, ok, columns, columns < V, stride_do)
        for stream in tl.static_range(STREAMS):
            inverse = load_per_row(inverse_ptr + stream * per_stream, first, rows, ok)
            # the row's factor multiplies the features: dout then needs no pass through registers
            factor = gradient_factor(inverse, MAP)
            if CONTRAST:
                contrast_scale = to_contrast_scale(inverse, per_score, eps_count)
                factor = inverse * (1.0 + contrast_scale)
            a, b, query_scale = phi_query(x, param_ptr, channels, norm_scale, alpha, D, MAP, stream, TYPE, factor)
            share = stream_columns(dout, columns, stream, V, STREAMS)
            rotated_a = rotate_features(a, cos_ptr, sin_ptr, first, rows, ok, 0, D, BD, PAIRS, False).to(DOT)
            rotated_b = rotated_a
            if PARTS == 2:
                rotated_b = rotate_features(b, cos_ptr, sin_ptr, first, rows, ok, 1, D, BD, PAIRS, False).to(DOT)
            if IS_KNOWN:
                drop = load_per_row(drop_ptr + stream * per_stream, first, rows, ok)
            else:
                out = tl.dot(rotated_a, s_a, input_precision=PRECISION)
                if PARTS == 2:
                    out = tl.dot(rotated_b, s_b, out, input_precision=PRECISION)
                drop = -tl.sum(out * widen(share, unit_v, LEAN), axis=1)[:, None]
                if is_unbounded(MAP):
                    # the output, computed from the features with their factor, has the whole inverse
                    drop *= tl.maximum(inverse / LARGEST_INVERSE, 1.0)
                if CENTRED or CONTRAST:
                    along_mean = tl.sum(tl.dot(share.to(DOT), wide_mean, input_precision=PRECISION), axis=1)[:, None]
                if CENTRED:
                    # the mean is in the output, except for the part that eps takes
                    drop += along_mean * (scaled_eps(query_scale, key_scale, eps_count) * inverse)
                if CONTRAST:
                    drop = drop_with_contrast(drop, along_mean, contrast_scale, factor, per_score)
                    weight = tl.trans(high_and_low(tl.zeros([BN, 16], tl.float32) + contrast_scale, DOT))
                    dvalue_sum = tl.dot(weight, share.to(DOT), dvalue_sum, input_precision=PRECISION)
                store_per_row(drop_ptr + stream * per_stream, drop, first, rows, ok)
                if CENTRED:
                    drop -= along_mean
            weight = tl.trans(high_and_low(tl.zeros([BN, 16], tl.float32) + drop, DOT))
            dz_a = tl.dot(weight, a.to(DOT), dz_a, input_precision=PRECISION)
            ds_a = tl.dot(tl.trans(share.to(DOT)), rotated_a, ds_a, input_precision=PRECISION)
            if PARTS == 2:
                dz_b = tl.dot(weight, b.to(DOT), dz_b, input_precision=PRECISION)
                ds_b = tl.dot(tl.trans(share.to(DOT)), rotated_b, ds_b, input_precision=PRECISION)
    return ds_a, ds_b, tl.sum(dz_a, axis=0), tl.sum(dz_b, axis=0), tl.sum(dvalue_sum, axis=0)


@triton.jit
def dsums_kernel(
    q_ptr,  # [B, N, H, D]
    dout_ptr,  # [B, N, H, V]
    cu_ptr,
    param_ptr,
    cos_ptr,
    sin_ptr,
    sums_ptr,  # [B * K, PARTS, D, V + 2]
    scale_ptr,  # [B * K]
    inverse_ptr,  # [STREAMS, B, H, N] or [STREAMS, H, T]
    drop_ptr,  # the same: read if IS_KNOWN, minus dout . out; written otherwise, as dq_kernel reads it
    dsums_ptr,  # [splits, B * H, PARTS, D, V + 2]
    num_rows,
    per_stream,
    num_queries,
    heads,
    group,
    split_size,
    stride_qb,
    stride_q,
    stride_qh,
    stride_dob,
    stride_do,
    stride_doh,
    stride_angle_b,
    param_group,
    num_params,
    norm_scale,
    alpha,
    eps,
    contrast,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    STREAMS: tl.constexpr,
    PAIRS: tl.constexpr,
    CONTRAST: tl.constexpr,
    PACKED: tl.constexpr,
    GUARD: tl.constexpr,
    IS_KNOWN: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write what one split of queries adds to the gradients of S and z, and the part that the denominators take away again.

    It is separate from dq_kernel although it reads the same tensors: the two together need more registers than there are.
    """
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_dob, stride_do, stride_doh = row_strides(stride_dob, stride_do, stride_doh, V)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    row, length = sample_rows(cu_ptr, sample, num_queries, PACKED)
    cos_ptr, sin_ptr = angle_rows(cos_ptr, sin_ptr, sample, row, stride_angle_b, PAIRS)
    place = place_per_row(sample, head, heads, row, num_rows, PACKED)
    q_ptr = head_rows(q_ptr, sample, head, row, stride_qb, stride_q, stride_qh, PACKED)
    dout_ptr = head_rows(dout_ptr, sample, head, row, stride_dob, stride_do, stride_doh, PACKED)
    inverse_ptr += place
    drop_ptr += place
    param_ptr += (head // param_group) * num_params
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, length)
    s_a, s_b, mean, count, per_score, eps_count, key_scale = None, None, None, None, None, None, None
    if not IS_KNOWN:
        owner = tl.cast(sample, tl.int64) * (heads // group) + head // group
        sums = sums_ptr + owner * sums_size(D, V, PARTS, CONTRAST)
        s_a, s_b, z_a, z_b, mean = centred_sums(sums, D, V, BD, BV, PARTS, PAIRS == 0 and not CONTRAST)
        s_a = s_a.to(DOT)
        s_b = s_b.to(DOT)
        count = tl.load(sums + V + 1)
        if CONTRAST:
            mean = load_value_sum(sums, D, V, BV, PARTS, CONTRAST) / tl.maximum(count, 1.0)
            per_score = contrast / tl.maximum(count, 1.0)
        eps_count = eps * count
        key_scale = 0.0
        if GUARD:
            key_scale = tl.load(scale_ptr + owner)
    ds_a, ds_b, dz_a, dz_b, dvalue_sum = sums_gradients(
        *(q_ptr, dout_ptr, inverse_ptr, drop_ptr, param_ptr, cos_ptr, sin_ptr, s_a, s_b, mean, per_score, eps_count, key_scale),
        *(start, stop, per_stream, stride_q, stride_do, norm_scale, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, STREAMS, PAIRS, CONTRAST, IS_KNOWN, DOT, PRECISION),
    )
    dsums = dsums_ptr + program_index() * sums_size(D, V, PARTS, CONTRAST)
    if CONTRAST:
        store_value_sum(dsums, dvalue_sum / -tl.maximum(count, 1.0), D, V, BV, PARTS)
    store_both_sums(dsums, tl.trans(ds_a), tl.trans(ds_b), dz_a, dz_b, 0.0, D, V, BD, BV, PARTS)
