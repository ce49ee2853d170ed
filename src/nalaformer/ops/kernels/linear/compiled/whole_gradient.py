"""The backward pass of short bidirectional attention in one launch: a program owns a sample and head."""

import triton
import triton.language as tl

from .bidirectional_gradient import dq_kernel, dsums_kernel
from .bidirectional_gradient_of_keys import dk_kernel


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
    drop_ptr,  # the same: minus dout . (out - m), written and read here
    dsums_ptr,  # as sums_ptr: written and read here
    dq_ptr,  # [B, N, H, D]
    dk_ptr,  # [B, M, H, D]
    dv_ptr,  # [B, M, H, V]
    dweight_ptr,  # as weight_ptr
    dquery_ptr,  # [B * H, 4, D]: of the parameters
    dkey_ptr,  # [B * H, 2, D]
    per_stream,  # numbers of a stream
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
    """Gradients of the sums, then of queries, keys and values. Unused pointers (no packing, no mean query) are any others."""
    dsums_kernel(
        *(q_ptr, dout_ptr, sums_ptr, param_ptr, cos_q_ptr, sin_q_ptr, sums_ptr, scale_ptr, inverse_ptr, drop_ptr, dsums_ptr),
        *(num_queries, per_stream, num_queries, heads, 1, num_queries),
        *(stride_qb, stride_q, stride_qh, stride_dob, stride_do, stride_doh, stride_angle_q),
        *(param_group, num_params, norm_scale, alpha, eps, contrast),
        *(D, V, BD, BV, BN, MAP, PARTS, STREAMS, PAIRS, CONTRAST, False, GUARD, False, DOT, PRECISION),
    )
    # every warp reads what the others wrote
    tl.debug_barrier()
    dq_kernel(
        *(q_ptr, dout_ptr, inverse_ptr, drop_ptr, mask_ptr, scale_ptr, scale_ptr, sums_ptr, param_ptr, cos_q_ptr, sin_q_ptr),
        *(sums_ptr, dq_ptr, dquery_ptr, num_queries, per_stream, num_queries, heads, 1, num_queries, 1),
        *(stride_qb, stride_q, stride_qh, stride_dob, stride_do, stride_doh, stride_dqb, stride_dq, stride_dqh),
        *(stride_angle_q, param_group, num_params, norm_scale, alpha, eps, contrast),
        *(D, V, BD, BV, BN, MAP, PARTS, STREAMS, PAIRS, CONTRAST, False, False, False, LEARNED, DOT, PRECISION),
    )
    dk_kernel(
        *(k_ptr, v_ptr, mask_ptr, weight_ptr, sums_ptr, param_ptr, cos_k_ptr, sin_k_ptr, sums_ptr, scale_ptr, dsums_ptr),
        *(scale_ptr, dk_ptr, dv_ptr, dweight_ptr, scale_ptr, dkey_ptr, num_keys, num_keys, heads, num_keys),
        *(stride_kb, stride_k, stride_kh, stride_vb, stride_v, stride_vh),
        *(stride_dkb, stride_dk, stride_dkh, stride_dvb, stride_dv, stride_dvh, stride_angle_k, param_group, num_params, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, HAS_WEIGHT, False, CONTRAST, False, GUARD, LEARNED),
        *(DOT, PRECISION),
    )
