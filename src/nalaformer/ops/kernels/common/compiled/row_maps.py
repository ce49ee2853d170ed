"""Compute maps whose channels depend on each other: focus, softmax of both signs, reflections. A tile has one row per token.

feature_maps has the formulas, and maps.py describes a tile. Parameters come as rows [1, BD], 0 beyond the head.
"""

import triton
import triton.language as tl

from .fastmath import constant, exp2, log2

LOG2_E = constant(1.4426950408889634)
# the number that feature_maps.focused adds to relu(x)
SMALLEST = constant(1e-6)


@triton.jit
def over_peak(x, inverse):
    """Return (relu(x) + 1e-6) * inverse divided by its largest channel, and that: powers neither overflow nor underflow."""
    y = (tl.maximum(x, 0.0) + SMALLEST) * inverse
    peak = tl.max(y, axis=1)[:, None]
    return y / peak, peak


@triton.jit
def focus(x, inverse, power):
    """Return y^p |y| / |y^p| with y = (relu(x) + 1e-6) * inverse."""
    y, peak = over_peak(x, inverse)
    powered = exp2(power * log2(y))
    return powered * (peak * tl.sqrt(tl.sum(y * y, axis=1) / tl.sum(powered * powered, axis=1))[:, None])


@triton.jit
def focus_gradient(x, inverse, power, da):
    """Return dx and the gradient of `inverse` per row."""
    y, peak = over_peak(x, inverse)
    powered = exp2(power * log2(y))
    # beyond the head da is undefined, and these weights are 0
    da = tl.where(inverse > 0, da, 0.0)
    size = tl.sum(y * y, axis=1)[:, None]
    powered_size = tl.sum(powered * powered, axis=1)[:, None]
    along = tl.sum(da * powered, axis=1)[:, None]
    # multiplied by y, so that the derivative of the power is the power itself
    dy_y = (da - along / powered_size * powered) * powered * (power * tl.sqrt(size / powered_size))
    dy_y += y * y * (along / tl.sqrt(size * powered_size))
    dy = dy_y / tl.where(inverse > 0, y, 1.0)
    return tl.where(x > 0, dy * inverse, 0.0), dy * (tl.maximum(x, 0.0) + SMALLEST)


@triton.jit
def softmax(x, in_head):
    x = tl.where(in_head, x, float("-inf"))
    x = exp2(LOG2_E * (x - tl.max(x, axis=1)[:, None]))
    return x / tl.sum(x, axis=1)[:, None]


@triton.jit
def softmax_gradient(y, dy, in_head):
    dy = tl.where(in_head, dy, 0.0)
    return y * (dy - tl.sum(y * dy, axis=1)[:, None])


@triton.jit
def signed_softmax_gradient(x, da, db, in_head):
    return softmax_gradient(softmax(x, in_head), da, in_head) - softmax_gradient(softmax(-x, in_head), db, in_head)


@triton.jit
def to_pairs(x):
    """Reshape to channels 2i and 2i+1 side by side, [BN, BD / 2, 2]."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2])


@triton.jit
def from_pairs(pairs):
    return tl.reshape(pairs, [pairs.shape[0], 2 * pairs.shape[1]])


@triton.jit
def swap_pairs(pairs):
    """Return for each channel the other one of its pair.

    It is the xor of both without its own bits. Triton 3.6 miscompiles split and join, which would be clearer, in small tiles.
    """
    bits = pairs.to(tl.int32, bitcast=True)
    return (bits ^ tl.xor_sum(bits, axis=2, keep_dims=True)).to(tl.float32, bitcast=True)


@triton.jit
def minus_and_plus():
    """Return -1 for the first channel of a pair, 1 for the second; [1, 1, 2]."""
    return (2 * tl.arange(0, 2) - 1).to(tl.float32)[None, None, :]


@triton.jit
def across_heads(x, normal):
    """Return x - 2 (x . n) n, which is its own inverse and transpose."""
    return x - 2.0 * tl.sum(x * normal, axis=1)[:, None] * normal


@triton.jit
def in_pairs(x, rotations):
    """Apply [[-c, -s], [-s, c]] to each channel pair, its own inverse and transpose; `rotations` alternates c and s."""
    pairs = to_pairs(x)
    own = to_pairs(rotations)
    other = swap_pairs(own)
    is_first = minus_and_plus() < 0
    c = tl.where(is_first, own, other)
    s = tl.where(is_first, other, own)
    return from_pairs(minus_and_plus() * c * pairs - s * swap_pairs(pairs))


@triton.jit
def reflect(x, normal, rotations, MAP: tl.constexpr):
    if MAP != "reflection_in_pairs":
        x = across_heads(x, normal)
    if MAP != "reflection_across":
        x = in_pairs(x, rotations)
    return x


@triton.jit
def reflect_gradient(x, normal, rotations, dy, MAP: tl.constexpr):
    """Return dx, and per row the gradients of `normal` and of `rotations`; dy is zero beyond the head."""
    dnormal = tl.zeros_like(x)
    dturns = tl.zeros_like(x)
    if MAP != "reflection_across":
        pairs = to_pairs(across_heads(x, normal) if MAP == "reflection" else x)
        other = swap_pairs(pairs)
        dpairs = to_pairs(dy)
        dother = swap_pairs(dpairs)
        is_first = minus_and_plus() < 0
        dturns = from_pairs(tl.where(is_first, dother * other - dpairs * pairs, -dpairs * other - dother * pairs))
        dy = in_pairs(dy, rotations)
    if MAP != "reflection_in_pairs":
        along = tl.sum(dy * normal, axis=1)[:, None]
        dnormal = -2.0 * (tl.sum(x * normal, axis=1)[:, None] * dy + along * x)
        dy = dy - 2.0 * along * normal
    return dy, dnormal, dturns
