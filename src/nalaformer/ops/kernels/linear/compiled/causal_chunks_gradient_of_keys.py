"""Compute gradients of keys and values in causal attention in chunks; causal_chunks_gradient.py has that of queries."""

import triton
import triton.language as tl

from ...common.compiled.map_gradients import phi_key_gradient
from ...common.compiled.maps import phi_key, phi_query
from ...common.compiled.products import high_and_low
from ...common.compiled.tiles import (
    head_rows,
    load_per_row,
    load_rows,
    place_per_row,
    program_index,
    row_strides,
    sample_offset,
    sample_rows,
    store_rows,
    store_two_parameters,
    sum_over_rows,
    visible_rows,
)
from .causal_chunks import (
    chunk_value_count,
    first_chunk,
    load_operand,
    load_transposed_sums,
    operand_type,
    store_operand,
    store_transposed_sums,
)
from .causal_chunks_gradient import times_operand


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "kv_heads", "group", "split_size"])
def chunk_scan_back_kernel(
    q_ptr,  # [B, N, H, D]
    dout_ptr,  # [B, N, H, V]
    inverse_ptr,  # [1, B, H, N] or [1, H, T]
    drop_ptr,
    cu_ptr,
    param_ptr,
    after_ptr,  # [splits, B * K, PARTS, D, V + 2]: gradients of the sums, from the tokens after each split
    total_ptr,  # [B * K, PARTS, D, V + 2]: written, HAS_TOTAL: from all tokens
    operands_ptr,  # [chunks of all samples, K, PARTS, DIGITS, BV, BD]
    numbers_ptr,  # [chunks of all samples, K, PARTS * BD + 16]
    num_rows,
    num_tokens,
    kv_heads,
    group,
    split_size,  # a multiple of CHUNK
    stride_qb,
    stride_q,
    stride_qh,
    stride_dob,
    stride_do,
    stride_doh,
    param_group,  # query heads per row of parameters
    num_params,
    norm_scale,
    alpha,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    GROUPED: tl.constexpr,
    DIGITS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the sums' gradients by all tokens after each chunk of a split, of one part, from the last chunk to the first."""
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_dob, stride_do, stride_doh = row_strides(stride_dob, stride_do, stride_doh, V)
    sample = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    heads = kv_heads * group
    split = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    row, length = sample_rows(cu_ptr, sample, num_tokens, PACKED)
    q_offset = sample_offset(sample, row, stride_qb, stride_q, PACKED)
    do_offset = sample_offset(sample, row, stride_dob, stride_do, PACKED)
    start = split * split_size
    stop = tl.minimum(start + split_size, length)
    SIZE: tl.constexpr = D * (V + 2)
    place = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
    ds, dz = load_transposed_sums(after_ptr + (place * PARTS + part) * SIZE, D, V, BD, BV)
    # the rows are added up, so the first one begins with everything
    dz = tl.where(tl.arange(0, 16)[:, None] == 0, dz, 0.0)
    places = first_chunk(row, sample, num_tokens, CHUNK, PACKED)

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    TYPE: tl.constexpr = operand_type(DOT)
    tiles = tl.cdiv(tl.maximum(stop - start, 0), BN)
    for tile in range(0, tiles):
        first = start + (tiles - 1 - tile) * BN
        if BN == CHUNK or tile == 0 or (first + BN) % CHUNK == 0:
            own = (places + first // CHUNK) * kv_heads + head
            store_operand(operands_ptr + (own * PARTS + part) * (DIGITS * BV * BD), ds, DIGITS, DOT)
            tl.store(numbers_ptr + own * chunk_value_count(BD, PARTS) + part * BD + channels, tl.sum(dz, axis=0))
        exists = rows < stop - first
        # a loop of one is no loop: the next tile is then read while this one is computed
        for member in range(0, group if GROUPED else 1):
            query_head = head * group + member if GROUPED else head
            at = place_per_row(sample, query_head, heads, row, num_rows, PACKED)
            params = param_ptr + (query_head // param_group) * num_params
            inverse = load_per_row(inverse_ptr + at, first, rows, exists)
            drop = load_per_row(drop_ptr + at, first, rows, exists)
            q_rows = q_ptr + q_offset + query_head * stride_qh
            y = load_rows(q_rows, first, rows, exists, channels, in_head, stride_q).to(tl.float32)
            dout_rows = dout_ptr + do_offset + query_head * stride_doh
            dout = load_rows(dout_rows, first, rows, exists, columns, columns < V, stride_do).to(DOT)
            # the features take the denominator: dout then needs no pass through registers
            a, b, query_scale = phi_query(y, params, channels, norm_scale, alpha, D, MAP, 0, TYPE, inverse)
            if PARTS == 2:
                a = tl.where(part == 0, a, b)
            a = a.to(DOT)
            weight = tl.trans(high_and_low(tl.zeros([BN, 16], tl.float32) + drop, DOT))
            ds = tl.dot(tl.trans(dout), a, ds, input_precision=PRECISION)
            dz = tl.dot(weight, a, dz, input_precision=PRECISION)
    if HAS_TOTAL:
        total = total_ptr + (tl.cast(tl.program_id(1), tl.int64) * PARTS + part) * SIZE
        store_transposed_sums(total, ds, tl.sum(dz, axis=0), 0.0, D, V, BD, BV)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "kv_heads", "group"])
def chunk_dk_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    dout_ptr,  # [B, N, H, V]
    inverse_ptr,  # [1, B, H, N] or [1, H, T]
    drop_ptr,
    mask_ptr,
    cu_ptr,
    param_ptr,
    operands_ptr,  # [chunks of all samples, K, PARTS, DIGITS, BV, BD]: gradients of the sums after each chunk
    numbers_ptr,  # [chunks of all samples, K, PARTS * BD + 16]
    dk_ptr,  # [B, N, K, D]
    dv_ptr,  # [B, N, K, V]
    dparam_ptr,  # [tiles, B * K, 2, D]
    num_rows,
    num_tokens,
    kv_heads,
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
    stride_dob,
    stride_do,
    stride_doh,
    stride_dkb,
    stride_dk,
    stride_dkh,
    stride_dvb,
    stride_dv,
    stride_dvh,
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
    CHUNK: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    CUBE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    LEARNED: tl.constexpr,
    WHICH: tl.constexpr,  # "keys" or "values"
    DIGITS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dk or dv of a tile of tokens."""
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_dob, stride_do, stride_doh = row_strides(stride_dob, stride_do, stride_doh, V)
    stride_dkb, stride_dk, stride_dkh = row_strides(stride_dkb, stride_dk, stride_dkh, D)
    stride_dvb, stride_dv, stride_dvh = row_strides(stride_dvb, stride_dv, stride_dvh, V)
    sample = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    heads = kv_heads * group
    row, length = sample_rows(cu_ptr, sample, num_tokens, PACKED)
    first = tl.program_id(0) * BN
    channels = tl.arange(0, BD)
    if first >= length:
        if LEARNED:
            nothing = tl.zeros([BD], tl.float32)
            store_two_parameters(dparam_ptr + program_index() * (2 * D), nothing, nothing, D, BD)
        return
    q_offset = sample_offset(sample, row, stride_qb, stride_q, PACKED)
    do_offset = sample_offset(sample, row, stride_dob, stride_do, PACKED)
    k_ptr = head_rows(k_ptr, sample, head, row, stride_kb, stride_k, stride_kh, PACKED)
    v_ptr = head_rows(v_ptr, sample, head, row, stride_vb, stride_v, stride_vh, PACKED)
    dk_ptr = head_rows(dk_ptr, sample, head, row, stride_dkb, stride_dk, stride_dkh, PACKED)
    dv_ptr = head_rows(dv_ptr, sample, head, row, stride_dvb, stride_dv, stride_dvh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    key_params = param_ptr + (head // key_param_group) * num_params
    own = (first_chunk(row, sample, num_tokens, CHUNK, PACKED) + first // CHUNK) * kv_heads + head
    operands_ptr += own * (PARTS * DIGITS * BV * BD)
    numbers_ptr += own * chunk_value_count(BD, PARTS)

    OF_KEYS: tl.constexpr = WHICH == "keys"
    OF_VALUES: tl.constexpr = WHICH == "values"
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    TYPE: tl.constexpr = operand_type(DOT)
    exists = rows < length - first
    ok = visible_rows(mask_ptr, first, rows, exists, HAS_MASK)
    if OF_VALUES:
        x = load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k).to(tl.float32)
        ak, bk = phi_key(x, ok, key_params, channels, 0.0, alpha, D, MAP, CUBE, TYPE)
        ak = ak.to(DOT)
        bk = bk.to(DOT)
        dv = tl.dot(ak, tl.trans(load_operand(operands_ptr, BD, BV)), input_precision=PRECISION)
        if PARTS == 2:
            s_b = load_operand(operands_ptr + DIGITS * BV * BD, BD, BV)
            dv = tl.dot(bk, tl.trans(s_b), dv, input_precision=PRECISION)
    if OF_KEYS:
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        da = times_operand(v, operands_ptr, BD, BV, DIGITS, PRECISION) + tl.load(numbers_ptr + channels)[None, :]
        db = da
        if PARTS == 2:
            db = times_operand(v, operands_ptr + DIGITS * BV * BD, BD, BV, DIGITS, PRECISION)
            db += tl.load(numbers_ptr + BD + channels)[None, :]
    end = tl.minimum(first // CHUNK * CHUNK + CHUNK, length)
    # a loop of one is no loop: the next tile is then read while this one is computed
    for member in range(0, group if GROUPED else 1):
        query_head = head * group + member if GROUPED else head
        at = place_per_row(sample, query_head, heads, row, num_rows, PACKED)
        params = param_ptr + (query_head // query_param_group) * num_params
        for start in range(first, end, BN):
            queries = rows < length - start
            dout_rows = dout_ptr + do_offset + query_head * stride_doh
            dout = load_rows(dout_rows, start, rows, queries, columns, columns < V, stride_do).to(DOT)
            q_rows = q_ptr + q_offset + query_head * stride_qh
            y = load_rows(q_rows, start, rows, queries, channels, in_head, stride_q).to(tl.float32)
            aq, bq, query_scale = phi_query(y, params, channels, norm_scale, alpha, D, MAP, 0, TYPE)
            aq = aq.to(DOT)
            bq = bq.to(DOT)
            places = tl.cast(start, tl.int64) + rows
            inverse = tl.load(inverse_ptr + at + places, mask=queries, other=0.0)[None, :]
            sees = (start + rows)[None, :] >= (first + rows)[:, None]
            if OF_VALUES:
                weights = tl.dot(ak, tl.trans(aq), input_precision=PRECISION)
                if PARTS == 2:
                    weights = tl.dot(bk, tl.trans(bq), weights, input_precision=PRECISION)
                weights = tl.where(sees, weights * inverse, 0.0).to(DOT)
                dv = tl.dot(weights, dout, dv, input_precision=PRECISION)
            if OF_KEYS:
                drop = tl.load(drop_ptr + at + places, mask=queries, other=0.0)[None, :]
                toward = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
                toward = tl.where(sees, (toward + drop) * inverse, 0.0).to(DOT)
                da = tl.dot(toward, aq, da, input_precision=PRECISION)
                if PARTS == 2:
                    db = tl.dot(toward, bq, db, input_precision=PRECISION)
    # masked keys get a gradient of zero, which must be written
    if OF_VALUES:
        dv = tl.where(ok[:, None], dv, 0.0) if HAS_MASK else dv
        store_rows(dv_ptr, dv, first, rows, exists, columns, columns < V, stride_dv)
    if OF_KEYS:
        if PARTS == 1:
            db = da
        # read again: until here its registers belong to the gradients
        x = load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k).to(tl.float32)
        dx, g0, g1 = phi_key_gradient(x, da, db, key_params, channels, 0.0, alpha, D, MAP, CUBE)
        dx = tl.where(ok[:, None], dx, 0.0) if HAS_MASK else dx
        store_rows(dk_ptr, dx, first, rows, exists, channels, in_head, stride_dk)
        if LEARNED:
            p0 = sum_over_rows(g0, ok, in_head)
            p1 = sum_over_rows(g1, ok, in_head)
            store_two_parameters(dparam_ptr + program_index() * (2 * D), p0, p1, D, BD)
