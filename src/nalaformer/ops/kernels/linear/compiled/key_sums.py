"""Sum keys into the state of a sample and head; bidirectional.py has the plan."""

import triton
import triton.language as tl

from ...common.compiled.fastmath import exp2
from ...common.compiled.maps import is_elementwise, key_excess, phi_key
from ...common.compiled.products import is_lean, unit_matrix, widen
from ...common.compiled.tiles import load_per_row, load_rows, rotate_features


@triton.jit
def add_tile(s, z, features, plain, v, ones, ACROSS: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile of keys to S and z; z is a product with ones, since a sum over rows would make warps wait for each other.

    ACROSS: the features lie where a product takes its left operand, S is [BD, BV]. Otherwise they are the right operand, for
    which they go through memory, and S is [BV, BD]: as the left one they would need a transpose, which splits the product into
    many.
    """
    if ACROSS:
        z = tl.dot(tl.trans(plain), ones, z, input_precision=PRECISION)
        s = tl.dot(tl.trans(features), v, s, input_precision=PRECISION)
    else:
        z = tl.dot(ones, plain, z, input_precision=PRECISION)
        s = tl.dot(tl.trans(v), features, s, input_precision=PRECISION)
    return s, z


@triton.jit
def sum_keys(
    k_ptr,
    v_ptr,
    mask_ptr,
    weight_ptr,  # begins at the sample and head
    param_ptr,
    cos_ptr,
    sin_ptr,
    start,
    stop,
    stride_k,
    stride_v,
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
    HAS_WEIGHT: tl.constexpr,
    CONTRAST: tl.constexpr,
    GUARD: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the sums over keys start .. stop - 1, and with CONTRAST that of their values, [BV]."""
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    rows = tl.arange(0, BN)
    in_head = channels < D
    IS_PLAIN: tl.constexpr = PAIRS == 0 and is_elementwise(MAP) and k_ptr.dtype.element_ty == DOT
    LEAN: tl.constexpr = is_lean(DOT, BD, BV, 128 if IS_PLAIN and not GUARD else 64)
    # features as operands, unless they are rotated or weighted first
    TYPE: tl.constexpr = DOT if LEAN and PAIRS == 0 and not HAS_WEIGHT else None
    ACROSS: tl.constexpr = LEAN and IS_PLAIN
    unit = unit_matrix(BD, DOT)
    if ACROSS:
        s_a = tl.zeros([BD, BV], tl.float32)
        z_a = tl.zeros([BD, 16], tl.float32)
        ones = tl.full([BN, 16], 1.0, DOT)
    else:
        s_a = tl.zeros([BV, BD], tl.float32)
        z_a = tl.zeros([16, BD], tl.float32)
        ones = tl.full([16, BN], 1.0, DOT)
    s_b = s_a
    z_b = z_a
    value_sum = tl.zeros([16, BV], tl.float32)
    count = tl.zeros([BN], tl.float32)
    log_scale = 0.0
    for first in range(start, stop, BN):
        ok = rows < stop - first
        if HAS_MASK:
            ok = ok & (tl.load(mask_ptr + first + rows, mask=ok, other=0) != 0)
        x = load_rows(k_ptr, first, rows, ok, channels, in_head, stride_k)
        x = tl.trans(tl.dot(unit, tl.trans(x))) if ACROSS else widen(x, unit, LEAN)
        v = load_rows(v_ptr, first, rows, ok, columns, columns < V, stride_v).to(DOT)
        if GUARD:
            larger = tl.maximum(log_scale, key_excess(x, param_ptr, channels, D, MAP))
            keep = exp2(log_scale - larger)
            s_a *= keep
            s_b *= keep
            z_a *= keep
            z_b *= keep
            log_scale = larger
        a, b = phi_key(x, ok, param_ptr, channels, log_scale, alpha, D, MAP, CUBE, TYPE)
        if HAS_WEIGHT:
            weight = load_per_row(weight_ptr, first, rows, ok)
            a *= weight
            b *= weight
        count += ok.to(tl.float32)
        if CONTRAST:
            value_sum = tl.dot(tl.full([16, BN], 1.0, DOT), v, value_sum, input_precision=PRECISION)
        rotated = rotate_features(a, cos_ptr, sin_ptr, first, rows, ok, 0, D, BD, PAIRS, False).to(DOT)
        s_a, z_a = add_tile(s_a, z_a, rotated, a.to(DOT), v, ones, ACROSS, PRECISION)
        if PARTS == 2:
            rotated = rotate_features(b, cos_ptr, sin_ptr, first, rows, ok, 1, D, BD, PAIRS, False).to(DOT)
            s_b, z_b = add_tile(s_b, z_b, rotated, b.to(DOT), v, ones, ACROSS, PRECISION)
    if not ACROSS:
        s_a, s_b, z_a, z_b = tl.trans(s_a), tl.trans(s_b), tl.trans(z_a), tl.trans(z_b)
    # the columns of z are alike, and multiplying by a sixteenth is exact
    z_a, z_b, value_sum = tl.sum(z_a, axis=1) * 0.0625, tl.sum(z_b, axis=1) * 0.0625, tl.sum(value_sum, axis=0) * 0.0625
    return s_a, s_b, z_a, z_b, tl.sum(count), log_scale, value_sum
