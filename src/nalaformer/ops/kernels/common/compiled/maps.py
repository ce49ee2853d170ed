"""Compute the feature maps in registers: a tile of tokens is mapped where its features are needed, and they are never stored.

A tile is [BN, BD] float32, BD = head size padded to a power of two; channels beyond the head and rows beyond the tokens hold
zeros. Maps that do not map zero to zero (elu, focused, softmax) mask these entries of their result. Maps with both signs return
two tiles `a` and `b`, the two halves of the features; the others return `a` only, and `b` is `a`, unused. Parameters lie in one
float32 row per head:

    norm_aware:   base, slope, key power          query power = base + slope * tanh(norm_scale * |q|)
    polarity:     power [D], 1 / softplus(scale) [D]
    polarity_exp: temperature of the same-sign stream [2 D], of the opposite-sign stream [2 D]
    focused:      1 / softplus(scale) [D]; alpha is the power
    channel_softmax: none; alpha is the gain
    reflection:   unit normal across heads [D], cos and sin of twice each block's angle [D]

Powers are exp2(p * log2 x): the hardware has exactly these two instructions, and the interpreter has no pow. The number of
instructions per channel limits these kernels, so divisions are moved out of the tiles and log2 provides the guards.
"""

import triton
import triton.language as tl

from .fastmath import constant, cos, exp2, halves, log2, reciprocal, rsqrt, sin, unbounded_log2, with_sign
from .row_maps import focus, reflect, softmax

TINY = constant(1e-30)
# see feature_maps.norm_aware: below this norm a query changes into one that favours no channel
SMALLEST_SIZE = constant(1e-10)
LARGEST_INVERSE_SIZE = constant(1e10)
LARGEST_SIZE = constant(3e38)
# norm-aware key features are multiplied by 2^-30: keys of 1e9 stay finite, and what that rounds to zero is far below eps
KEY_SHIFT = constant(30.0)
KEY_UNIT = constant(2.0**-10)
# log2 of LARGEST_FEATURE in feature_maps.base, above which features of the maps without a bound are scaled down
LOG2_LARGEST = constant(13.287712379549449)
LOG2_E = constant(1.4426950408889634)
LN_2 = constant(0.6931471805599453)
HALF_PI = constant(1.5707963267948966)
HALF_ROOT = constant(0.7071067811865476)


@triton.jit
def tanh(x):
    # 1 - 2 / (exp(2x) + 1) is exact at both ends
    return 1.0 - 2.0 * reciprocal(exp2(2.0 * LOG2_E * x) + 1.0)


@triton.jit
def sides(y):
    """Return sin and cos of pi/2 s with s = 1 / (1 + exp(-2 y)), the cosine map's halves, and that angle's slope pi s (1 - s).

    The smaller of s and 1 - s gives them, which has all its digits and an angle below pi/4.
    """
    small = reciprocal(exp2(2.0 * LOG2_E * tl.abs(y)) + 1.0)
    own = cos(HALF_PI * small)
    other = sin(HALF_PI * small)
    angle_slope = 2.0 * HALF_PI * small * (1.0 - small)
    return tl.where(y > 0, own, other), tl.where(y > 0, other, own), angle_slope


@triton.jit
def expm1_base2(y, log_scale):
    """Return (2^y - 1) * 2^-log_scale for y >= 0, with all digits where y is small and nothing is scaled."""
    z = y * LN_2
    # five terms: below z = 0.25 they are exact to float32, above it the difference has lost two bits at most
    series = z * (1.0 + z * (0.5 + z * (0.16666666666666666 + z * (0.041666666666666664 + z * 0.008333333333333333))))
    scaled = exp2(y - log_scale) - exp2(-log_scale)
    return tl.where(log_scale > 0, scaled, tl.where(z < 0.25, series, scaled))


@triton.jit
def inside(tile, channels, D: tl.constexpr):
    """Zero the channels beyond the head."""
    if tile.shape[1] != D:
        tile = tl.where(channels[None, :] < D, tile, 0.0)
    return tile


@triton.jit
def elu_plus_one(x):
    return tl.where(x > 0, x + 1.0, exp2(LOG2_E * tl.minimum(x, 0.0)))


@triton.jit
def squared_norm(x):
    """Return the squared norm, [BN, 1], kept below infinity, which has no norm."""
    return tl.minimum(tl.sum(x * x, axis=1)[:, None], LARGEST_SIZE)


@triton.jit
def unit_and_norm(x):
    """Return x / |x|, the squared norm, the norm and 1 / norm, the norm kept away from zero; all but the first are [BN, 1]."""
    size = squared_norm(x)
    kept = tl.maximum(size, SMALLEST_SIZE)
    inverse = rsqrt(kept)
    # one step of Newton, to float32: sines and cosines are computed from the direction
    inverse = inverse * (1.5 - 0.5 * kept * inverse * inverse)
    return x * inverse, size, kept * inverse, inverse


@triton.jit
def norms(x):
    """Return squared norm, norm and 1 / norm, [BN, 1] each, the norm kept away from zero."""
    size = squared_norm(x)
    inverse = rsqrt(tl.maximum(size, SMALLEST_SIZE))
    return size, tl.maximum(size, SMALLEST_SIZE) * inverse, inverse


@triton.jit
def zero_query_feature(size, D: tl.constexpr):
    """Return 1 * D^-0.75 for a zero query, 0 from the smallest norm on."""
    full: tl.constexpr = D**-0.75
    return tl.maximum(1.0 - size * LARGEST_INVERSE_SIZE, 0.0) * full


@triton.jit
def load_parameters(param_ptr, offset, channels, D: tl.constexpr):
    """Load one parameter per channel, [1, BD]; 0 beyond the head."""
    return tl.load(param_ptr + offset + channels, mask=channels < D, other=0.0)[None, :]


@triton.jit
def as_type(x, TYPE: tl.constexpr):
    return x if TYPE is None else x.to(TYPE)


@triton.constexpr_function
def is_same_for_both(MAP):
    """True if queries and keys have the same features."""
    return MAP.startswith("reflection") or MAP in ("identity", "relu", "elu", "split", "softmax", "channel_softmax", "focused")


@triton.jit
def zero_masked(tile, ok):
    """Zero the rows that are not ok; None: all are."""
    if ok is not None:
        tile = tl.where(ok[:, None], tile, 0.0)
    return tile


@triton.jit
def shared_phi(x, ok, param_ptr, channels, alpha, D: tl.constexpr, MAP: tl.constexpr):
    """Return features of maps that are the same for queries, whose ok is None, and keys."""
    if MAP == "identity":
        a = x
        b = x
    elif MAP == "relu":
        a = tl.maximum(x, 0.0)
        b = a
    elif MAP == "elu":
        a = inside(zero_masked(elu_plus_one(x), ok), channels, D)
        b = a
    elif MAP == "split":
        a = tl.maximum(x, 0.0)
        b = tl.maximum(-x, 0.0)
    elif MAP == "softmax":
        a = zero_masked(softmax(x, channels[None, :] < D), ok)
        b = zero_masked(softmax(-x, channels[None, :] < D), ok)
    elif MAP == "channel_softmax":
        a = zero_masked(softmax(alpha * x, channels[None, :] < D), ok)
        b = zero_masked(softmax(-alpha * x, channels[None, :] < D), ok)
    elif MAP == "focused":
        a = zero_masked(focus(x, load_parameters(param_ptr, 0, channels, D), alpha), ok)
        b = a
    else:
        a = tl.maximum(
            reflect(x, load_parameters(param_ptr, 0, channels, D), load_parameters(param_ptr, D, channels, D), MAP), 0.0
        )
        b = a
    return a, b


@triton.jit
def phi_query(
    x,
    param_ptr,
    channels,
    norm_scale,
    alpha,
    D: tl.constexpr,
    MAP: tl.constexpr,
    STREAM: tl.constexpr,
    TYPE: tl.constexpr = None,
    factor=None,
):
    """Return features of a tile of queries for one stream, and the log2 of the factor that was divided out of each row.

    factor [BN, 1], positive, multiplies each row. TYPE: of an operand, float32 if None. An operand is undefined beyond the
    head, since the other one is zero there.
    """
    log_scale = tl.zeros([x.shape[0], 1], tl.float32)
    if is_same_for_both(MAP):
        a, b = shared_phi(x, None, param_ptr, channels, alpha, D, MAP)
    elif MAP == "norm_aware_split":
        size, norm, inverse = norms(x)
        p = tl.maximum(tl.load(param_ptr) + tl.load(param_ptr + 1) * tanh(norm_scale * norm), 1.0)
        # |u|^p as 2^(p log2|x| + p log2(1/norm)): the norm costs nothing per channel
        zero_query = zero_query_feature(size, D)
        if TYPE is None:
            magnitude = exp2(p * log2(x) + p * log2(inverse)) + zero_query
            a = inside(tl.where(x > 0, magnitude, zero_query), channels, D)
            b = inside(tl.where(x > 0, zero_query, magnitude), channels, D)
        else:
            rest = p * log2(inverse)
            if factor is not None:
                rest += log2(factor)
                zero_query *= factor
            a, b = halves(with_sign(exp2(p * unbounded_log2(x) + rest), x), TYPE)
            a += zero_query.to(TYPE)
            b += zero_query.to(TYPE)
    elif MAP == "norm_aware_cosine":
        unit, size, norm, inverse = unit_and_norm(x)
        p = tl.maximum(tl.load(param_ptr) + tl.load(param_ptr + 1) * tanh(norm_scale * norm), 1.0)
        magnitude = exp2(p * log2(unit))
        # [1 ; 0] rotated as the features are
        zero_query = zero_query_feature(size, D) * HALF_ROOT
        a, b, angle_slope = sides(alpha * unit)
        a = inside(magnitude * a + zero_query, channels, D)
        b = inside(magnitude * b + zero_query, channels, D)
    elif MAP == "polarity":
        p = load_parameters(param_ptr, 0, channels, D)
        log_size = p * log2(x * load_parameters(param_ptr, D, channels, D))
        log_scale = tl.maximum(tl.max(log_size, axis=1)[:, None] - LOG2_LARGEST, 0.0)
        magnitude = inside(exp2(log_size - log_scale), channels, D)
        a = tl.where((x > 0) == (STREAM == 0), magnitude, 0.0)
        b = tl.where((x > 0) == (STREAM == 0), 0.0, magnitude)
    elif MAP == "polarity_exp":
        up = LOG2_E * load_parameters(param_ptr, 2 * D * STREAM, channels, D)
        down = LOG2_E * load_parameters(param_ptr, 2 * D * STREAM + D, channels, D)
        signed = x if STREAM == 0 else -x
        up = up * tl.maximum(signed, 0.0)
        down = down * tl.maximum(-signed, 0.0)
        log_scale = tl.maximum(tl.max(tl.maximum(up, down), axis=1)[:, None] - LOG2_LARGEST, 0.0)
        a = expm1_base2(up, log_scale)
        b = expm1_base2(down, log_scale)
    if factor is not None and (TYPE is None or MAP != "norm_aware_split"):
        a = a * factor
        b = b * factor
    return as_type(a, TYPE), as_type(b, TYPE), log_scale


@triton.constexpr_function
def is_elementwise(MAP):
    """True if a feature of a key depends on its own channel alone."""
    return MAP in ("identity", "relu", "elu", "split", "norm_aware_split", "polarity", "polarity_exp")


@triton.constexpr_function
def is_unbounded(MAP):
    """True if features are divided by a scale, as with KernelSpec.is_guarded."""
    return MAP in ("polarity", "polarity_exp")


@triton.jit
def key_excess(x, param_ptr, channels, D: tl.constexpr, MAP: tl.constexpr):
    """Return log2 of how far the largest key feature of a tile exceeds what float32 sums should hold; 0 for bounded maps."""
    if MAP == "polarity":
        log_size = load_parameters(param_ptr, 0, channels, D) * log2(x * load_parameters(param_ptr, D, channels, D))
        excess = tl.maximum(tl.max(log_size) - LOG2_LARGEST, 0.0)
    elif MAP == "polarity_exp":
        excess = tl.maximum(tl.max(LOG2_E * tl.abs(x)) - LOG2_LARGEST, 0.0)
    else:
        excess = 0.0
    return excess


@triton.jit
def phi_key(
    x,
    ok,
    param_ptr,
    channels,
    log_scale,
    alpha,
    D: tl.constexpr,
    MAP: tl.constexpr,
    CUBE: tl.constexpr,
    TYPE: tl.constexpr = None,
):
    """Return features of a tile of keys times 2^-log_scale (times 2^-KEY_SHIFT for norm-aware keys); ok [BN]: visible rows."""
    if is_same_for_both(MAP):
        a, b = shared_phi(x, ok, param_ptr, channels, alpha, D, MAP)
    elif MAP == "norm_aware_split":
        if CUBE:
            small = x * KEY_UNIT
            a, b = halves(small * small * small, TYPE)
        else:
            magnitude = exp2(tl.load(param_ptr + 2) * log2(x) - KEY_SHIFT)
            a = tl.where(x > 0, magnitude, 0.0)
            b = tl.where(x > 0, 0.0, magnitude)
    elif MAP == "norm_aware_cosine":
        unit, size, norm, inverse = unit_and_norm(x)
        magnitude = exp2(tl.load(param_ptr + 2) * log2(x) - KEY_SHIFT)
        a, b, angle_slope = sides(alpha * unit)
        a *= magnitude
        b *= magnitude
    elif MAP == "polarity":
        log_size = load_parameters(param_ptr, 0, channels, D) * log2(x * load_parameters(param_ptr, D, channels, D))
        magnitude = inside(exp2(log_size - log_scale), channels, D)
        a = tl.where(x > 0, magnitude, 0.0)
        b = tl.where(x > 0, 0.0, magnitude)
    elif MAP == "polarity_exp":
        a = expm1_base2(LOG2_E * tl.maximum(x, 0.0), log_scale)
        b = expm1_base2(LOG2_E * tl.maximum(-x, 0.0), log_scale)
    return as_type(a, TYPE), as_type(b, TYPE)
