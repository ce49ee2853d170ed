"""Sum keys that the mean query weighs (RALA), like key_sums.py without weights; mean_query.py has the formulas."""

import triton
import triton.language as tl

from ...common.compiled.fastmath import constant, exp2
from ...common.compiled.maps import LOG2_E, shared_phi
from ...common.compiled.products import is_lean, unit_matrix, widen
from ...common.compiled.tiles import load_rows, rotate_features, visible_rows
from .key_sums import add_tile
from .mean_query import product_with_mean

# The largest distance, in powers of two, between the largest product and that of a key like the mean query: up to it, sums in
# float32 lose nothing.
FARTHEST = constant(24.0)


@triton.jit
def expected_product(mean_a, mean_b, D: tl.constexpr, PARTS: tl.constexpr):
    """Return log2 of exp(r . phi(k)) of a key with the features of the mean query, rounded up."""
    ROOT: tl.constexpr = D**0.5
    size = tl.sum(mean_a * mean_a)
    if PARTS == 2:
        size += tl.sum(mean_b * mean_b)
    return tl.ceil(size * (LOG2_E * ROOT))


@triton.jit
def sum_weighed_keys(
    k_ptr,
    v_ptr,
    mask_ptr,
    mean_a,  # [1, BD] the mean query's features
    mean_b,
    cos_ptr,
    sin_ptr,
    start,
    stop,
    stride_k,
    stride_v,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return S and z of keys start .. stop - 1, which weigh exp2(product with the mean query - log_scale); the sum of their
    weights; and log_scale, the largest product rounded up.

    The largest product is known only when all keys have been read, and a running one would make every tile wait for the sums of
    the one before. So the scale is guessed, larger than the product is likely to be. If the guess is too small, or much too
    large, the keys are read a second time. Scales are integers, so changing them rounds nothing.
    """
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    LEAN: tl.constexpr = is_lean(DOT, BD, BV)
    unit = unit_matrix(BD, DOT)
    ones = tl.full([16, BN], 1.0, DOT)
    s_a = tl.zeros([BV, BD], tl.float32)
    z_a = tl.zeros([16, BD], tl.float32)
    s_b = s_a
    z_b = z_a
    weights = tl.zeros([BN, 1], tl.float32)
    scale = expected_product(mean_a, mean_b, D, PARTS) + FARTHEST
    # products are not negative
    largest = scale * 0.0
    is_open = start < stop
    while is_open:
        s_a = tl.zeros([BV, BD], tl.float32)
        z_a = tl.zeros([16, BD], tl.float32)
        weights = tl.zeros([BN, 1], tl.float32)
        if PARTS == 2:
            s_b = tl.zeros([BV, BD], tl.float32)
            z_b = tl.zeros([16, BD], tl.float32)
        highest = tl.zeros([BN, 1], tl.float32)
        for first in range(start, stop, BN):
            ok = visible_rows(mask_ptr, first, rows, rows < stop - first, HAS_MASK)
            x = widen(load_rows(k_ptr, first, rows, ok, channels, channels < D, stride_k), unit, LEAN)
            v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
            a, b = shared_phi(x, ok, None, channels, 0.0, D, MAP)
            product = product_with_mean(a, b, mean_a, mean_b, PARTS)
            highest = tl.maximum(highest, product)
            weight = tl.where(ok[:, None], exp2(tl.minimum(product - scale, 0.0)), 0.0)
            weights += weight
            a *= weight
            rotated = rotate_features(a, cos_ptr, sin_ptr, first, rows, ok, 0, D, BD, PAIRS, False).to(DOT)
            s_a, z_a = add_tile(s_a, z_a, rotated, a.to(DOT), v, ones, False, PRECISION)
            if PARTS == 2:
                b *= weight
                rotated = rotate_features(b, cos_ptr, sin_ptr, first, rows, ok, 1, D, BD, PAIRS, False).to(DOT)
                s_b, z_b = add_tile(s_b, z_b, rotated, b.to(DOT), v, ones, False, PRECISION)
        largest = tl.ceil(tl.max(highest))
        keep = exp2(scale - largest)
        # False for NaN, which a second pass would not fix; the scale of a second pass is the largest product
        is_open = (largest > scale) | (largest < scale - 2.0 * FARTHEST)
        scale = largest
        s_a *= keep
        z_a *= keep
        weights *= keep
        if PARTS == 2:
            s_b *= keep
            z_b *= keep
    # the columns of z are alike, and multiplying by a sixteenth is exact
    z_a, z_b = tl.sum(z_a, axis=0) * 0.0625, tl.sum(z_b, axis=0) * 0.0625
    return tl.trans(s_a), tl.trans(s_b), z_a, z_b, tl.sum(weights), largest
