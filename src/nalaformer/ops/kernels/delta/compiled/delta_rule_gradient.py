"""Compute the delta rule backward: a scan of the gradient of the state, then each chunk; delta_op.py has the formulas."""

import triton
import triton.language as tl

from ...common.compiled.tiles import load_rows, store_rows
from .chunks import (
    chunk_rows,
    decay_between,
    decay_to_end,
    load_values,
    multiply_rows,
    running_decay,
    sequence_rows,
)


@triton.jit
def scan_gradient_kernel(
    du_ptr,  # [rows, heads, V]: the part from the outputs of the chunk; overwritten by the whole gradient
    w_ptr,  # [rows, heads, F]
    k_ptr,  # [rows, heads, F]
    q_ptr,  # [rows, heads, F]
    dout_ptr,  # [rows, heads, V]
    since_ptr,  # [rows, heads] float32; not read without HAS_DECAY
    to_end_ptr,  # [rows, heads] float32; not read without HAS_DECAY
    dfinal_ptr,  # [sequences, heads, F, V] float32; not read without HAS_FINAL
    sequences_ptr,  # [sequences, 3], read if PACKED
    dstates_ptr,  # [chunks, heads, F, V]: gradients of the state after each chunk
    dinitial_ptr,  # [sequences, heads, F, V] float32
    tokens,
    heads,
    scale,
    F: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute du = du + e (k X); X = s_last X + q^T (scale s dout) - w^T du, X the gradient of the state after a chunk."""
    DOT: tl.constexpr = du_ptr.dtype.element_ty
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    row, length, first_chunk = sequence_rows(sequences_ptr, sequence, tokens, SIZE, PACKED)
    chunks = tl.cdiv(length, SIZE)
    rows = tl.arange(0, SIZE)
    feature = tl.arange(0, BF)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    is_feature = feature < F
    is_value = value < V
    inside = is_feature[:, None] & is_value[None, :]
    in_state = feature[:, None] * V + value[None, :]
    in_states = tl.program_id(0).to(tl.int64) * F * V
    dstate = tl.zeros((BF, BV), tl.float32)
    if HAS_FINAL:
        dstate = tl.load(dfinal_ptr + in_states + in_state, mask=inside, other=0.0)
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        first = row + chunk * SIZE
        ok = rows < length - chunk * SIZE
        at = (tl.cast(first_chunk + chunk, tl.int64) * heads + head) * F * V
        operand = dstate.to(DOT)
        tl.store(dstates_ptr + at + in_state, operand, mask=inside)
        w = load_rows(w_ptr + head * F, first, rows, ok, feature, is_feature, heads * F)
        k = load_rows(k_ptr + head * F, first, rows, ok, feature, is_feature, heads * F).to(DOT)
        q = load_rows(q_ptr + head * F, first, rows, ok, feature, is_feature, heads * F).to(DOT)
        dout = load_rows(dout_ptr + head * V, first, rows, ok, value, is_value, heads * V).to(tl.float32) * scale
        du = load_rows(du_ptr + head * V, first, rows, ok, value, is_value, heads * V).to(tl.float32)
        by_state = tl.dot(k, operand, input_precision=PRECISION)
        if HAS_DECAY:
            by_state *= load_values(to_end_ptr, first, rows, ok, head, heads)[:, None]
            dout *= load_values(since_ptr, first, rows, ok, head, heads)[:, None]
            last = first + tl.minimum(SIZE, length - chunk * SIZE) - 1
            dstate *= tl.load(since_ptr + last * heads + head)
        du += by_state
        store_rows(du_ptr + head * V, du, first, rows, ok, value, is_value, heads * V)
        dstate = tl.dot(tl.trans(q), dout.to(DOT), dstate, input_precision=PRECISION)
        dstate = tl.dot(tl.trans(w), (-du).to(DOT), dstate, input_precision=PRECISION)
    tl.store(dinitial_ptr + in_states + in_state, dstate, mask=inside)


@triton.jit
def times_states(
    x_ptr,  # [rows, heads, V]: the rows of a head
    states_ptr,  # [F, V]: the state of a chunk and head
    first,
    rows,
    ok,
    feature,
    stride,
    F: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return x S^T [SIZE, BF] for a block of features."""
    total = tl.zeros((SIZE, BF), tl.float32)
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        x = load_rows(x_ptr, first, rows, ok, value, value < V, stride).to(DOT)
        state = load_rows(states_ptr, 0, feature, feature < F, value, value < V, V)
        total = tl.dot(x, tl.trans(state), total, input_precision=PRECISION)
    return total


@triton.jit
def delta_gradient_kernel(
    q_ptr,  # [rows, heads, F]
    k_ptr,  # [rows, heads, F]
    v_ptr,  # [rows, heads, V]
    beta_ptr,  # [rows, heads]
    decay_ptr,  # [rows, heads]; not read without HAS_DECAY
    dout_ptr,  # [rows, heads, V]
    inverse_ptr,  # [rows, heads, SIZE]
    u_ptr,  # [rows, heads, V]
    du_ptr,  # [rows, heads, V]
    states_ptr,  # [chunks, heads, F, V]: before each chunk
    dstates_ptr,  # [chunks, heads, F, V]: gradients of the state after each chunk
    owners_ptr,  # [chunks], read if PACKED
    sequences_ptr,  # [sequences, 3], read if PACKED
    dq_ptr,  # [rows, heads, F]
    dk_ptr,  # [rows, heads, F]
    dv_ptr,  # [rows, heads, V]
    dbeta_ptr,  # [rows, heads]
    ddecay_ptr,  # [rows, heads]; written if HAS_DECAY
    tokens,
    heads,
    scale,
    F: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute gradients of q, k, v, beta and log_decay of a chunk, from those of the states after the chunks and of u."""
    DOT: tl.constexpr = u_ptr.dtype.element_ty
    head = tl.program_id(0) % heads
    first, count = chunk_rows(owners_ptr, sequences_ptr, tl.program_id(0) // heads, tokens, SIZE, PACKED)
    rows = tl.arange(0, SIZE)
    ok = rows < count
    queries_ptr, keys_ptr = q_ptr + head * F, k_ptr + head * F
    upstream_ptr, corrections_ptr, by_corrections_ptr = dout_ptr + head * V, u_ptr + head * V, du_ptr + head * V
    inverse = load_rows(inverse_ptr + head * SIZE, first, rows, ok, rows, rows < SIZE, heads * SIZE)
    beta = load_values(beta_ptr, first, rows, ok, head, heads).to(tl.float32)
    # gradients of beta, of the products among keys in the solved matrix, and of the products in M
    dbeta = tl.zeros((SIZE,), tl.float32)
    damong = tl.zeros((SIZE, SIZE), tl.float32)
    dweights = tl.zeros((SIZE, SIZE), tl.float32)
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        is_value = value < V
        du = load_rows(by_corrections_ptr, first, rows, ok, value, is_value, heads * V)
        right = tl.dot(tl.trans(inverse), du, input_precision=PRECISION)
        v = load_rows(v_ptr + head * V, first, rows, ok, value, is_value, heads * V).to(tl.float32)
        dbeta += tl.sum(right * v, axis=1)
        store_rows(dv_ptr + head * V, right * beta[:, None], first, rows, ok, value, is_value, heads * V)
        u = tl.trans(load_rows(corrections_ptr, first, rows, ok, value, is_value, heads * V))
        damong = tl.dot((-right).to(DOT), u, damong, input_precision=PRECISION)
        dout = load_rows(upstream_ptr, first, rows, ok, value, is_value, heads * V).to(DOT)
        dweights = tl.dot(dout, u, dweights, input_precision=PRECISION)
    high, low = beta, beta
    since = tl.full((SIZE,), 1.0, tl.float32)
    to_end = since
    if HAS_DECAY:
        high, low = running_decay(decay_ptr, first, rows, ok, head, heads)
        since = tl.exp(high)
        to_end = decay_to_end(high, low, rows, SIZE)
    decay = decay_between(high, low, rows, HAS_DECAY)
    damong = tl.where(rows[:, None] > rows[None, :], damong * decay, 0.0)
    dweights *= decay * scale
    similar = multiply_rows(keys_ptr, keys_ptr, first, rows, ok, heads * F, F, BF, SIZE, DOT, PRECISION)
    by_similar = damong * similar
    dbeta += tl.sum(by_similar, axis=1)
    by_sum = dbeta
    at_end = tl.sum(tl.zeros((SIZE,), tl.float32), axis=0)
    if HAS_DECAY:
        scores = multiply_rows(queries_ptr, keys_ptr, first, rows, ok, heads * F, F, BF, SIZE, DOT, PRECISION)
        # a token with itself would cancel, and lose digits
        by_pair = beta[:, None] * by_similar + tl.where(rows[:, None] > rows[None, :], dweights * scores, 0.0)
        # the columns are summed through a transpose: both sums then have the same layout
        by_sum = tl.sum(by_pair, axis=1) - tl.sum(tl.trans(by_pair), axis=1)
    dscores = dweights.to(DOT)
    damong *= beta[:, None]
    dsimilar = (damong + tl.trans(damong)).to(DOT)
    in_states = tl.program_id(0).to(tl.int64) * F * V
    for block in range((F + BF - 1) // BF):
        feature = block * BF + tl.arange(0, BF)
        is_feature = feature < F
        q = load_rows(queries_ptr, first, rows, ok, feature, is_feature, heads * F)
        k = load_rows(keys_ptr, first, rows, ok, feature, is_feature, heads * F)
        key = k.to(tl.float32)
        # the gradient of beta s k, from the state before the chunk
        by_w = times_states(
            by_corrections_ptr, states_ptr + in_states, first, rows, ok, feature, heads * V, F, V, SIZE, BF, BV, DOT, PRECISION
        )
        by_w = tl.dot(tl.trans(inverse), (-by_w).to(DOT), input_precision=PRECISION) * since[:, None]
        along = tl.sum(by_w * key, axis=1)
        dbeta += along
        dk = by_w * beta[:, None]
        # the gradient of e k, from the state after the chunk
        by_keys = times_states(
            corrections_ptr, dstates_ptr + in_states, first, rows, ok, feature, heads * V, F, V, SIZE, BF, BV, DOT, PRECISION
        )
        by_keys *= to_end[:, None]
        dk += by_keys
        dk = tl.dot(dsimilar, k.to(DOT), dk, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dscores), q.to(DOT), dk, input_precision=PRECISION)
        store_rows(dk_ptr + head * F, dk, first, rows, ok, feature, is_feature, heads * F)
        # the gradient of s q, from the state before the chunk
        dq = times_states(
            upstream_ptr, states_ptr + in_states, first, rows, ok, feature, heads * V, F, V, SIZE, BF, BV, DOT, PRECISION
        )
        dq *= (since * scale)[:, None]
        if HAS_DECAY:
            by_end = tl.sum(by_keys * key, axis=1)
            by_sum += beta * along + tl.sum(dq * q.to(tl.float32), axis=1) - by_end
            at_end += tl.sum(by_end, axis=0)
            for part in range((V + BV - 1) // BV):
                value = part * BV + tl.arange(0, BV)
                state = load_rows(states_ptr + in_states, 0, feature, is_feature, value, value < V, V).to(tl.float32)
                dstate = load_rows(dstates_ptr + in_states, 0, feature, is_feature, value, value < V, V).to(tl.float32)
                whole = tl.sum(tl.where(rows == SIZE - 1, since, 0.0), axis=0)
                at_end += whole * tl.sum(tl.sum(state * dstate, axis=1), axis=0)
        dq = tl.dot(dscores, k.to(DOT), dq, input_precision=PRECISION)
        store_rows(dq_ptr + head * F, dq, first, rows, ok, feature, is_feature, heads * F)
    place = first * heads + head + rows * heads
    tl.store(dbeta_ptr + place, dbeta.to(dbeta_ptr.dtype.element_ty), mask=ok)
    if HAS_DECAY:
        by_sum += tl.where(rows == SIZE - 1, at_end, 0.0)
        # a decay affects its own token and all later ones in the chunk
        by_step = tl.cumsum(by_sum, axis=0, reverse=True)
        tl.store(ddecay_ptr + place, by_step.to(ddecay_ptr.dtype.element_ty), mask=ok)
