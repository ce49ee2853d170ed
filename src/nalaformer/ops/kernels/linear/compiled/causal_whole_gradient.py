"""Compute the backward pass of short causal attention in one launch: a program owns a sample and head without earlier tokens.

It runs the scans of causal_gradient.py, causal_gradient_of_keys.py and causal_gradient_of_values.py one after the other,
because small inputs are launch-bound.
"""

import triton
import triton.language as tl

from .causal_gradient import causal_dq_kernel
from .causal_gradient_of_keys import causal_dk_kernel
from .causal_gradient_of_values import causal_dv_kernel


@triton.jit
def causal_whole_gradient_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, H, D]
    v_ptr,  # [B, N, H, V]
    out_ptr,  # [B, N, H, V]
    dout_ptr,  # [B, N, H, V]
    inverse_ptr,  # [1, B, H, N]
    mask_ptr,  # [B, N] uint8
    param_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    dq_ptr,  # [B, N, H, D]
    dk_ptr,  # [B, N, H, D]
    dv_ptr,  # [B, N, H, V]
    drop_ptr,  # [1, B, H, N]: written and read here
    dquery_ptr,  # [1, B * H, 2, D]: gradients of the parameters
    dkey_ptr,  # the same shape
    num_tokens,
    heads,
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
    stride_dkb,
    stride_dk,
    stride_dkh,
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
    SAME_ANGLES: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    causal_dq_kernel(
        *(q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, inverse_ptr, mask_ptr, None, param_ptr),
        *(cos_q_ptr, sin_q_ptr, cos_k_ptr, sin_k_ptr, inverse_ptr, inverse_ptr, dq_ptr, drop_ptr, dquery_ptr),
        *(num_tokens, num_tokens, heads, 1, split_size),
        *(stride_qb, stride_q, stride_qh, stride_kb, stride_k, stride_kh, stride_vb, stride_v, stride_vh),
        *(stride_ob, stride_o, stride_oh, stride_dob, stride_do, stride_doh, stride_dqb, stride_dq, stride_dqh),
        *(stride_angle_q, stride_angle_k, query_param_group, key_param_group, num_params, norm_scale, alpha, eps),
        *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, False, False, SAME_ANGLES, False, LEARNED, DOT, PRECISION),
    )
    # every warp reads values that the others wrote
    tl.debug_barrier()
    causal_dk_kernel(
        *(q_ptr, k_ptr, v_ptr, dout_ptr, mask_ptr, None, param_ptr, cos_q_ptr, sin_q_ptr, cos_k_ptr, sin_k_ptr),
        *(inverse_ptr, drop_ptr, inverse_ptr, inverse_ptr, inverse_ptr, dk_ptr, dkey_ptr),
        *(num_tokens, num_tokens, heads, 1, split_size),
        *(stride_qb, stride_q, stride_qh, stride_kb, stride_k, stride_kh, stride_vb, stride_v, stride_vh),
        *(stride_dob, stride_do, stride_doh, stride_dkb, stride_dk, stride_dkh),
        *(stride_angle_q, stride_angle_k, query_param_group, key_param_group, num_params, norm_scale, alpha),
        *(
            D,
            V,
            BD,
            BV,
            BN,
            MAP,
            PARTS,
            PAIRS,
            CUBE,
            HAS_MASK,
            False,
            False,
            SAME_ANGLES,
            False,
            False,
            LEARNED,
            DOT,
            PRECISION,
        ),
    )
    causal_dv_kernel(
        *(q_ptr, k_ptr, dout_ptr, mask_ptr, None, param_ptr, cos_q_ptr, sin_q_ptr, cos_k_ptr, sin_k_ptr),
        *(inverse_ptr, inverse_ptr, inverse_ptr, dv_ptr),
        *(num_tokens, num_tokens, heads, 1, split_size),
        *(stride_qb, stride_q, stride_qh, stride_kb, stride_k, stride_kh),
        *(stride_dob, stride_do, stride_doh, stride_dvb, stride_dv, stride_dvh),
        *(stride_angle_q, stride_angle_k, query_param_group, key_param_group, num_params, norm_scale, alpha),
        *(D, V, BD, BV, BN, MAP, PARTS, PAIRS, CUBE, HAS_MASK, False, False, False, False, DOT, PRECISION),
    )
