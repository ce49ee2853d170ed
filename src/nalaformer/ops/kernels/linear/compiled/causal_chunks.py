"""Compute causal linear attention of large heads in chunks: running sums are written at each chunk, so tiles need no scan.

    state kernel       k, v                    -> sums of each split                            (that of bidirectional.py)
    prefix kernel      those                   -> sums before each split, and of all tokens     (split_sums.py)
    scan kernel        k, v, sums before       -> sums before each chunk, as operands
    chunk kernel       q, k, v, those          -> out
    scan kernel        k, v, sums before       -> sums before each chunk again, with more digits
    chunk dq           q, k, v, out, dout, those       -> dq, and per row the gradient of the denominator
    dsums kernel       q, dout, those          -> gradients of the sums by each split of queries
    prefix kernel      those, from the end     -> gradients of the sums after each split
    scan back kernel   q, dout, those          -> gradients of the sums after each chunk, as operands
    chunk dk           q, k, v, dout, those    -> dk, dv

The scan of causal.py holds the state of both parts in registers, which in heads of 128 leaves room for 16 tokens at a time.
Here one program scans with one part and does nothing else. Its sums are float32; at each chunk it writes them in the form of
operands: S^T [BV, BD], and with DIGITS = 2 the operand of the digits that the first one lacks. Beside them lie float32 values:
z [STEPS, PARTS, BD] before each step of the chunk, the number of keys before the chunk, and per part a flag, set if the sums
after the chunk hold NaN or infinity (HAS_CHECK). A step is a tile of chunk dq, which thereby needs no sums of keys; elsewhere
it is the chunk. Rotary is not supported.
"""

import triton
import triton.language as tl

from ...common.compiled.maps import phi_key, phi_query
from ...common.compiled.products import digits, high_and_low
from ...common.compiled.tiles import (
    head_rows,
    load_rows,
    place_per_row,
    row_strides,
    sample_rows,
    store_per_row,
    store_rows,
    visible_rows,
)
from .causal import add_weighted_values


@triton.constexpr_function
def operand_type(DOT):
    """Return the type of features: bfloat16 ones are operands, others are float32."""
    return DOT if DOT == tl.bfloat16 else None  # noqa: SIM300


@triton.constexpr_function
def chunk_value_count(BD, PARTS, STEPS=1):
    """Return the number of float32 values beside a chunk's operands, padded so that each begins at a multiple of 64 bytes."""
    return STEPS * PARTS * BD + 16


@triton.jit
def first_chunk(row, sample, num_tokens, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return where the chunks of a sample begin. Packed samples begin anywhere in one, so each leaves at most one unused."""
    place = tl.cast(sample, tl.int64) * tl.cdiv(num_tokens, CHUNK)
    if PACKED:
        place = row // CHUNK + sample
    return place


@triton.jit
def store_operand(ptr, s, DIGITS: tl.constexpr, DOT: tl.constexpr):
    """Store S^T [BV, BD] as one operand or two, the first of which is rounded and works alone."""
    offsets = tl.arange(0, s.shape[0])[:, None] * s.shape[1] + tl.arange(0, s.shape[1])[None, :]
    high, low = digits(s, DOT)
    tl.store(ptr + offsets, high)
    if DIGITS == 2:
        tl.store(ptr + s.shape[0] * s.shape[1] + offsets, low)


@triton.jit
def load_operand(ptr, BD: tl.constexpr, BV: tl.constexpr):
    return tl.load(ptr + tl.arange(0, BV)[:, None] * BD + tl.arange(0, BD)[None, :])


@triton.jit
def load_transposed_sums(ptr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):
    """Load S^T [BV, BD] and z [16, BD], rows alike, of one part of the sums that bidirectional.py describes."""
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    ok = (columns < V)[:, None] & (channels < D)[None, :]
    s = tl.load(ptr + channels[None, :] * (V + 2) + columns[:, None], mask=ok, other=0.0)
    z = tl.load(ptr + channels * (V + 2) + V, mask=channels < D, other=0.0)
    return s, tl.zeros([16, BD], tl.float32) + z[None, :]


@triton.jit
def store_transposed_sums(ptr, s, z, count, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    ok = (columns < V)[:, None] & (channels < D)[None, :]
    tl.store(ptr + channels[None, :] * (V + 2) + columns[:, None], s, mask=ok)
    tl.store(ptr + channels * (V + 2) + V, z, mask=channels < D)
    tl.store(ptr + channels * (V + 2) + V + 1, tl.zeros_like(z) + count, mask=channels < D)


@triton.jit(do_not_specialize=["num_tokens", "kv_heads", "split_size"])
def chunk_scan_kernel(
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    mask_ptr,  # [B, N] uint8
    cu_ptr,  # [B + 1]
    param_ptr,  # [heads of the map, P]
    before_ptr,  # [splits, B * K, PARTS, D, V + 2]
    total_ptr,  # [B * K, PARTS, D, V + 2]: written, HAS_TOTAL
    operands_ptr,  # [chunks of all samples, K, PARTS, DIGITS, BV, BD]
    numbers_ptr,  # [chunks of all samples, K, STEPS * PARTS * BD + 16]
    num_tokens,
    kv_heads,
    split_size,  # a multiple of CHUNK
    stride_kb,
    stride_k,
    stride_kh,
    stride_vb,
    stride_v,
    stride_vh,
    param_group,
    num_params,
    alpha,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,  # tokens
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    CUBE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    HAS_CHECK: tl.constexpr,
    DIGITS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the sums before each chunk of a split, of one part."""
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    sample = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    split = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    row, length = sample_rows(cu_ptr, sample, num_tokens, PACKED)
    k_ptr = head_rows(k_ptr, sample, head, row, stride_kb, stride_k, stride_kh, PACKED)
    v_ptr = head_rows(v_ptr, sample, head, row, stride_vb, stride_v, stride_vh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    param_ptr += (head // param_group) * num_params
    start = split * split_size
    stop = tl.minimum(start + split_size, length)
    SIZE: tl.constexpr = D * (V + 2)
    place = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
    before = before_ptr + (place * PARTS + part) * SIZE
    s, z = load_transposed_sums(before, D, V, BD, BV)
    count = tl.load(before + V + 1)
    own = (first_chunk(row, sample, num_tokens, CHUNK, PACKED) + start // CHUNK) * kv_heads + head
    operands_ptr += (own * PARTS + part) * (DIGITS * BV * BD)
    VALUES_SIZE: tl.constexpr = chunk_value_count(BD, PARTS, CHUNK // STEP)
    numbers_ptr += own * VALUES_SIZE

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    TYPE: tl.constexpr = operand_type(DOT)
    # z grows by one step or less at a time
    GROWS: tl.constexpr = BN if BN < STEP else STEP
    for first in range(start, stop, BN):
        if BN == CHUNK or first % CHUNK == 0:
            store_operand(operands_ptr, s, DIGITS, DOT)
            if part == 0:
                tl.store(numbers_ptr + VALUES_SIZE - 16, count)
        ok = visible_rows(mask_ptr, first, rows, rows < stop - first, HAS_MASK)
        x = load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k).to(tl.float32)
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        a, b = phi_key(x, ok, param_ptr, channels, 0.0, alpha, D, MAP, CUBE, TYPE)
        if PARTS == 2:
            a = tl.where(part == 0, a, b)
        a = a.to(DOT)
        s = tl.dot(tl.trans(v), a, s, input_precision=PRECISION)
        for growth in tl.static_range(BN // GROWS):
            if GROWS == STEP or first % STEP == 0:
                # the rows are alike
                step = (first % CHUNK) // STEP + growth
                own_z = numbers_ptr + (step * PARTS + part) * BD + tl.zeros([16, 1], tl.int32) + channels[None, :]
                tl.store(own_z, z, mask=tl.arange(0, 16)[:, None] == 0)
            of_step = tl.full([16, BN], 1.0, DOT)
            if BN > GROWS:
                of_step = tl.where(rows[None, :] // GROWS == growth, of_step, 0.0).to(DOT)
            z = tl.dot(of_step, a, z, input_precision=PRECISION)
        count += tl.sum(ok.to(tl.float32))
        if BN == CHUNK or (first + BN) % CHUNK == 0 or first + BN >= stop:
            if HAS_CHECK:
                is_bad = tl.max(tl.max(((s - s) != 0.0).to(tl.int32), axis=1), axis=0)
                tl.store(numbers_ptr + VALUES_SIZE - 15 + part, is_bad.to(tl.float32))
            operands_ptr += tl.cast(kv_heads, tl.int64) * (PARTS * DIGITS * BV * BD)
            numbers_ptr += kv_heads * VALUES_SIZE
    if HAS_TOTAL:
        total = total_ptr + (tl.cast(tl.program_id(1), tl.int64) * PARTS + part) * SIZE
        # multiplying by a sixteenth is exact
        store_transposed_sums(total, s, tl.sum(z, axis=0) * 0.0625, count, D, V, BD, BV)


@triton.jit
def visible_keys(count, mask_ptr, begin, first, rows, exists, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the visible keys up to each row of a tile, [BN, 1]; count: those before the chunk, which begins at `begin`."""
    if HAS_MASK:
        places = tl.arange(0, CHUNK)
        earlier = visible_rows(mask_ptr, begin, places, places < first - begin, HAS_MASK)
        own = visible_rows(mask_ptr, first, rows, exists, HAS_MASK)
        seen = count + tl.sum(earlier.to(tl.float32)) + tl.cumsum(own.to(tl.float32), axis=0)
    else:
        seen = count + (first - begin + 1 + rows).to(tl.float32)
    return seen[:, None]


@triton.jit
def add_keys(
    above,
    below,
    aq,
    bq,
    k_ptr,
    v_ptr,
    mask_ptr,
    param_ptr,
    first,  # index of the first query
    begin,  # index of the first key
    stop,
    stride_k,
    stride_v,
    alpha,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    CUBE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_SUSPECT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add a tile of keys to the numerators and denominators of a tile of queries."""
    BN: tl.constexpr = aq.shape[0]
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    keys = tl.arange(0, BK)
    ok = visible_rows(mask_ptr, begin, keys, keys < stop - begin, HAS_MASK)
    x = load_rows(k_ptr, begin, keys, ok, channels, channels < D, stride_k).to(tl.float32)
    v = load_rows(v_ptr, begin, keys, ok, columns, columns < V, stride_v)
    ak, bk = phi_key(x, ok, param_ptr, channels, 0.0, alpha, D, MAP, CUBE, operand_type(DOT))
    within = tl.dot(aq, tl.trans(ak.to(DOT)), input_precision=PRECISION)
    if PARTS == 2:
        within = tl.dot(bq, tl.trans(bk.to(DOT)), within, input_precision=PRECISION)
    sees = (first + tl.arange(0, BN))[:, None] >= (begin + keys)[None, :]
    within = tl.where(sees, within, 0.0)
    below += tl.sum(within, axis=1)[:, None]
    if IS_SUSPECT:
        above = add_weighted_values(above, within, sees, v, DOT, PRECISION)
    else:
        above = tl.dot(within.to(DOT), v.to(DOT), above, input_precision=PRECISION)
    return above, below


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "heads", "group"])
def chunk_kernel(
    q_ptr,  # [B, N, H, D]
    k_ptr,  # [B, N, K, D]
    v_ptr,  # [B, N, K, V]
    mask_ptr,  # [B, N] uint8
    cu_ptr,  # [B + 1]
    param_ptr,  # [heads of the map, P]
    operands_ptr,  # [chunks of all samples, K, PARTS, 1, BV, BD]
    numbers_ptr,  # [chunks of all samples, K, PARTS * BD + 16]
    out_ptr,  # [B, N, H, V]
    inverse_ptr,  # [1, B, H, N] (packed: [1, H, T]): 1 / denominator, for the backward pass
    num_rows,  # N, or T if packed
    num_tokens,
    heads,
    group,  # query heads per key head
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
    KEEP: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the outputs of a tile of tokens: the sums provide what came before its chunk, masked products the rest."""
    stride_qb, stride_q, stride_qh = row_strides(stride_qb, stride_q, stride_qh, D)
    stride_kb, stride_k, stride_kh = row_strides(stride_kb, stride_k, stride_kh, D)
    stride_vb, stride_v, stride_vh = row_strides(stride_vb, stride_v, stride_vh, V)
    stride_ob, stride_o, stride_oh = row_strides(stride_ob, stride_o, stride_oh, V)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    kv_head = head // group
    kv_heads = heads // group
    row, length = sample_rows(cu_ptr, sample, num_tokens, PACKED)
    first = tl.program_id(0) * BN
    if first >= length:
        return
    q_ptr = head_rows(q_ptr, sample, head, row, stride_qb, stride_q, stride_qh, PACKED)
    k_ptr = head_rows(k_ptr, sample, kv_head, row, stride_kb, stride_k, stride_kh, PACKED)
    v_ptr = head_rows(v_ptr, sample, kv_head, row, stride_vb, stride_v, stride_vh, PACKED)
    out_ptr = head_rows(out_ptr, sample, head, row, stride_ob, stride_o, stride_oh, PACKED)
    mask_ptr += tl.cast(sample, tl.int64) * num_tokens
    inverse_ptr += place_per_row(sample, head, heads, row, num_rows, PACKED)
    query_params = param_ptr + (head // query_param_group) * num_params
    key_params = param_ptr + (kv_head // key_param_group) * num_params
    own = (first_chunk(row, sample, num_tokens, CHUNK, PACKED) + first // CHUNK) * kv_heads + kv_head
    operands_ptr += own * (PARTS * BV * BD)
    numbers_ptr += own * chunk_value_count(BD, PARTS)

    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    exists = rows < length - first
    y = load_rows(q_ptr, first, rows, exists, channels, channels < D, stride_q).to(tl.float32)
    aq, bq, query_scale = phi_query(y, query_params, channels, norm_scale, alpha, D, MAP, 0, operand_type(DOT))
    aq = aq.to(DOT)
    bq = bq.to(DOT)
    z = tl.load(numbers_ptr + channels)
    wide = high_and_low(tl.zeros([BD, 16], tl.float32) + z[:, None], DOT)
    total = tl.dot(aq, wide, input_precision=PRECISION)
    above = tl.dot(aq, tl.trans(load_operand(operands_ptr, BD, BV)), input_precision=PRECISION)
    if PARTS == 2:
        z = tl.load(numbers_ptr + BD + channels)
        wide = high_and_low(tl.zeros([BD, 16], tl.float32) + z[:, None], DOT)
        total = tl.dot(bq, wide, total, input_precision=PRECISION)
        above = tl.dot(bq, tl.trans(load_operand(operands_ptr + BV * BD, BD, BV)), above, input_precision=PRECISION)
    below = tl.sum(total, axis=1)[:, None]
    begin = first // CHUNK * CHUNK
    count = tl.load(numbers_ptr + PARTS * BD)
    seen = visible_keys(count, mask_ptr, begin, first, rows, exists, CHUNK, HAS_MASK)
    is_bad = tl.load(numbers_ptr + PARTS * BD + 1)
    if PARTS == 2:
        is_bad += tl.load(numbers_ptr + PARTS * BD + 2)
    end = tl.minimum(first + BN, length)
    # two loops: a branch in each step would cost the steps that need none
    if is_bad > 0.0:
        for start in range(begin, end, BK):
            above, below = add_keys(
                *(above, below, aq, bq, k_ptr, v_ptr, mask_ptr, key_params, first, start, length, stride_k, stride_v),
                *(alpha, D, V, BD, BV, BK, MAP, PARTS, CUBE, HAS_MASK, True, DOT, PRECISION),
            )
    else:
        for start in range(begin, end, BK):
            above, below = add_keys(
                *(above, below, aq, bq, k_ptr, v_ptr, mask_ptr, key_params, first, start, length, stride_k, stride_v),
                *(alpha, D, V, BD, BV, BK, MAP, PARTS, CUBE, HAS_MASK, False, DOT, PRECISION),
            )
    below += eps * seen
    inverse = 1.0 / tl.where(below == 0.0, 1.0, below)
    if KEEP:
        store_per_row(inverse_ptr, inverse, first, rows, exists)
    store_rows(out_ptr, above * inverse, first, rows, exists, columns, columns < V, stride_o)
