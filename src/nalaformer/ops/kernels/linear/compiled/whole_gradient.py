"""Compute the backward pass of short bidirectional attention in one launch: a program owns a sample and head.

The sums and their gradients stay on chip from one loop to the next.
"""

import triton
import triton.language as tl

from ...common.compiled.tiles import head_rows, row_strides
from .bidirectional_gradient import query_gradients, sums_gradients
from .bidirectional_gradient_of_keys import key_gradients
from .centred_sums import centred_sums
from .contrast import load_value_sum, sums_size


@triton.jit
def whole_gradient_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, M, H, D]
    v_ptr,  # [B, M, H, V]
    dout_ptr,  # [B, N, H, V]
    mask_ptr,  # [B, M] uint8
    weight_ptr,  # [B, H, M]
    param_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    sums_ptr,  # [B * H, PARTS, D, V + 2]
    scale_ptr,  # [B * H]
    inverse_ptr,  # [STREAMS, B, H, N]: 1 / denominator
    drop_ptr,  # the same shape: minus dout . (out - m), written and read here
    dq_ptr,  # [B, N, H, D]
    dk_ptr,  # [B, M, H, D]
    dv_ptr,  # [B, M, H, V]
    dweight_ptr,  # as weight_ptr
    dquery_ptr,  # [B * H, 4, D]: gradients of the parameters
    dkey_ptr,  # [B * H, 2, D]
    per_stream,  # size of a stream
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
    stride_dob,
    stride_do,
    stride_doh,
    stride_dqb,
    stride_dq,
    stride_dqh,
    stride_dkb,
    stride_dk,
    stride_dkh,
    stride_dvb,
    stride_dv,
    stride_dvh,
    stride_angle_q,
    stride_angle_k,
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
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_dob, stride_do, stride_doh = row_strides(stride_dob, stride_do, stride_doh, V)
    stride_dqb, stride_dq, stride_dqh = row_strides(stride_dqb, stride_dq, stride_dqh, D)
    stride_dkb, stride_dk, stride_dkh = row_strides(stride_dkb, stride_dk, stride_dkh, D)
    stride_dvb, stride_dv, stride_dvh = row_strides(stride_dvb, stride_dv, stride_dvh, V)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    owner = tl.cast(tl.program_id(1), tl.int64)
    wide = tl.cast(sample, tl.int64)
    q_ptr = head_rows(q_ptr, sample, head, 0, stride_qb, stride_q, stride_qh, False)
    k_ptr = head_rows(k_ptr, sample, head, 0, stride_kb, stride_k, stride_kh, False)
    v_ptr = head_rows(v_ptr, sample, head, 0, stride_vb, stride_v, stride_vh, False)
    dout_ptr = head_rows(dout_ptr, sample, head, 0, stride_dob, stride_do, stride_doh, False)
    dq_ptr = head_rows(dq_ptr, sample, head, 0, stride_dqb, stride_dq, stride_dqh, False)
    dk_ptr = head_rows(dk_ptr, sample, head, 0, stride_dkb, stride_dk, stride_dkh, False)
    dv_ptr = head_rows(dv_ptr, sample, head, 0, stride_dvb, stride_dv, stride_dvh, False)
    inverse_ptr += owner * num_queries
    drop_ptr += owner * num_queries
    cos_q_ptr += wide * stride_angle_q
    sin_q_ptr += wide * stride_angle_q
    mask_ptr += wide * num_keys
    weight_ptr += owner * num_keys
    param_ptr += (head // param_group) * num_params
    sums = sums_ptr + owner * sums_size(D, V, PARTS, CONTRAST)
    s_a, s_b, z_a, z_b, mean = centred_sums(sums, D, V, BD, BV, PARTS, PAIRS == 0 and not CONTRAST)
    s_a, s_b = s_a.to(DOT), s_b.to(DOT)
    count = tl.load(sums + V + 1)
    per_score = contrast / tl.maximum(count, 1.0)
    if CONTRAST:
        mean = load_value_sum(sums, D, V, BV, PARTS, CONTRAST) / tl.maximum(count, 1.0)
    key_scale = 0.0
    if GUARD:
        key_scale = tl.load(scale_ptr + owner)
    ds_a, ds_b, dz_a, dz_b, dvalue = sums_gradients(
        *(q_ptr, dout_ptr, inverse_ptr, drop_ptr, param_ptr, cos_q_ptr, sin_q_ptr),
        *(s_a, s_b, mean, per_score, eps * count, key_scale),
        *(0, num_queries, per_stream, stride_q, stride_do, norm_scale, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, STREAMS, PAIRS, CONTRAST, False, DOT, PRECISION),
    )
    key_gradients(
        *(k_ptr, v_ptr, mask_ptr, weight_ptr, param_ptr, cos_k_ptr + wide * stride_angle_k, sin_k_ptr + wide * stride_angle_k),
        *(dk_ptr, dv_ptr, dweight_ptr + owner * num_keys, None, dkey_ptr),
        *(tl.trans(ds_a), tl.trans(ds_b), dz_a, dz_b, dvalue / -tl.maximum(count, 1.0), None, None, None, None, key_scale),
        *(0, num_keys, stride_k, stride_v, stride_dk, stride_dv, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, HAS_WEIGHT, False, CONTRAST, LEARNED, DOT, PRECISION),
    )
    # every warp reads values that the others wrote
    tl.debug_barrier()
    if BD > 64 or BV > 64:
        # read again: beside the gradients of the sums they would not fit on chip
        s_a, s_b, z_a, z_b, _ = centred_sums(sums, D, V, BD, BV, PARTS, PAIRS == 0 and not CONTRAST)
        s_a, s_b = s_a.to(DOT), s_b.to(DOT)
    query_gradients(
        *(q_ptr, dout_ptr, inverse_ptr, drop_ptr, None, param_ptr, cos_q_ptr, sin_q_ptr, dq_ptr, dquery_ptr),
        *(tl.trans(s_a), tl.trans(s_b), z_a, z_b, None, None, per_score, eps * count),
        *(0, num_queries, per_stream, stride_q, stride_do, stride_dq, norm_scale, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, STREAMS, PAIRS, CONTRAST, False, False, LEARNED, DOT, PRECISION),
    )
