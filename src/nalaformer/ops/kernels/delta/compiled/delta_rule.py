"""Compute the delta rule forward: each chunk by itself, a scan of the state, the outputs; delta_op.py has the formulas."""

import triton
import triton.language as tl

from ...common.compiled.tiles import load_rows, store_rows
from .chunks import (
    chunk_rows,
    decay_between,
    decay_to_end,
    invert_unit_lower,
    load_values,
    multiply_rows,
    running_decay,
    sequence_rows,
)


@triton.jit
def solve_kernel(
    q_ptr,  # [rows, heads, F]; read with GRADIENT alone
    k_ptr,  # [rows, heads, F]
    v_ptr,  # [rows, heads, V]; with GRADIENT that of the outputs
    beta_ptr,  # [rows, heads]
    decay_ptr,  # [rows, heads]; not read without HAS_DECAY
    owners_ptr,  # [chunks], read if PACKED: the sequence of each chunk
    sequences_ptr,  # [sequences, 3], read if PACKED: first row, tokens, first chunk
    u_ptr,  # [rows, heads, V]
    w_ptr,  # [rows, heads, F]
    since_ptr,  # [rows, heads] float32: s; written if HAS_DECAY
    to_end_ptr,  # [rows, heads] float32: e; written if HAS_DECAY
    inverse_ptr,  # [rows, heads, SIZE]; written with GRADIENT alone
    tokens,
    heads,
    scale,
    F: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute w = T (beta s k), u = T (beta v) of a chunk; with GRADIENT also T, and in u the outputs' part of its gradient."""
    DOT: tl.constexpr = u_ptr.dtype.element_ty
    head = tl.program_id(0) % heads
    first, count = chunk_rows(owners_ptr, sequences_ptr, tl.program_id(0) // heads, tokens, SIZE, PACKED)
    rows = tl.arange(0, SIZE)
    ok = rows < count
    beta = load_values(beta_ptr, first, rows, ok, head, heads).to(tl.float32)
    high, low, since = beta, beta, beta
    amount = beta
    if HAS_DECAY:
        high, low = running_decay(decay_ptr, first, rows, ok, head, heads)
        since = tl.exp(high)
        amount = beta * since
        place = first * heads + head + rows * heads
        tl.store(since_ptr + place, since, mask=ok)
        tl.store(to_end_ptr + place, decay_to_end(high, low, rows, SIZE), mask=ok)
    decay = decay_between(high, low, rows, HAS_DECAY)
    keys_ptr = k_ptr + head * F
    similar = multiply_rows(keys_ptr, keys_ptr, first, rows, ok, heads * F, F, BF, SIZE, DOT, PRECISION)
    is_below = rows[:, None] > rows[None, :]
    among_keys = tl.where(is_below, beta[:, None] * similar * decay, 0.0)
    inverse = invert_unit_lower(among_keys, rows, LEVELS, PRECISION)
    of_keys = (inverse * amount[None, :]).to(DOT)
    for block in range((F + BF - 1) // BF):
        feature = block * BF + tl.arange(0, BF)
        k = load_rows(keys_ptr, first, rows, ok, feature, feature < F, heads * F).to(DOT)
        w = tl.dot(of_keys, k, input_precision=PRECISION)
        store_rows(w_ptr + head * F, w, first, rows, ok, feature, feature < F, heads * F)
    if GRADIENT:
        store_rows(inverse_ptr + head * SIZE, inverse, first, rows, ok, rows, rows < SIZE, heads * SIZE)
        scores = multiply_rows(q_ptr + head * F, keys_ptr, first, rows, ok, heads * F, F, BF, SIZE, DOT, PRECISION)
        of_values = tl.trans(scores * (decay * scale)).to(DOT)
    else:
        of_values = (inverse * beta[None, :]).to(DOT)
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        v = load_rows(v_ptr + head * V, first, rows, ok, value, value < V, heads * V).to(DOT)
        u = tl.dot(of_values, v, input_precision=PRECISION)
        store_rows(u_ptr + head * V, u, first, rows, ok, value, value < V, heads * V)


@triton.jit
def scan_kernel(
    u_ptr,  # [rows, heads, V]: the corrections without an earlier state; overwritten by those with it
    w_ptr,  # [rows, heads, F]
    k_ptr,  # [rows, heads, F]
    since_ptr,  # [rows, heads] float32; not read without HAS_DECAY
    to_end_ptr,  # [rows, heads] float32; not read without HAS_DECAY
    initial_ptr,  # [sequences, heads, F, V] float32; not read without HAS_INITIAL
    sequences_ptr,  # [sequences, 3], read if PACKED
    states_ptr,  # [chunks, heads, F, V]: before each chunk
    final_ptr,  # [sequences, heads, F, V] float32
    tokens,
    heads,
    F: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute u = u - w S and S = s_last S + k^T (e u), chunk after chunk."""
    DOT: tl.constexpr = u_ptr.dtype.element_ty
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    row, length, first_chunk = sequence_rows(sequences_ptr, sequence, tokens, SIZE, PACKED)
    rows = tl.arange(0, SIZE)
    feature = tl.arange(0, BF)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    is_feature = feature < F
    is_value = value < V
    inside = is_feature[:, None] & is_value[None, :]
    in_state = feature[:, None] * V + value[None, :]
    in_states = tl.program_id(0).to(tl.int64) * F * V
    state = tl.zeros((BF, BV), tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + in_states + in_state, mask=inside, other=0.0)
    for chunk in range(0, tl.cdiv(length, SIZE)):
        first = row + chunk * SIZE
        ok = rows < length - chunk * SIZE
        at = (tl.cast(first_chunk + chunk, tl.int64) * heads + head) * F * V
        tl.store(states_ptr + at + in_state, state.to(DOT), mask=inside)
        w = load_rows(w_ptr + head * F, first, rows, ok, feature, is_feature, heads * F)
        k = load_rows(k_ptr + head * F, first, rows, ok, feature, is_feature, heads * F).to(DOT)
        u = load_rows(u_ptr + head * V, first, rows, ok, value, is_value, heads * V).to(tl.float32)
        u -= tl.dot(w, state.to(DOT), input_precision=PRECISION)
        store_rows(u_ptr + head * V, u, first, rows, ok, value, is_value, heads * V)
        if HAS_DECAY:
            last = first + tl.minimum(SIZE, length - chunk * SIZE) - 1
            state *= tl.load(since_ptr + last * heads + head)
            u *= load_values(to_end_ptr, first, rows, ok, head, heads)[:, None]
        state = tl.dot(tl.trans(k), u.to(DOT), state, input_precision=PRECISION)
    tl.store(final_ptr + in_states + in_state, state, mask=inside)


@triton.jit
def delta_output_kernel(
    q_ptr,  # [rows, heads, F]
    k_ptr,  # [rows, heads, F]
    u_ptr,  # [rows, heads, V]
    decay_ptr,  # [rows, heads]; not read without HAS_DECAY
    states_ptr,  # [chunks, heads, F, V]
    owners_ptr,  # [chunks], read if PACKED
    sequences_ptr,  # [sequences, 3], read if PACKED
    out_ptr,  # [rows, heads, V]
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
    """Compute out = scale (s (q S) + M u) of a chunk."""
    DOT: tl.constexpr = u_ptr.dtype.element_ty
    head = tl.program_id(0) % heads
    first, count = chunk_rows(owners_ptr, sequences_ptr, tl.program_id(0) // heads, tokens, SIZE, PACKED)
    rows = tl.arange(0, SIZE)
    ok = rows < count
    high, low = rows, rows
    if HAS_DECAY:
        high, low = running_decay(decay_ptr, first, rows, ok, head, heads)
    queries_ptr = q_ptr + head * F
    scores = multiply_rows(queries_ptr, k_ptr + head * F, first, rows, ok, heads * F, F, BF, SIZE, DOT, PRECISION)
    weights = (scores * decay_between(high, low, rows, HAS_DECAY)).to(DOT)
    before_ptr = states_ptr + tl.program_id(0).to(tl.int64) * F * V
    for block in range((V + BV - 1) // BV):
        value = block * BV + tl.arange(0, BV)
        is_value = value < V
        out = tl.zeros((SIZE, BV), tl.float32)
        for part in range((F + BF - 1) // BF):
            feature = part * BF + tl.arange(0, BF)
            q = load_rows(queries_ptr, first, rows, ok, feature, feature < F, heads * F).to(DOT)
            state = load_rows(before_ptr, 0, feature, feature < F, value, is_value, V)
            out = tl.dot(q, state, out, input_precision=PRECISION)
        if HAS_DECAY:
            out *= tl.exp(high)[:, None]
        u = load_rows(u_ptr + head * V, first, rows, ok, value, is_value, heads * V)
        out = tl.dot(weights, u, out, input_precision=PRECISION)
        store_rows(out_ptr + head * V, scale * out, first, rows, ok, value, is_value, heads * V)
