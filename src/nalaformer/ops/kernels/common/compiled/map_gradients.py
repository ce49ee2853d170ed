"""Compute gradients of the feature maps in registers; maps.py has their values and describes a tile."""

import triton
import triton.language as tl

from .fastmath import exp2, log2
from .maps import (
    KEY_SHIFT,
    KEY_UNIT,
    LN_2,
    LOG2_E,
    LOG2_LARGEST,
    SMALLEST_SIZE,
    inside,
    is_same_for_both,
    load_parameters,
    norms,
    phi_query,
    sides,
    tanh,
    unit_and_norm,
)
from .row_maps import focus_gradient, reflect, reflect_gradient, signed_softmax_gradient


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def power_gradient(x, p, inverse, log_y, log_scale, dmagnitude):
    """Return dx, dp and d inverse of magnitude = y^p 2^-log_scale with y = |x| * inverse."""
    dy = dmagnitude * p * exp2((p - 1.0) * log_y - log_scale)
    dp = dmagnitude * exp2(p * log_y - log_scale) * log_y * LN_2
    return sign(x) * dy * inverse, dp, dy * tl.abs(x)


@triton.jit
def reflected_relu_gradient(x, da, param_ptr, channels, D: tl.constexpr, MAP: tl.constexpr):
    normal = load_parameters(param_ptr, 0, channels, D)
    rotations = load_parameters(param_ptr, D, channels, D)
    dy = tl.where(reflect(x, normal, rotations, MAP) > 0, da, 0.0)
    return reflect_gradient(x, normal, rotations, dy, MAP)


@triton.jit
def power_below(p, log_x, log_inverse):
    """Return |u|^(p-1) of a norm-aware query: times |u| it is the feature, times p its derivative."""
    return exp2((p - 1.0) * log_x + (p - 1.0) * log_inverse)


@triton.constexpr_function
def is_one_sided(MAP):
    """True if a channel uses the gradient of only one half: da where x > 0, else -db."""
    return MAP in ("split", "norm_aware_split")


@triton.jit
def along_query(
    x, da, db, param_ptr, channels, norm_scale, alpha, zero_query_sum, D: tl.constexpr, MAP: tl.constexpr, PARTS: tl.constexpr
):
    """Sum da and db times the query features of one stream over each row, [BN, 1]; zero_query_sum is that for small norms."""
    if MAP == "norm_aware_split":
        # in the form of phi_query_gradient, so that the power is computed once
        size, norm, inverse = norms(x)
        p = tl.maximum(tl.load(param_ptr) + tl.load(param_ptr + 1) * tanh(norm_scale * norm), 1.0)
        signed = inside(tl.where(x > 0, da, -db), channels, D)
        total = tl.sum(signed * power_below(p, log2(x), log2(inverse)) * x, axis=1)[:, None] * inverse
        total = tl.where(size < SMALLEST_SIZE, zero_query_sum, total)
    else:
        a, b, log_scale = phi_query(x, param_ptr, channels, norm_scale, alpha, D, MAP, 0)
        both = a * da
        if PARTS == 2:
            both += b * db
        total = tl.sum(both, axis=1)[:, None]
    return total


@triton.jit
def shared_phi_gradient(x, da, db, param_ptr, channels, alpha, D: tl.constexpr, MAP: tl.constexpr):
    """Compute what phi_query_gradient returns, for maps that are the same for queries and keys."""
    g0 = tl.zeros_like(x)
    g1 = tl.zeros_like(x)
    if MAP == "identity":
        dx = da
    elif MAP == "relu":
        dx = tl.where(x > 0, da, 0.0)
    elif MAP == "elu":
        dx = da * tl.where(x > 0, 1.0, exp2(LOG2_E * tl.minimum(x, 0.0)))
    elif MAP == "split":
        dx = tl.where(x > 0, da, tl.where(x < 0, -db, 0.0))
    elif MAP == "softmax":
        dx = signed_softmax_gradient(x, da, db, channels[None, :] < D)
    elif MAP == "channel_softmax":
        dx = alpha * signed_softmax_gradient(alpha * x, da, db, channels[None, :] < D)
    elif MAP == "focused":
        dx, g0 = focus_gradient(x, load_parameters(param_ptr, 0, channels, D), alpha, da)
    else:
        dx, g0, g1 = reflected_relu_gradient(x, da, param_ptr, channels, D, MAP)
    return dx, g0, g1


@triton.jit
def phi_query_gradient(
    x, da, db, param_ptr, channels, norm_scale, alpha, D: tl.constexpr, MAP: tl.constexpr, STREAM: tl.constexpr
):
    """Return the gradient of one stream's query features: dx, and g0, g1 [BN, BD] of up to two parameters per channel.

    da, db belong to the features after division by 2^log_scale, as phi_query returns them, and are undefined beyond the head.
    norm_aware puts the gradients of base and slope into column 0 of g0 and g1.
    """
    g0 = tl.zeros_like(x)
    g1 = tl.zeros_like(x)
    if is_same_for_both(MAP):
        dx, g0, g1 = shared_phi_gradient(x, da, db, param_ptr, channels, alpha, D, MAP)
    elif MAP == "norm_aware_split":
        size, norm, inverse = norms(x)
        slope = tl.load(param_ptr + 1)
        tanh_norm = tanh(norm_scale * norm)
        raw = tl.load(param_ptr) + slope * tanh_norm
        p = tl.maximum(raw, 1.0)
        log_x = log2(x)
        log_inverse = log2(inverse)
        # |u|^(p-1) with the sign and the gradient of its channel; p and the norm are the same in a row and follow its sums
        signed = inside(tl.where(x > 0, da, -db), channels, D)
        dlength = signed * power_below(p, log_x, log_inverse)
        along = dlength * x
        total = tl.sum(along, axis=1)[:, None] * inverse
        dp = (tl.sum(along * log_x, axis=1)[:, None] * inverse + total * log_inverse) * LN_2
        dp = tl.where(raw > 1.0, dp, 0.0)
        dnorm = dp * slope * norm_scale * (1.0 - tanh_norm * tanh_norm) - total * p * inverse
        # a zero query has a zero gradient: with a power of 1 the slope is not 0 by itself
        dx = dlength * tl.where(size > 0, p * inverse, 0.0) + x * (tl.where(size > SMALLEST_SIZE, dnorm, 0.0) * inverse)
        g0 = tl.where(channels[None, :] == 0, dp, 0.0)
        g1 = tl.where(channels[None, :] == 0, dp * tanh_norm, 0.0)
    elif MAP == "norm_aware_cosine":
        unit, size, norm, inverse = unit_and_norm(x)
        slope = tl.load(param_ptr + 1)
        tanh_norm = tanh(norm_scale * norm)
        raw = tl.load(param_ptr) + slope * tanh_norm
        p = tl.maximum(raw, 1.0)
        length = tl.abs(unit)
        log_length = log2(length)
        # |u|^(p-1): times |u| it is the feature, times p its derivative
        below = exp2((p - 1.0) * log_length)
        a, b, angle_slope = sides(alpha * unit)
        dmagnitude = inside(da * a + db * b, channels, D)
        dangle = inside(da * b - db * a, channels, D) * below * length
        dunit = tl.where(x > 0, dmagnitude, -dmagnitude) * (p * below)
        dunit += dangle * alpha * angle_slope
        dp = tl.sum(dmagnitude * (below * length) * log_length, axis=1)[:, None] * LN_2
        dp = tl.where(raw > 1.0, dp, 0.0)
        dnorm = dp * slope * norm_scale * (1.0 - tanh_norm * tanh_norm) - tl.sum(dunit * unit, axis=1)[:, None] * inverse
        dx = dunit * tl.where(size > 0, inverse, 0.0) + tl.where(size > SMALLEST_SIZE, dnorm, 0.0) * unit
        g0 = tl.where(channels[None, :] == 0, dp, 0.0)
        g1 = tl.where(channels[None, :] == 0, dp * tanh_norm, 0.0)
    elif MAP == "polarity":
        p = load_parameters(param_ptr, 0, channels, D)
        inverse = load_parameters(param_ptr, D, channels, D)
        log_y = log2(x * inverse)
        log_scale = tl.maximum(tl.max(p * log_y, axis=1)[:, None] - LOG2_LARGEST, 0.0)
        dmagnitude = tl.where((x > 0) == (STREAM == 0), da, db)
        dx, g0, g1 = power_gradient(x, p, inverse, log_y, log_scale, dmagnitude)
    elif MAP == "polarity_exp":
        up = load_parameters(param_ptr, 2 * D * STREAM, channels, D)
        down = load_parameters(param_ptr, 2 * D * STREAM + D, channels, D)
        signed = x if STREAM == 0 else -x
        positive = tl.maximum(signed, 0.0)
        negative = tl.maximum(-signed, 0.0)
        largest = tl.max(LOG2_E * tl.maximum(up * positive, down * negative), axis=1)[:, None]
        log_scale = tl.maximum(largest - LOG2_LARGEST, 0.0)
        g0 = da * exp2(LOG2_E * up * positive - log_scale)
        g1 = db * exp2(LOG2_E * down * negative - log_scale)
        dsigned = tl.where(signed > 0, g0 * up, tl.where(signed < 0, -g1 * down, 0.0))
        dx = dsigned if STREAM == 0 else -dsigned
        g0 = g0 * positive
        g1 = g1 * negative
    return dx, g0, g1


@triton.jit
def phi_key_gradient(x, da, db, param_ptr, channels, log_scale, alpha, D: tl.constexpr, MAP: tl.constexpr, CUBE: tl.constexpr):
    """Return the gradient of the key features, as phi_query_gradient; norm_aware puts the gradient of the key power into g0."""
    g0 = tl.zeros_like(x)
    g1 = tl.zeros_like(x)
    if is_same_for_both(MAP):
        dx, g0, g1 = shared_phi_gradient(x, da, db, param_ptr, channels, alpha, D, MAP)
    elif MAP == "norm_aware_split" or MAP == "norm_aware_cosine":
        p = tl.load(param_ptr + 2)
        if CUBE:
            small = x * KEY_UNIT
            slope = 3.0 * KEY_UNIT * small * small
        else:
            slope = p * exp2((p - 1.0) * log2(x) - KEY_SHIFT)
        if MAP == "norm_aware_split":
            dmagnitude = tl.where(x > 0, da, -db)  # with the sign of |x|'
            dx = dmagnitude * slope
        else:
            unit, size, norm, inverse = unit_and_norm(x)
            a, b, angle_slope = sides(alpha * unit)
            magnitude = exp2(p * log2(x) - KEY_SHIFT)
            dmagnitude = sign(x) * (da * a + db * b)
            dunit = magnitude * (da * b - db * a) * alpha * angle_slope
            dunit = inside(dunit, channels, D)
            along = tl.sum(dunit * unit, axis=1)[:, None]
            dx = dmagnitude * slope + (dunit - tl.where(size > SMALLEST_SIZE, along, 0.0) * unit) * inverse
        if not CUBE:
            log_length = log2(x)
            dp = inside(sign(x) * dmagnitude, channels, D) * exp2(p * log_length - KEY_SHIFT) * log_length
            g0 = tl.where(channels[None, :] == 0, tl.sum(dp, axis=1)[:, None] * LN_2, 0.0)
    elif MAP == "polarity":
        p = load_parameters(param_ptr, 0, channels, D)
        inverse = load_parameters(param_ptr, D, channels, D)
        dx, g0, g1 = power_gradient(x, p, inverse, log2(x * inverse), log_scale, tl.where(x > 0, da, db))
    elif MAP == "polarity_exp":
        up = da * exp2(LOG2_E * tl.maximum(x, 0.0) - log_scale)
        down = db * exp2(LOG2_E * tl.maximum(-x, 0.0) - log_scale)
        dx = tl.where(x > 0, up, tl.where(x < 0, -down, 0.0))
    return dx, g0, g1
