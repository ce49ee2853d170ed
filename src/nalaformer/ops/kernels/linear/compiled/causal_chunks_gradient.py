"""Compute the backward pass of causal attention in chunks; causal_chunks.py has the plan, causal_gradient.py the formulas.

Two tiles of tokens are multiplied in float32, from which G_ij and e_i are subtracted, and the denominator is divided out; so
features and dout enter unchanged, with the rounding of the forward pass.
"""

import triton
import triton.language as tl

from ...common.compiled.fastmath import laid_as
from ...common.compiled.map_gradients import along_query, is_one_sided, phi_query_gradient
from ...common.compiled.maps import phi_key
from ...common.compiled.products import left_factor, right_factor
from ...common.compiled.tiles import (
    head_rows,
    load_per_row,
    load_rows,
    place_per_row,
    program_index,
    row_strides,
    sample_rows,
    store_per_row,
    store_rows,
    store_two_parameters,
    sum_over_rows,
    visible_rows,
)
from .causal import lower_triangle
from .causal_chunks import (
    chunk_value_count,
    first_chunk,
    load_operand,
    operand_type,
    visible_keys,
)


@triton.jit
def times_operand(x, ptr, BD: tl.constexpr, BV: tl.constexpr, DIGITS: tl.constexpr, PRECISION: tl.constexpr):
    """Return x [BN, BV] times S^T [BV, BD] with all its digits: the denominator may take away nearly as much."""
    product = tl.dot(x, load_operand(ptr, BD, BV), input_precision=PRECISION)
    if DIGITS == 2:
        product = tl.dot(x, load_operand(ptr + BV * BD, BD, BV), product, input_precision=PRECISION)
    return product


@triton.jit
def load_value_row(ptr, BD: tl.constexpr):
    return tl.load(ptr + tl.arange(0, BD))[None, :]


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "heads", "group"])
def chunk_dq_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    out_ptr,  # [B, N, H, V]
    dout_ptr,  # [B, N, H, V]
    inverse_ptr,  # [1, B, H, N] or [1, H, T]
    mask_ptr,
    cu_ptr,
    param_ptr,
    operands_ptr,  # [chunks of all samples, K, PARTS, DIGITS, BV, BD]
    numbers_ptr,  # [chunks of all samples, K, STEPS * PARTS * BD + 16], a step: BN tokens
    dq_ptr,  # [B, N, H, D]
    drop_ptr,  # [1, B, H, N] or [1, H, T]: minus dout . out, corrected
    dparam_ptr,  # [tiles, B * H, 2, D]
    num_rows,  # N, or T if packed
    num_tokens,
    heads,
    group,
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
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    CUBE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    LEARNED: tl.constexpr,
    DIGITS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dq of a tile of tokens."""
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
    first = tl.program_id(0) * BN
    channels = tl.arange(0, BD)
    if first >= length:
        if LEARNED:
            nothing = tl.zeros([BD], tl.float32)
            store_two_parameters(dparam_ptr + program_index() * (2 * D), nothing, nothing, D, BD)
        return
    q_ptr = head_rows(q_ptr, sample, head, row, stride_qb, stride_q, stride_qh, PACKED)
    k_ptr = head_rows(k_ptr, sample, kv_head, row, stride_kb, stride_k, stride_kh, PACKED)
    v_ptr = head_rows(v_ptr, sample, kv_head, row, stride_vb, stride_v, stride_vh, PACKED)
    out_ptr = head_rows(out_ptr, sample, head, row, stride_ob, stride_o, stride_oh, PACKED)
    dout_ptr = head_rows(dout_ptr, sample, head, row, stride_dob, stride_do, stride_doh, PACKED)
    dq_ptr = head_rows(dq_ptr, sample, head, row, stride_dqb, stride_dq, stride_dqh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    place_of_rows = place_per_row(sample, head, heads, row, num_rows, PACKED)
    inverse_ptr += place_of_rows
    drop_ptr += place_of_rows
    query_params = param_ptr + (head // query_param_group) * num_params
    key_params = param_ptr + (kv_head // key_param_group) * num_params
    own = (first_chunk(row, sample, num_tokens, CHUNK, PACKED) + first // CHUNK) * kv_heads + kv_head
    operands_ptr += own * (PARTS * DIGITS * BV * BD)
    begin = first // CHUNK * CHUNK
    numbers_ptr += own * chunk_value_count(BD, PARTS, CHUNK // BN)
    count = tl.load(numbers_ptr + CHUNK // BN * (PARTS * BD))
    z_ptr = numbers_ptr + (first - begin) // BN * (PARTS * BD)

    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    TYPE: tl.constexpr = operand_type(DOT)
    exists = rows < length - first
    dout = load_rows(dout_ptr, first, rows, exists, columns, columns < V, stride_do)
    out = load_rows(out_ptr, first, rows, exists, columns, columns < V, stride_o)
    drop = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)[:, None]
    dout = dout.to(DOT)
    # the part of the tokens before the chunk; the denominator is divided out at the end
    lost = left_factor(-drop, DOT)
    da = times_operand(dout, operands_ptr, BD, BV, DIGITS, PRECISION)
    da = tl.dot(lost, right_factor(load_value_row(numbers_ptr, BD), DOT), da, input_precision=PRECISION)
    db = da
    if PARTS == 2:
        db = times_operand(dout, operands_ptr + DIGITS * BV * BD, BD, BV, DIGITS, PRECISION)
        db = tl.dot(lost, right_factor(load_value_row(numbers_ptr + BD, BD), DOT), db, input_precision=PRECISION)
    keys = tl.arange(0, BK)
    for start in range(begin, tl.minimum(first + BN, length), BK):
        ok = visible_rows(mask_ptr, start, keys, keys < length - start, HAS_MASK)
        v = load_rows(v_ptr, start, keys, ok, columns, columns < V, stride_v).to(DOT)
        x = load_rows(k_ptr, start, keys, ok, channels, in_head, stride_k).to(tl.float32)
        a, b = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE, TYPE)
        toward = tl.dot(dout, tl.trans(v), input_precision=PRECISION) - drop
        toward = tl.where((first + rows)[:, None] >= (start + keys)[None, :], toward, 0.0).to(DOT)
        da = tl.dot(toward, a.to(DOT), da, input_precision=PRECISION)
        if PARTS == 2:
            db = tl.dot(toward, b.to(DOT), db, input_precision=PRECISION)
    y = load_rows(q_ptr, first, rows, exists, channels, in_head, stride_q).to(tl.float32)
    y = laid_as(y, da)
    # one tile instead of two, where a channel needs only one of them
    IS_ONE: tl.constexpr = PARTS == 2 and is_one_sided(MAP)
    if IS_ONE:
        # with a fixed layout: the compiler would move later selections back to da and db, and keep all three
        da = laid_as(tl.where(y > 0, da, -db), y)
        db = -da
    inverse = load_per_row(inverse_ptr, first, rows, exists)
    # a factor of all features changes an output only through eps, which shows how the rounding of out changed the drop
    seen = visible_keys(count, mask_ptr, begin, first, rows, exists, CHUNK, HAS_MASK)
    of_eps = drop * (eps * seen)
    error = along_query(y, da, db, query_params, channels, norm_scale, alpha, of_eps, D, MAP, PARTS)
    error = (error - of_eps) * inverse
    # between two reads of the keys, which therefore stay two: until here no registers for this tile's features
    store_per_row(drop_ptr, -(drop + error), first, rows, exists)
    ok = visible_rows(mask_ptr, first, rows, exists, HAS_MASK)
    x = load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k).to(tl.float32)
    a, b = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE, TYPE)
    lost = left_factor(-error, DOT)
    errors = tl.where(lower_triangle(BN), -error, 0.0).to(DOT)
    more = da if not IS_ONE else tl.zeros([BN, BD], tl.float32)
    more = tl.dot(errors, a.to(DOT), more, input_precision=PRECISION)
    more = tl.dot(lost, right_factor(load_value_row(z_ptr, BD), DOT), more, input_precision=PRECISION)
    da = more if not IS_ONE else tl.where(y > 0, da + more, da)
    if PARTS == 2:
        more = db if not IS_ONE else tl.zeros([BN, BD], tl.float32)
        more = tl.dot(errors, b.to(DOT), more, input_precision=PRECISION)
        more = tl.dot(lost, right_factor(load_value_row(z_ptr + BD, BD), DOT), more, input_precision=PRECISION)
        da = da if not IS_ONE else tl.where(y > 0, da, da - more)
        db = more if not IS_ONE else -da
    else:
        db = da
    # powers are computed again: kept from above, they would take the registers of the products between
    y = laid_as(y, da)
    dy, g0, g1 = phi_query_gradient(y, da, db, query_params, channels, norm_scale, alpha, D, MAP, 0)
    store_rows(dq_ptr, dy * inverse, first, rows, exists, channels, in_head, stride_dq)
    if LEARNED:
        p0 = sum_over_rows(g0 * inverse, exists, in_head)
        p1 = sum_over_rows(g1 * inverse, exists, in_head)
        store_two_parameters(dparam_ptr + program_index() * (2 * D), p0, p1, D, BD)
