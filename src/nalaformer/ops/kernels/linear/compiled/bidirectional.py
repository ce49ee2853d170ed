"""Compute bidirectional linear attention: kernels that read each input once and keep the state on chip.

    state kernel    k, v          -> sums of one split of tokens
    output kernel   q, sums       -> out
    whole kernel    q, k, v       -> out            one launch for short inputs: a program owns a sample and head (of at most
                                                    64 tokens: compiled/short.py)
    dsums kernel    q, dout, sums -> gradients of the sums, of one split of tokens, and a value per query
    dq kernel       q, dout, sums, those values  -> dq
    dk kernel       k, v, those gradients        -> dk, dv

The sums of a sample and head are float32 [PARTS, D, V + 2]: S, then the key sum z as column V, then the number of visible
keys as column V + 1, or the sum of their weights where the mean query weighs them (compiled/mean_query.py). Their gradients
have the same shape (last column unused). Features exist in registers only. With a contrast (compiled/contrast.py) the sum of
values, V elements, follows them.

Rows are tokens. DOT is the type of matrix operands: bfloat16 for bfloat16 inputs, float32 otherwise; sums are float32 always.
Each loop runs in a fixed order and nothing is added atomically, so results are the same in every run.
"""

import triton
import triton.language as tl

from ...common.compiled.fastmath import constant, exp2
from ...common.compiled.maps import is_unbounded, phi_query
from ...common.compiled.products import high_and_low, is_lean, unit_matrix, widen
from ...common.compiled.tiles import (
    angle_rows,
    load_both_sums,
    load_rows,
    place_per_row,
    program_index,
    rotate_features,
    row_strides,
    sample_offset,
    sample_rows,
    store_both_sums,
    store_per_row,
    store_rows,
)
from .contrast import LARGEST_CONTRAST_SCALE, add_contrast, load_value_sum, store_value_sum, sums_size, without_mean
from .key_sums import sum_keys
from .mean_query import mean_from_sums, store_mean
from .weighed_key_sums import sum_weighed_keys

# limits for maps without a bound, as in ops.features: LARGEST_ROTATED_OUTPUT and 1 / SMALLEST_DIVISOR
LARGEST_ROTATED_OUTPUT = constant(1e12)
LARGEST_INVERSE = constant(1e18)


@triton.jit
def scaled_eps(query_scale, key_scale, eps_count):
    """Return eps in the scale of the denominator to which it is added."""
    return eps_count * exp2(-(query_scale + key_scale))


@triton.jit
def gradient_factor(inverse, MAP: tl.constexpr):
    """Return the factor of a row's gradient: 1 / denominator, but bounded for maps without a bound."""
    return tl.minimum(inverse, LARGEST_INVERSE) if is_unbounded(MAP) else inverse


@triton.jit
def inverse_denominator(
    a, b, z_a, z_b, wide_a, wide_b, query_scale, key_scale, eps_count, PARTS: tl.constexpr, BY_PRODUCT: tl.constexpr
):
    """Return 1 / denominator, [BN, 1], 1 where a row sees nothing, whose numerator is 0; and the denominator without eps."""
    if BY_PRODUCT:
        wide = tl.dot(a, wide_a)
        if PARTS == 2:
            wide = tl.dot(b, wide_b, wide)
        total = tl.sum(wide, axis=1)[:, None]
    else:
        total = tl.sum(a * z_a[None, :], axis=1)[:, None]
        if PARTS == 2:
            total += tl.sum(b * z_b[None, :], axis=1)[:, None]
    below = total + scaled_eps(query_scale, key_scale, eps_count)
    return 1.0 / tl.where(below == 0.0, 1.0, below), total


@triton.jit
def write_outputs(
    q_ptr,
    out_ptr,
    inverse_ptr,  # [STREAMS, ..., N], from the sample and head on
    per_stream,  # size of a stream
    param_ptr,
    cos_ptr,
    sin_ptr,
    s_a,
    s_b,
    z_a,
    z_b,
    eps_count,
    key_scale,
    mean,  # [BV]: the mean of the values, for a contrast
    per_score,  # the contrast's scale over the denominator
    start,
    stop,
    stride_q,
    stride_o,
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
    KEEP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write attention outputs of queries start .. stop - 1; s_a, s_b already in DOT."""
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    LEAN: tl.constexpr = is_lean(DOT, BD, BV)
    TYPE: tl.constexpr = DOT if LEAN and PAIRS == 0 else None
    unit = unit_matrix(BD, DOT)
    wide_a = high_and_low(tl.zeros([BD, 16], tl.float32) + z_a[:, None], DOT)
    wide_b = high_and_low(tl.zeros([BD, 16], tl.float32) + z_b[:, None], DOT)
    for first in range(start, stop, BN):
        ok = rows < stop - first
        x = widen(load_rows(q_ptr, first, rows, ok, channels, in_head, stride_q), unit, LEAN)
        out = tl.zeros([BN, BV], tl.float32)
        for stream in tl.static_range(STREAMS):
            a, b, query_scale = phi_query(x, param_ptr, channels, norm_scale, alpha, D, MAP, stream, TYPE)
            inverse, score = inverse_denominator(
                a, b, z_a, z_b, wide_a, wide_b, query_scale, key_scale, eps_count, PARTS, TYPE is not None
            )
            a = rotate_features(a, cos_ptr, sin_ptr, first, rows, ok, 0, D, BD, PAIRS, False)
            above = tl.dot(a.to(DOT), s_a, input_precision=PRECISION)
            if PARTS == 2:
                b = rotate_features(b, cos_ptr, sin_ptr, first, rows, ok, 1, D, BD, PAIRS, False)
                above = tl.dot(b.to(DOT), s_b, above, input_precision=PRECISION)
            if PAIRS > 0 and is_unbounded(MAP):
                size = tl.max(tl.abs(above), axis=1)[:, None]
                inverse = tl.minimum(inverse, LARGEST_ROTATED_OUTPUT / tl.where(size == 0.0, 1.0, size))
            if KEEP:
                store_per_row(inverse_ptr + stream * per_stream, inverse, first, rows, ok)
            above *= inverse
            if CONTRAST:
                contrast_scale = tl.minimum(per_score * score, LARGEST_CONTRAST_SCALE)
                above = add_contrast(above, mean, contrast_scale, score, inverse, eps_count, PAIRS == 0)
            if STREAMS == 1:
                out = above
            else:
                mine = (columns >= stream * (V // STREAMS)) & (columns < (stream + 1) * (V // STREAMS))
                out = tl.where(mine[None, :], above, out)
        store_rows(out_ptr, out, first, rows, ok, columns, columns < V, stride_o)


@triton.jit
def state_kernel(
    k_ptr,  # [B, M, K, D]
    v_ptr,  # [B, M, K, V]
    mask_ptr,  # [B, M] uint8
    weight_ptr,  # [B, K, M] (packed: [K, T]): factors of the keys
    query_sums_ptr,  # [query_splits, B * K, PARTS * D + 1]: BY_MEAN
    mean_ptr,  # [B * K, PARTS * D + 1]: written, BY_MEAN
    cu_ptr,  # [B + 1]
    param_ptr,  # [heads of the map, P]
    cos_ptr,  # [B or 1, M, PAIRS]
    sin_ptr,
    sums_ptr,  # [splits, B * K, PARTS, D, V + 2]
    scale_ptr,  # [splits, B * K]
    num_key_rows,  # M, or T if packed
    num_keys,
    kv_heads,
    split_size,  # tokens per split, a multiple of BN
    query_splits,
    stride_kb,
    stride_k,
    stride_kh,
    stride_vb,
    stride_v,
    stride_vh,
    stride_angle_b,
    param_group,  # key heads per row of parameters
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
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    sample = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    row, length = sample_rows(cu_ptr, sample, num_keys, PACKED)
    cos_ptr, sin_ptr = angle_rows(cos_ptr, sin_ptr, sample, row, stride_angle_b, PAIRS)
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, length)
    k_ptr += sample_offset(sample, row, stride_kb, stride_k, PACKED) + head * stride_kh
    v_ptr += sample_offset(sample, row, stride_vb, stride_v, PACKED) + head * stride_vh
    mask_ptr += tl.cast(sample, tl.int64) * num_keys
    if BY_MEAN:
        mean_a, mean_b, share = mean_from_sums(query_sums_ptr, query_splits, D, BD, PARTS)
        if tl.program_id(0) == 0:
            store_mean(mean_ptr, mean_a, mean_b, share, D, BD, PARTS)
        s_a, s_b, z_a, z_b, count, log_scale = sum_weighed_keys(
            *(k_ptr, v_ptr, mask_ptr, mean_a, mean_b, cos_ptr, sin_ptr, start, stop, stride_k, stride_v),
            *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, HAS_MASK, DOT, PRECISION),
        )
    else:
        s_a, s_b, z_a, z_b, count, log_scale, value_sum = sum_keys(
            *(k_ptr, v_ptr, mask_ptr, weight_ptr + place_per_row(sample, head, kv_heads, row, num_key_rows, PACKED)),
            *(param_ptr + (head // param_group) * num_params, cos_ptr, sin_ptr, start, stop, stride_k, stride_v, alpha),
            *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, HAS_WEIGHT, CONTRAST, GUARD, DOT, PRECISION),
        )
    place = program_index()
    sums = sums_ptr + place * sums_size(D, V, PARTS, CONTRAST)
    store_both_sums(sums, s_a, s_b, z_a, z_b, count, D, V, BD, BV, PARTS)
    if CONTRAST:
        store_value_sum(sums, value_sum, D, V, BV, PARTS)
    if GUARD or BY_MEAN:
        tl.store(scale_ptr + place, log_scale)


@triton.jit
def output_kernel(
    q_ptr,  # [B, N, H, D]
    cu_ptr,
    param_ptr,
    cos_ptr,
    sin_ptr,
    sums_ptr,  # [B * K, PARTS, D, V + 2]
    scale_ptr,  # [B * K]
    out_ptr,  # [B, N, H, V]
    inverse_ptr,  # [STREAMS, B, H, N] (packed: [STREAMS, H, T]): 1 / denominator, for the backward pass
    num_rows,  # N, or T if packed
    per_stream,  # size of a stream
    num_queries,
    heads,
    group,  # query heads per key head
    split_size,
    stride_qb,
    stride_q,
    stride_qh,
    stride_ob,
    stride_o,
    stride_oh,
    stride_angle_b,
    param_group,  # query heads per row of parameters
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
    KEEP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_ob, stride_o, stride_oh = row_strides(stride_ob, stride_o, stride_oh, V)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    row, length = sample_rows(cu_ptr, sample, num_queries, PACKED)
    cos_ptr, sin_ptr = angle_rows(cos_ptr, sin_ptr, sample, row, stride_angle_b, PAIRS)
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, length)
    if start < stop:
        owner = tl.cast(sample, tl.int64) * (heads // group) + head // group
        sums = sums_ptr + owner * sums_size(D, V, PARTS, CONTRAST)
        s_a, s_b, z_a, z_b = load_both_sums(sums, D, V, BD, BV, PARTS)
        count = tl.load(sums + V + 1)
        mean = load_value_sum(sums, D, V, BV, PARTS, CONTRAST) / tl.maximum(count, 1.0)
        s_a = without_mean(s_a, z_a, mean, CONTRAST and PAIRS == 0)
        s_b = without_mean(s_b, z_b, mean, CONTRAST and PAIRS == 0)
        key_scale = 0.0
        if GUARD:
            key_scale = tl.load(scale_ptr + owner)
        write_outputs(
            q_ptr + sample_offset(sample, row, stride_qb, stride_q, PACKED) + head * stride_qh,
            out_ptr + sample_offset(sample, row, stride_ob, stride_o, PACKED) + head * stride_oh,
            inverse_ptr + place_per_row(sample, head, heads, row, num_rows, PACKED),
            per_stream,
            param_ptr + (head // param_group) * num_params,
            *(cos_ptr, sin_ptr, s_a.to(DOT), s_b.to(DOT), z_a, z_b, eps * count, key_scale),
            *(mean, contrast / tl.maximum(count, 1.0), start, stop, stride_q, stride_o, norm_scale, alpha),
            *(D, V, BD, BV, BN, MAP, PARTS, STREAMS, PAIRS, CONTRAST, KEEP, DOT, PRECISION),
        )


@triton.jit
def whole_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    weight_ptr,
    param_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    out_ptr,
    inverse_ptr,
    sums_ptr,
    scale_ptr,
    num_queries,
    num_keys,
    heads,
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
    stride_angle_qb,
    stride_angle_kb,
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
    CUBE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CONTRAST: tl.constexpr,
    GUARD: tl.constexpr,
    KEEP: tl.constexpr,  # store what the backward pass needs
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_ob, stride_o, stride_oh = row_strides(stride_ob, stride_o, stride_oh, V)
    sample = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    wide = tl.cast(sample, tl.int64)
    params = param_ptr + (head // param_group) * num_params
    s_a, s_b, z_a, z_b, count, log_scale, value_sum = sum_keys(
        k_ptr + wide * stride_kb + head * stride_kh,
        v_ptr + wide * stride_vb + head * stride_vh,
        mask_ptr + wide * num_keys,
        weight_ptr + tl.cast(tl.program_id(0), tl.int64) * num_keys,
        params,
        cos_k_ptr + wide * stride_angle_kb,
        sin_k_ptr + wide * stride_angle_kb,
        *(0, num_keys, stride_k, stride_v, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, HAS_WEIGHT, CONTRAST, GUARD, DOT, PRECISION),
    )
    if KEEP:
        sums = sums_ptr + tl.cast(tl.program_id(0), tl.int64) * sums_size(D, V, PARTS, CONTRAST)
        store_both_sums(sums, s_a, s_b, z_a, z_b, count, D, V, BD, BV, PARTS)
        if CONTRAST:
            store_value_sum(sums, value_sum, D, V, BV, PARTS)
        if GUARD:
            tl.store(scale_ptr + tl.program_id(0), log_scale)
    mean = value_sum / tl.maximum(count, 1.0)
    s_a = without_mean(s_a, z_a, mean, CONTRAST and PAIRS == 0)
    s_b = without_mean(s_b, z_b, mean, CONTRAST and PAIRS == 0)
    write_outputs(
        q_ptr + wide * stride_qb + head * stride_qh,
        out_ptr + wide * stride_ob + head * stride_oh,
        inverse_ptr + tl.cast(tl.program_id(0), tl.int64) * num_queries,
        tl.cast(tl.num_programs(0), tl.int64) * num_queries,
        params,
        cos_q_ptr + wide * stride_angle_qb,
        sin_q_ptr + wide * stride_angle_qb,
        *(s_a.to(DOT), s_b.to(DOT), z_a, z_b, eps * count, log_scale, mean, contrast / tl.maximum(count, 1.0)),
        *(0, num_queries, stride_q, stride_o, norm_scale, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, STREAMS, PAIRS, CONTRAST, KEEP, DOT, PRECISION),
    )
