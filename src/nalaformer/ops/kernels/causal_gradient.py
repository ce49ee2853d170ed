"""The backward pass of causal linear attention; see causal.py for the plan.

With g = dout / den, e_i = g_i . out_i, the products G_ij = g_i . v_j and P_ij = phi(q_i) . phi(k_j), zero for j > i:

    dphi(q_i) = sum_j (G_ij - e_i) phi(k_j)
    dphi(k_j) = sum_i (G_ij - e_i) phi(q_i)
    dv_j      = sum_i P_ij g_i

where with rotary the terms with G and P take the turned features. Tokens outside the tile come through the sums S, z before it
and through their gradients after it. out and 1 / den come from the forward pass.

G_ij and e_i nearly cancel where a row sees little but itself, so they are subtracted before either is rounded: everywhere
without rotary; with it on the diagonal, where turning there and back leaves a token as it was (SAME_ANGLES).
"""

import triton
import triton.language as tl

from .causal import lower_triangle
from .maps import phi_key, phi_key_gradient, phi_query, phi_query_gradient
from .products import high_and_low
from .tiles import load_per_row, load_rows, load_sums, place_per_row, rotated, sample_rows, store_per_row, store_rows


@triton.jit
def times_transposed(v, s, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """v s^T with both halves of the digits of s: what the denominator takes away again is nearly as large as the product."""
    high = s.to(DOT)
    product = tl.dot(v, tl.trans(high), input_precision=PRECISION)
    if tl.bfloat16 == DOT:
        low = (s - high.to(tl.float32)).to(DOT)
        product = tl.dot(v, tl.trans(low), product, input_precision=PRECISION)
    return product


@triton.jit
def diagonal(BN: tl.constexpr):
    """[BN, BN]: True where row and column are the same token."""
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
    dq_ptr,  # [B, N, H, D]
    drop_ptr,  # the same: minus the gradient of the denominator's logarithm
    dparam_ptr,  # [splits, B * H, 2, D]
    num_rows,  # N, or T if packed
    num_tokens,
    heads,
    group,
    stretch,
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
    SAME_ANGLES: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    kv_heads = heads // group
    q_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_qb, stride_q, PACKED)
    k_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_kb, stride_k, PACKED)
    v_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_vb, stride_v, PACKED)
    o_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_ob, stride_o, PACKED)
    do_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_dob, stride_do, PACKED)
    dq_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_dqb, stride_dq, PACKED)
    q_ptr += q_offset + head * stride_qh
    k_ptr += k_offset + kv_head * stride_kh
    v_ptr += v_offset + kv_head * stride_vh
    out_ptr += o_offset + head * stride_oh
    dout_ptr += do_offset + head * stride_doh
    dq_ptr += dq_offset + head * stride_dqh
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    cos_q_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_q
    sin_q_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_q
    cos_k_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_k
    sin_k_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_k
    place_of_rows = place_per_row(sample, head, heads, row, num_rows, PACKED)
    inverse_ptr += place_of_rows
    drop_ptr += place_of_rows
    query_params = param_ptr + (head // query_param_group) * num_params
    key_params = param_ptr + (kv_head // key_param_group) * num_params
    start = tl.program_id(0) * stretch
    stop = tl.minimum(start + stretch, length)
    owner = (tl.cast(tl.program_id(0), tl.int64) * (tl.num_programs(1) // group)) + sample * kv_heads + kv_head
    before = before_ptr + owner * (PARTS * D * (V + 2))
    s_a, z_a = load_sums(before, D, V, BD, BV)
    s_b, z_b = s_a, z_a
    if PARTS == 2:
        s_b, z_b = load_sums(before + D * (V + 2), D, V, BD, BV)

    # z grows by products with ones, as in the forward pass
    ones = tl.full([BN, 16], 1.0, DOT)
    wide_a = tl.zeros([BD, 16], tl.float32) + z_a[:, None]
    wide_b = tl.zeros([BD, 16], tl.float32) + z_b[:, None]

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    p0 = tl.zeros([BD], tl.float32)
    p1 = tl.zeros([BD], tl.float32)
    for first in range(start, stop, BN):
        exists = rows < stop - first
        ok = exists
        if HAS_MASK:
            ok = exists & (tl.load(mask_ptr + first + rows, mask=exists, other=0) != 0)
        dout = load_rows(dout_ptr, first, rows, exists, columns, columns < V, stride_do)
        out = load_rows(out_ptr, first, rows, exists, columns, columns < V, stride_o)
        inverse = load_per_row(inverse_ptr, first, rows, exists)
        drop = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)[:, None]
        store_per_row(drop_ptr, -drop, first, rows, exists)
        dout = dout.to(DOT)
        # what came before the tile; the sixteen columns of z are alike. The denominator is divided out at the end
        z_a = tl.sum(wide_a, axis=1) * 0.0625
        z_b = tl.sum(wide_b, axis=1) * 0.0625
        da = tl.dot(dout, tl.trans(s_a.to(DOT)), input_precision=PRECISION)
        db = da
        if PARTS == 2:
            db = tl.dot(dout, tl.trans(s_b.to(DOT)), input_precision=PRECISION)
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        toward = tl.where(lower_triangle(BN), tl.dot(dout, tl.trans(v), input_precision=PRECISION), 0.0)
        minus = tl.where(lower_triangle(BN), drop, 0.0)
        if PAIRS == 0:
            toward -= minus
        elif SAME_ANGLES:
            minus -= tl.where(diagonal(BN), toward, 0.0)
            toward = tl.where(diagonal(BN), 0.0, toward)
        toward = toward.to(DOT)
        x = load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k).to(tl.float32)
        a, b = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE)
        turned = rotated(a, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
        da = tl.dot(toward, turned, da, input_precision=PRECISION)
        s_a = tl.dot(tl.trans(turned), v, s_a, input_precision=PRECISION)
        da = rotated(da, cos_q_ptr, sin_q_ptr, first, rows, exists, 0, D, BD, PAIRS, True) - drop * z_a[None, :]
        if PAIRS > 0:
            da -= tl.dot(minus.to(DOT), a.to(DOT), input_precision=PRECISION)
        wide_a = tl.dot(tl.trans(a.to(DOT)), ones, wide_a, input_precision=PRECISION)
        if PARTS == 2:
            turned = rotated(b, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
            db = tl.dot(toward, turned, db, input_precision=PRECISION)
            s_b = tl.dot(tl.trans(turned), v, s_b, input_precision=PRECISION)
            db = rotated(db, cos_q_ptr, sin_q_ptr, first, rows, exists, 1, D, BD, PAIRS, True) - drop * z_b[None, :]
            if PAIRS > 0:
                db -= tl.dot(minus.to(DOT), b.to(DOT), input_precision=PRECISION)
            wide_b = tl.dot(tl.trans(b.to(DOT)), ones, wide_b, input_precision=PRECISION)
        else:
            db = da
        y = load_rows(q_ptr, first, rows, exists, channels, in_head, stride_q).to(tl.float32)
        dy, g0, g1 = phi_query_gradient(y, da, db, query_params, channels, norm_scale, alpha, D, MAP, 0)
        store_rows(dq_ptr, dy * inverse, first, rows, exists, channels, in_head, stride_dq)
        if LEARNED:
            p0 += tl.sum(tl.where(exists[:, None] & in_head[None, :], g0 * inverse, 0.0), axis=0)
            p1 += tl.sum(tl.where(exists[:, None] & in_head[None, :], g1 * inverse, 0.0), axis=0)
    if LEARNED:
        place = tl.cast(tl.program_id(0), tl.int64) * tl.num_programs(1) + tl.program_id(1)
        dparam_ptr += place * (2 * D)
        tl.store(dparam_ptr + channels, p0, mask=in_head)
        tl.store(dparam_ptr + D + channels, p1, mask=in_head)


@triton.jit
def causal_dk_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    dout_ptr,  # [B, N, H, V]
    mask_ptr,
    cu_ptr,
    param_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    inverse_ptr,  # [1, B, H, N] or [1, H, T]
    drop_ptr,
    after_ptr,  # [splits, B * K, PARTS, D, V + 2]: gradients of the sums, from the tokens after each stretch
    dk_ptr,  # [B, N, K, D]
    dv_ptr,  # [B, N, K, V]
    dparam_ptr,  # [splits, B * K, 2, D]
    num_rows,
    num_tokens,
    kv_heads,
    group,
    stretch,
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
    SAME_ANGLES: tl.constexpr,
    LEARNED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    q_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_qb, stride_q, PACKED)
    k_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_kb, stride_k, PACKED)
    v_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_vb, stride_v, PACKED)
    do_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_dob, stride_do, PACKED)
    dk_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_dkb, stride_dk, PACKED)
    dv_offset, row, length = sample_rows(cu_ptr, sample, num_tokens, stride_dvb, stride_dv, PACKED)
    k_ptr += k_offset + head * stride_kh
    v_ptr += v_offset + head * stride_vh
    dk_ptr += dk_offset + head * stride_dkh
    dv_ptr += dv_offset + head * stride_dvh
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    cos_q_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_q
    sin_q_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_q
    cos_k_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_k
    sin_k_ptr += row * PAIRS + tl.cast(sample, tl.int64) * stride_angle_k
    heads = kv_heads * group
    key_params = param_ptr + (head // key_param_group) * num_params
    start = tl.program_id(0) * stretch
    stop = tl.minimum(start + stretch, length)
    place = tl.cast(tl.program_id(0), tl.int64) * tl.num_programs(1) + tl.program_id(1)
    after = after_ptr + place * (PARTS * D * (V + 2))
    ds_a, dz_a = load_sums(after, D, V, BD, BV)
    ds_b, dz_b = ds_a, dz_a
    if PARTS == 2:
        ds_b, dz_b = load_sums(after + D * (V + 2), D, V, BD, BV)

    # the first column begins with all of it: the columns are added up
    first_column = tl.arange(0, 16)[None, :] == 0
    wide_a = tl.where(first_column, dz_a[:, None], 0.0)
    wide_b = tl.where(first_column, dz_b[:, None], 0.0)

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    # keys in the rows now: a query counts if it is not earlier
    upper = rows[:, None] <= rows[None, :]
    p0 = tl.zeros([BD], tl.float32)
    p1 = tl.zeros([BD], tl.float32)
    tiles = tl.cdiv(tl.maximum(stop - start, 0), BN)
    for tile in range(0, tiles):
        first = start + (tiles - 1 - tile) * BN
        exists = rows < stop - first
        ok = exists
        if HAS_MASK:
            ok = exists & (tl.load(mask_ptr + first + rows, mask=exists, other=0) != 0)
        raw_k = load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k)
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        a, b = phi_key(raw_k.to(tl.float32), ok, key_params, channels, 0.0, alpha, D, MAP, CUBE)
        ak = rotated(a, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
        bk = ak
        dv = tl.dot(ak, ds_a.to(DOT), input_precision=PRECISION)
        # gradients of the turned features; what belongs to the features before the turn comes from z
        da = times_transposed(v, ds_a, DOT, PRECISION)
        db = da
        if PARTS == 2:
            bk = rotated(b, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
            dv = tl.dot(bk, ds_b.to(DOT), dv, input_precision=PRECISION)
            db = times_transposed(v, ds_b, DOT, PRECISION)
        later_a = tl.sum(wide_a, axis=1)
        later_b = tl.sum(wide_b, axis=1)
        if PAIRS > 0:
            plain_a = tl.zeros([BN, BD], tl.float32)
            plain_b = tl.zeros([BN, BD], tl.float32)
        for member in range(0, group):
            query_head = head * group + member
            query_params = param_ptr + (query_head // query_param_group) * num_params
            own_q = q_ptr + q_offset + query_head * stride_qh
            own_do = dout_ptr + do_offset + query_head * stride_doh
            place_of_rows = place_per_row(sample, query_head, heads, row, num_rows, PACKED)
            inverse = load_per_row(inverse_ptr + place_of_rows, first, rows, exists)
            drop = load_per_row(drop_ptr + place_of_rows, first, rows, exists) * inverse
            # not the features: their products must round as those of the forward pass did, where they nearly cancel
            g = load_rows(own_do, first, rows, exists, columns, columns < V, stride_do)
            g = (g.to(tl.float32) * inverse).to(DOT)
            toward = tl.where(upper, tl.dot(v, tl.trans(g), input_precision=PRECISION), 0.0)
            minus = tl.where(upper, tl.trans(drop), 0.0)
            if PAIRS == 0:
                toward += minus
            elif SAME_ANGLES:
                minus += tl.where(diagonal(BN), toward, 0.0)
                toward = tl.where(diagonal(BN), 0.0, toward)
            toward = toward.to(DOT)
            y = load_rows(own_q, first, rows, exists, channels, in_head, stride_q).to(tl.float32)
            a, b, query_scale = phi_query(y, query_params, channels, norm_scale, alpha, D, MAP, 0)
            if MAP == "elu" or MAP == "norm_aware_split" or MAP == "norm_aware_cosine":
                # rows beyond the tokens have features there
                a = tl.where(exists[:, None], a, 0.0)
                b = tl.where(exists[:, None], b, 0.0)
            weight = high_and_low(tl.zeros([BN, 16], tl.float32) + drop, DOT)
            wide_a = tl.dot(tl.trans(a.to(DOT)), weight, wide_a, input_precision=PRECISION)
            if PAIRS > 0:
                plain_a = tl.dot(minus.to(DOT), a.to(DOT), plain_a, input_precision=PRECISION)
            aq = rotated(a, cos_q_ptr, sin_q_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
            da = tl.dot(toward, aq, da, input_precision=PRECISION)
            weights = tl.dot(ak, tl.trans(aq), input_precision=PRECISION)
            ds_a = tl.dot(tl.trans(aq), g, ds_a, input_precision=PRECISION)
            if PARTS == 2:
                wide_b = tl.dot(tl.trans(b.to(DOT)), weight, wide_b, input_precision=PRECISION)
                if PAIRS > 0:
                    plain_b = tl.dot(minus.to(DOT), b.to(DOT), plain_b, input_precision=PRECISION)
                bq = rotated(b, cos_q_ptr, sin_q_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
                db = tl.dot(toward, bq, db, input_precision=PRECISION)
                weights = tl.dot(bk, tl.trans(bq), weights, input_precision=PRECISION)
                ds_b = tl.dot(tl.trans(bq), g, ds_b, input_precision=PRECISION)
            weights = tl.where(upper, weights, 0.0)
            dv = tl.dot(weights.to(DOT), g, dv, input_precision=PRECISION)
        store_rows(
            dv_ptr, tl.where(ok[:, None], dv, 0.0) if HAS_MASK else dv, first, rows, exists, columns, columns < V, stride_dv
        )
        da = rotated(da, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, True) + later_a[None, :]
        if PAIRS > 0:
            da += plain_a
        if PARTS == 2:
            db = rotated(db, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, True) + later_b[None, :]
            if PAIRS > 0:
                db += plain_b
        else:
            db = da
        x = raw_k.to(tl.float32)
        dx, g0, g1 = phi_key_gradient(x, da, db, key_params, channels, 0.0, alpha, D, MAP, CUBE)
        # hidden keys get a gradient of zero, which must be written
        store_rows(
            dk_ptr, tl.where(ok[:, None], dx, 0.0) if HAS_MASK else dx, first, rows, exists, channels, in_head, stride_dk
        )
        if LEARNED:
            p0 += tl.sum(tl.where(ok[:, None] & in_head[None, :], g0, 0.0), axis=0)
            p1 += tl.sum(tl.where(ok[:, None] & in_head[None, :], g1, 0.0), axis=0)
    if LEARNED:
        dparam_ptr += place * (2 * D)
        tl.store(dparam_ptr + channels, p0, mask=in_head)
        tl.store(dparam_ptr + D + channels, p1, mask=in_head)
