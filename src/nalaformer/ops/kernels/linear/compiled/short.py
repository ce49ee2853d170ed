"""Compute bidirectional attention of at most one tile of tokens by its weights: a program owns a sample and head.

So few tokens have fewer weights than their state has elements, and nothing is saved for the backward pass. With scores
A_ij = phi(q_i) . phi(k_j), weights W_ij = A_ij / den_i and G_ij = dout_i . v_j:

    out = W v,   dv = W^T dout,   den_i dA_ij = G_ij - sum_j W_ij G_ij,   dphi(q) = dA phi(k),   dphi(k) = dA^T phi(q)

The difference is taken in float32, before anything is rounded, so no mean of the values has to be subtracted first.
"""

import triton
import triton.language as tl

from ...common.compiled.map_gradients import phi_key_gradient, phi_query_gradient
from ...common.compiled.maps import phi_key, phi_query
from ...common.compiled.products import is_lean, unit_matrix, widen
from ...common.compiled.tiles import (
    head_rows,
    load_rows,
    row_strides,
    store_rows,
    store_two_parameters,
    sum_over_rows,
    visible_rows,
)


@triton.jit
def feature_products(q_a, q_b, k_a, k_b, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Return phi(q_i) . phi(k_j), [BN, BN]."""
    scores = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
    if PARTS == 2:
        scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision=PRECISION)
    return scores


@triton.jit
def invert_sum(scores, visible, eps):
    """Return 1 / denominator, [BN, 1]; 1 where a row sees nothing."""
    below = tl.sum(scores, axis=1)[:, None] + eps * tl.sum(visible.to(tl.float32))
    return 1.0 / tl.where(below == 0.0, 1.0, below)


@triton.jit
def short_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, M, H, D]
    v_ptr,  # [B, M, H, V]
    mask_ptr,  # [B, M] uint8
    param_ptr,
    out_ptr,  # [B, N, H, V]
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
    param_group,
    num_params,
    norm_scale,
    alpha,
    eps,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,  # at least as many as queries and keys
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    CUBE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_ob, stride_o, stride_oh = row_strides(stride_ob, stride_o, stride_oh, V)
    sample = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    q_ptr = head_rows(q_ptr, sample, head, 0, stride_qb, stride_q, stride_qh, False)
    k_ptr = head_rows(k_ptr, sample, head, 0, stride_kb, stride_k, stride_kh, False)
    v_ptr = head_rows(v_ptr, sample, head, 0, stride_vb, stride_v, stride_vh, False)
    out_ptr = head_rows(out_ptr, sample, head, 0, stride_ob, stride_o, stride_oh, False)
    param_ptr += (head // param_group) * num_params
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    visible = visible_rows(mask_ptr + tl.cast(sample, tl.int64) * num_keys, 0, rows, rows < num_keys, HAS_MASK)
    q = load_rows(q_ptr, 0, rows, rows < num_queries, channels, in_head, stride_q)
    k = load_rows(k_ptr, 0, rows, visible, channels, in_head, stride_k)
    v = load_rows(v_ptr, 0, rows, visible, columns, columns < V, stride_v).to(DOT)
    LEAN: tl.constexpr = is_lean(DOT, BD, BV)
    unit = unit_matrix(BD, DOT)
    k_a, k_b = phi_key(widen(k, unit, LEAN), visible, param_ptr, channels, 0.0, alpha, D, MAP, CUBE, DOT)
    q_a, q_b, log_scale = phi_query(widen(q, unit, LEAN), param_ptr, channels, norm_scale, alpha, D, MAP, 0, DOT)
    scores = feature_products(q_a, q_b, k_a, k_b, PARTS, PRECISION).to(DOT)
    # the sum of the rounded scores that are multiplied, so that the weights add up to one
    inverse = invert_sum(scores.to(tl.float32), visible, eps)
    out = tl.dot(scores, v, input_precision=PRECISION)
    store_rows(out_ptr, out * inverse, 0, rows, rows < num_queries, columns, columns < V, stride_o)


@triton.jit
def short_gradient_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, M, H, D]
    v_ptr,  # [B, M, H, V]
    dout_ptr,  # [B, N, H, V]
    mask_ptr,  # [B, M] uint8
    param_ptr,
    dq_ptr,  # [B, N, H, D]
    dk_ptr,  # [B, M, H, D]
    dv_ptr,  # [B, M, H, V]
    dquery_ptr,  # [B * H, 4, D]: gradients of the parameters
    dkey_ptr,  # [B * H, 2, D]
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
    param_group,
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
    CUBE: tl.constexpr,
    HAS_MASK: tl.constexpr,
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
    sample = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    q_ptr = head_rows(q_ptr, sample, head, 0, stride_qb, stride_q, stride_qh, False)
    k_ptr = head_rows(k_ptr, sample, head, 0, stride_kb, stride_k, stride_kh, False)
    v_ptr = head_rows(v_ptr, sample, head, 0, stride_vb, stride_v, stride_vh, False)
    dout_ptr = head_rows(dout_ptr, sample, head, 0, stride_dob, stride_do, stride_doh, False)
    dq_ptr = head_rows(dq_ptr, sample, head, 0, stride_dqb, stride_dq, stride_dqh, False)
    dk_ptr = head_rows(dk_ptr, sample, head, 0, stride_dkb, stride_dk, stride_dkh, False)
    dv_ptr = head_rows(dv_ptr, sample, head, 0, stride_dvb, stride_dv, stride_dvh, False)
    param_ptr += (head // param_group) * num_params
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    is_query = rows < num_queries
    is_key = rows < num_keys
    visible = visible_rows(mask_ptr + tl.cast(sample, tl.int64) * num_keys, 0, rows, is_key, HAS_MASK)
    k = load_rows(k_ptr, 0, rows, visible, channels, in_head, stride_k)
    q = load_rows(q_ptr, 0, rows, is_query, channels, in_head, stride_q)
    v = load_rows(v_ptr, 0, rows, visible, columns, columns < V, stride_v).to(DOT)
    dout = load_rows(dout_ptr, 0, rows, is_query, columns, columns < V, stride_do).to(DOT)
    LEAN: tl.constexpr = is_lean(DOT, BD, BV)
    unit = unit_matrix(BD, DOT)
    k_a, k_b = phi_key(widen(k, unit, LEAN), visible, param_ptr, channels, 0.0, alpha, D, MAP, CUBE, DOT)
    q_a, q_b, log_scale = phi_query(widen(q, unit, LEAN), param_ptr, channels, norm_scale, alpha, D, MAP, 0, DOT)
    scores = feature_products(q_a, q_b, k_a, k_b, PARTS, PRECISION)
    inverse = invert_sum(scores, visible, eps)
    weights = scores * inverse
    dv = tl.dot(tl.trans(weights.to(DOT)), dout, input_precision=PRECISION)
    store_rows(dv_ptr, dv, 0, rows, is_key, columns, columns < V, stride_dv)
    # the gradient of the scores times the denominator, which is divided out at the end; 0 for queries that do not exist
    dscores = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    dscores -= tl.sum(weights * dscores, axis=1)[:, None]

    left = tl.trans((dscores * inverse).to(DOT))
    da = tl.dot(dscores.to(DOT), k_a, input_precision=PRECISION)
    db = da
    if PARTS == 2:
        db = tl.dot(dscores.to(DOT), k_b, input_precision=PRECISION)
    # reading it again is cheaper than holding it in registers
    x = widen(load_rows(q_ptr, 0, rows, is_query, channels, in_head, stride_q), unit, LEAN)
    dx, g0, g1 = phi_query_gradient(x, da, db, param_ptr, channels, norm_scale, alpha, D, MAP, 0)
    store_rows(dq_ptr, dx * inverse, 0, rows, is_query, channels, in_head, stride_dq)
    place = tl.cast(tl.program_id(0), tl.int64)
    if LEARNED:
        p0, p1 = sum_over_rows(g0 * inverse, is_query, in_head), sum_over_rows(g1 * inverse, is_query, in_head)
        dquery_ptr += place * (4 * D)
        store_two_parameters(dquery_ptr, p0, p1, D, BD)
        # zeros for a second stream
        store_two_parameters(dquery_ptr + 2 * D, tl.zeros_like(p0), tl.zeros_like(p0), D, BD)

    da = tl.dot(left, q_a, input_precision=PRECISION)
    db = da
    if PARTS == 2:
        db = tl.dot(left, q_b, input_precision=PRECISION)
    x = widen(load_rows(k_ptr, 0, rows, visible, channels, in_head, stride_k), unit, LEAN)
    dx, g0, g1 = phi_key_gradient(x, da, db, param_ptr, channels, 0.0, alpha, D, MAP, CUBE)
    # masked keys get a gradient of zero, which must be written
    dx = tl.where(visible[:, None], dx, 0.0) if HAS_MASK else dx
    store_rows(dk_ptr, dx, 0, rows, is_key, channels, in_head, stride_dk)
    if LEARNED:
        p0, p1 = sum_over_rows(g0, visible, in_head), sum_over_rows(g1, visible, in_head)
        store_two_parameters(dkey_ptr + place * (2 * D), p0, p1, D, BD)
