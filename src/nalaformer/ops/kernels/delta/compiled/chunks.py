"""Share code between the kernels of the delta rule: chunk positions, decays, an inverse; delta_op.py has the formulas."""

import triton
import triton.language as tl

from ...common.compiled.fastmath import constant
from ...common.compiled.tiles import load_rows

# A lower bound of log_decay: a difference of two infinite sums would be NaN, and exp of the bound is zero anyway.
SMALLEST_LOG_DECAY = constant(-100.0)


@triton.jit
def sequence_rows(sequences_ptr, sequence, tokens, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row of a sequence among those of all, its length, and the index of its first chunk."""
    row = tl.cast(sequence, tl.int64) * tokens
    length = tokens
    chunk = sequence * tl.cdiv(tokens, SIZE)
    if PACKED:
        row = tl.load(sequences_ptr + sequence * 3).to(tl.int64)
        length = tl.load(sequences_ptr + sequence * 3 + 1)
        chunk = tl.load(sequences_ptr + sequence * 3 + 2)
    return row, length, chunk


@triton.jit
def chunk_rows(owners_ptr, sequences_ptr, chunk, tokens, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row of a chunk, and its number of tokens."""
    sequence = tl.load(owners_ptr + chunk) if PACKED else chunk // tl.cdiv(tokens, SIZE)
    row, length, first_chunk = sequence_rows(sequences_ptr, sequence, tokens, SIZE, PACKED)
    before = (chunk - first_chunk) * SIZE
    return row + before, tl.minimum(SIZE, length - before)


@triton.jit
def load_values(ptr, first, rows, ok, head, heads):
    """Load one value per token of [*, heads]."""
    return tl.load(ptr + (first * heads + head) + rows * heads, mask=ok, other=0.0)


@triton.jit
def running_decay(decay_ptr, first, rows, ok, head, heads):
    """Return G, the sum of log_decay up to each token of a chunk, as two floats, whose differences keep small decays."""
    steps = load_values(decay_ptr, first, rows, ok, head, heads).to(tl.float32)
    # a comparison instead of a maximum, which would replace NaN with a number
    total = tl.cumsum(tl.where(steps < SMALLEST_LOG_DECAY, SMALLEST_LOG_DECAY, steps).to(tl.float64), axis=0)
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32)


@triton.jit
def decay_between(high, low, rows, HAS_DECAY: tl.constexpr):
    """Return D_ij = exp(G_i - G_j) up to the diagonal, 0 above it."""
    is_lower = rows[:, None] >= rows[None, :]
    if HAS_DECAY:
        between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        decay = tl.exp(tl.where(is_lower, between, float("-inf")))
    else:
        decay = is_lower.to(tl.float32)
    return decay


@triton.jit
def decay_to_end(high, low, rows, SIZE: tl.constexpr):
    """Return e_j = exp(G_last - G_j)."""
    is_last = rows == SIZE - 1
    last_high = tl.sum(tl.where(is_last, high, 0.0), axis=0)
    last_low = tl.sum(tl.where(is_last, low, 0.0), axis=0)
    return tl.exp((last_high - high) + (last_low - low))


@triton.jit
def invert_unit_lower(a, rows, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + A)^-1 of A [2^LEVELS, 2^LEVELS], zero on and above the diagonal, for blocks of 2, 4, 8, .. rows.

    With T the inverse for blocks of one size and B the part of A that joins two of them to a block of twice the size, the
    inverse for the larger blocks is T - T B T. Powers of A itself would lose all digits where keys are alike.
    """
    row, column = rows[:, None], rows[None, :]
    inverse = (row == column).to(tl.float32) - tl.where(row >> 1 == column >> 1, a, 0.0)
    for level in range(1, LEVELS):
        joins = (row >> level != column >> level) & (row >> (level + 1) == column >> (level + 1))
        joined = tl.dot(tl.where(joins, a, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, joined, input_precision=PRECISION)
    return inverse


@triton.jit
def multiply_rows(
    x_ptr,  # [*, heads, F]: the rows of a head
    y_ptr,  # [*, heads, F]
    first,
    rows,
    ok,
    stride,
    F: tl.constexpr,
    BF: tl.constexpr,
    SIZE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return x y^T [SIZE, SIZE] of a chunk."""
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for block in range((F + BF - 1) // BF):
        feature = block * BF + tl.arange(0, BF)
        x = load_rows(x_ptr, first, rows, ok, feature, feature < F, stride).to(DOT)
        y = load_rows(y_ptr, first, rows, ok, feature, feature < F, stride).to(DOT)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)
    return total
