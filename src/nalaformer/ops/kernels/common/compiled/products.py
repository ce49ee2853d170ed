"""Use matrix products for conversions, sums over rows, and rows held in registers.

Matrix units have time left where instructions and registers run out.
"""

import triton
import triton.language as tl


@triton.jit
def digits(x, DOT: tl.constexpr):
    """Return x as two operands, of its high and of its low digits."""
    high = x.to(DOT)
    return high, (x - high.to(tl.float32)).to(DOT)


@triton.jit
def high_and_low(x, DOT: tl.constexpr):
    """Return x [*, 16], columns alike, as an operand whose first two columns add up to x with more digits than one holds."""
    column = tl.arange(0, 16)[None, :]
    high, low = digits(x, DOT)
    return tl.where(column == 0, high, tl.where(column == 1, low, 0.0).to(DOT))


@triton.jit
def truncated_digits(x, DOT: tl.constexpr):
    """Return digits whose high part is truncated by a mask, not rounded: where both parts are used, this saves conversions."""
    high = x
    if tl.bfloat16 == DOT:
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(DOT), (x - high).to(DOT)


@triton.jit
def times(v, high, low, PRECISION: tl.constexpr):
    """Return v times a tile in digits: the denominator may subtract nearly as much as the product."""
    product = tl.dot(v, high, input_precision=PRECISION)
    if v.dtype == tl.bfloat16:
        product = tl.dot(v, low, product, input_precision=PRECISION)
    return product


@triton.constexpr_function
def is_lean(DOT, BD, BV, LARGEST=64):
    """True for bfloat16, which matrix units multiply exactly. LARGEST: the largest heads that fit into registers."""
    return DOT == tl.bfloat16 and max(BD, BV) <= LARGEST  # noqa: SIM300


@triton.jit
def unit_matrix(BD: tl.constexpr, DOT: tl.constexpr):
    return (tl.arange(0, BD)[:, None] == tl.arange(0, BD)[None, :]).to(DOT)


@triton.jit
def widen(x, unit, LEAN: tl.constexpr):
    """Return x [BN, BD] in float32; as a product with the unit matrix it has the layout that the next product needs."""
    return tl.dot(x, unit) if LEAN and x.dtype == unit.dtype else x.to(tl.float32)


@triton.jit
def left_factor(x, DOT: tl.constexpr):
    """Return x [BN, 1] as [BN, 16]; times right_factor(z) it is x z with more digits than one operand holds."""
    column = tl.arange(0, 16)[None, :]
    high, low = digits(x, DOT)
    return tl.where(column < 2, high, tl.where(column == 2, low, 0.0).to(DOT))


@triton.jit
def right_factor(z, DOT: tl.constexpr):
    """Return z [1 or 16, BD], rows alike, as [16, BD]: high, low, high."""
    row = tl.arange(0, 16)[:, None]
    high, low = digits(z, DOT)
    return tl.where((row == 0) | (row == 2), high, tl.where(row == 1, low, 0.0).to(DOT))


@triton.jit
def plus_product(tile, column, row, left, right, LEAN: tl.constexpr):
    """Return tile + column * row, [BN, BD], [BN, 1] or a number, [BD]; as a product of factors the row needs no registers."""
    if LEAN:
        tile = tl.dot(left, right, tile)
    else:
        tile += column * row[None, :]
    return tile
