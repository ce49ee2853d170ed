"""The backward pass of causal linear attention; see causal.py for the plan.

With g = dout / den, e_i = g_i . out_i, the products G_ij = g_i . v_j and P_ij = phi(q_i) . phi(k_j), zero for j > i:

    dphi(q_i) = sum_j (G_ij - e_i) phi(k_j)
    dphi(k_j) = sum_i (G_ij - e_i) phi(q_i)
    dv_j      = sum_i P_ij g_i

where with rotary the terms with G and P take the turned features. Tokens outside the chunk come through the sums S, z before it
and through their gradients after it. out and 1 / den come from the forward pass.
"""

import triton
import triton.language as tl

from .bidirectional import load_per_row, load_rows, load_sums, rotated, sample_rows, store_per_row, store_rows
from .causal import not_later
from .maps import phi_key, phi_key_gradient, phi_query, phi_query_gradient


@triton.jit
def causal_dq_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    out_ptr,  # [B, N, H, V]
    dout_ptr,  # [B, N, H, V]
    inverse_ptr,  # [B, N, H, 1]
    mask_ptr,
    cu_ptr,
    param_ptr,
    cos_q_ptr,
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    before_ptr,  # [splits, B * K, PARTS, D, V + 2]
    dq_ptr,  # [B, N, H, D]
    drop_ptr,  # [B, N, H, 1]: minus the gradient of the denominator
    dparam_ptr,  # [splits, B * H, 4, D]
    num_tokens,
    heads,
    group,
    stretch,  # tokens of a chunk
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
    row += tl.cast(sample, tl.int64) * num_tokens * (0 if PACKED else 1)
    inverse_ptr += row * heads + head
    drop_ptr += row * heads + head
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

    s_a = tl.trans(s_a.to(DOT))
    s_b = tl.trans(s_b.to(DOT))

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    p0 = tl.zeros([BD], tl.float32)
    p1 = tl.zeros([BD], tl.float32)
    for first in range(start, stop, BN):
        exists = rows < stop - first
        dout = load_rows(dout_ptr, first, rows, exists, columns, columns < V, stride_do)
        out = load_rows(out_ptr, first, rows, exists, columns, columns < V, stride_o)
        inverse = load_per_row(inverse_ptr, first, rows, exists, 0, heads)
        drop = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)[:, None] * inverse
        store_per_row(drop_ptr, -drop, first, rows, exists, 0, heads)
        dout = dout.to(DOT)
        da = tl.dot(dout, s_a, input_precision=PRECISION) * inverse
        db = da
        if PARTS == 2:
            db = tl.dot(dout, s_b, input_precision=PRECISION) * inverse
        if PAIRS > 0:
            plain_a = tl.zeros([BN, BD], tl.float32)
            plain_b = tl.zeros([BN, BD], tl.float32)
        for other in range(start, first + BN, BN):
            ok = rows < stop - other
            if HAS_MASK:
                ok = ok & (tl.load(mask_ptr + other + rows, mask=ok, other=0) != 0)
            visible = not_later(first, other, BN)
            v = load_rows(v_ptr, other, rows, ok, columns, columns < V, stride_v).to(DOT)
            toward = tl.dot(dout, tl.trans(v), input_precision=PRECISION) * inverse
            if PAIRS == 0:
                toward -= drop
            toward = tl.where(visible, toward, 0.0).to(DOT)
            x = load_rows(k_ptr, other, rows, ok, channels, in_head, stride_k).to(tl.float32)
            a, b = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE)
            if PAIRS > 0:
                # what the denominator adds belongs to the features before the turn
                minus = tl.where(visible, -drop, 0.0).to(DOT)
                plain_a = tl.dot(minus, a.to(DOT), plain_a, input_precision=PRECISION)
                a = rotated(a, cos_k_ptr, sin_k_ptr, other, rows, ok, 0, D, BD, PAIRS, False)
                if PARTS == 2:
                    plain_b = tl.dot(minus, b.to(DOT), plain_b, input_precision=PRECISION)
                    b = rotated(b, cos_k_ptr, sin_k_ptr, other, rows, ok, 1, D, BD, PAIRS, False)
            da = tl.dot(toward, a.to(DOT), da, input_precision=PRECISION)
            if PARTS == 2:
                db = tl.dot(toward, b.to(DOT), db, input_precision=PRECISION)
        da = rotated(da, cos_q_ptr, sin_q_ptr, first, rows, exists, 0, D, BD, PAIRS, True) - drop * z_a[None, :]
        if PAIRS > 0:
            da += plain_a
        if PARTS == 2:
            db = rotated(db, cos_q_ptr, sin_q_ptr, first, rows, exists, 1, D, BD, PAIRS, True) - drop * z_b[None, :]
            if PAIRS > 0:
                db += plain_b
        else:
            db = da
        y = load_rows(q_ptr, first, rows, exists, channels, in_head, stride_q).to(tl.float32)
        dy, g0, g1 = phi_query_gradient(y, da, db, query_params, channels, norm_scale, alpha, D, MAP, 0)
        store_rows(dq_ptr, dy, first, rows, exists, channels, in_head, stride_dq)
        if LEARNED:
            p0 += tl.sum(tl.where(exists[:, None] & in_head[None, :], g0, 0.0), axis=0)
            p1 += tl.sum(tl.where(exists[:, None] & in_head[None, :], g1, 0.0), axis=0)
    if LEARNED:
        place = tl.cast(tl.program_id(0), tl.int64) * tl.num_programs(1) + tl.program_id(1)
        dparam_ptr += place * (4 * D)
        tl.store(dparam_ptr + channels, p0, mask=in_head)
        tl.store(dparam_ptr + D + channels, p1, mask=in_head)
        tl.store(dparam_ptr + 2 * D + channels, tl.zeros_like(p0), mask=in_head)
        tl.store(dparam_ptr + 3 * D + channels, tl.zeros_like(p0), mask=in_head)


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
    inverse_ptr,  # [B, N, H, 1]
    drop_ptr,  # [B, N, H, 1]
    after_ptr,  # [splits, B * K, PARTS, D, V + 2]: gradients of the sums, from the tokens after each stretch
    dk_ptr,  # [B, N, K, D]
    dv_ptr,  # [B, N, K, V]
    dparam_ptr,  # [splits, B * K, 2, D]
    num_tokens,
    kv_heads,
    group,
    stretch,  # tokens of a chunk
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
    row += tl.cast(sample, tl.int64) * num_tokens * (0 if PACKED else 1)
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

    ds_a = ds_a.to(DOT)
    ds_b = ds_b.to(DOT)

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
        raw_k = load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k)
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        a, b = phi_key(raw_k.to(tl.float32), ok, key_params, channels, 0.0, alpha, D, MAP, CUBE)
        ak = rotated(a, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, False).to(DOT)
        bk = ak
        dv = tl.dot(ak, ds_a, input_precision=PRECISION)
        # gradients of the turned features; what the denominator adds belongs to the features before the turn
        da = tl.dot(v, tl.trans(ds_a), input_precision=PRECISION)
        db = da
        if PARTS == 2:
            bk = rotated(b, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, False).to(DOT)
            dv = tl.dot(bk, ds_b, dv, input_precision=PRECISION)
            db = tl.dot(v, tl.trans(ds_b), input_precision=PRECISION)
        if PAIRS > 0:
            plain_a = tl.zeros([BN, BD], tl.float32)
            plain_b = tl.zeros([BN, BD], tl.float32)
        # the queries of the chunk that see these keys, of every head that shares them
        tiles = tl.cdiv(stop - first, BN)
        for step in range(0, tiles * group):
            other = first + (step % tiles) * BN
            query_head = head * group + step // tiles
            here = rows < stop - other
            query_params = param_ptr + (query_head // query_param_group) * num_params
            own_q = q_ptr + q_offset + query_head * stride_qh
            own_do = dout_ptr + do_offset + query_head * stride_doh
            inverse = load_per_row(inverse_ptr + row * heads + query_head, other, rows, here, 0, heads)
            drop = load_per_row(drop_ptr + row * heads + query_head, other, rows, here, 0, heads)
            g = load_rows(own_do, other, rows, here, columns, columns < V, stride_do)
            g = (g.to(tl.float32) * inverse).to(DOT)
            # keys in the rows: the transpose of what dq sees
            visible = tl.trans(not_later(other, first, BN))
            toward = tl.dot(v, tl.trans(g), input_precision=PRECISION)
            if PAIRS == 0:
                toward += tl.trans(drop)
            toward = tl.where(visible, toward, 0.0).to(DOT)
            y = load_rows(own_q, other, rows, here, channels, in_head, stride_q).to(tl.float32)
            a, b, query_scale = phi_query(y, query_params, channels, norm_scale, alpha, D, MAP, 0)
            if MAP == "elu" or MAP == "norm_aware_split" or MAP == "norm_aware_cosine":
                # rows beyond the tokens have features there
                a = tl.where(here[:, None], a, 0.0)
                b = tl.where(here[:, None], b, 0.0)
            if PAIRS > 0:
                minus = tl.where(visible, tl.trans(drop), 0.0).to(DOT)
                plain_a = tl.dot(minus, a.to(DOT), plain_a, input_precision=PRECISION)
                a = rotated(a, cos_q_ptr, sin_q_ptr, other, rows, here, 0, D, BD, PAIRS, False)
                if PARTS == 2:
                    plain_b = tl.dot(minus, b.to(DOT), plain_b, input_precision=PRECISION)
                    b = rotated(b, cos_q_ptr, sin_q_ptr, other, rows, here, 1, D, BD, PAIRS, False)
            aq = a.to(DOT)
            da = tl.dot(toward, aq, da, input_precision=PRECISION)
            weights = tl.dot(ak, tl.trans(aq), input_precision=PRECISION)
            if PARTS == 2:
                bq = b.to(DOT)
                db = tl.dot(toward, bq, db, input_precision=PRECISION)
                weights = tl.dot(bk, tl.trans(bq), weights, input_precision=PRECISION)
            weights = tl.where(visible, weights, 0.0)
            dv = tl.dot(weights.to(DOT), g, dv, input_precision=PRECISION)
        store_rows(
            dv_ptr, tl.where(ok[:, None], dv, 0.0) if HAS_MASK else dv, first, rows, exists, columns, columns < V, stride_dv
        )
        da = rotated(da, cos_k_ptr, sin_k_ptr, first, rows, exists, 0, D, BD, PAIRS, True) + dz_a[None, :]
        if PAIRS > 0:
            da += plain_a
        if PARTS == 2:
            db = rotated(db, cos_k_ptr, sin_k_ptr, first, rows, exists, 1, D, BD, PAIRS, True) + dz_b[None, :]
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
