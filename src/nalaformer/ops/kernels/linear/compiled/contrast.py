"""Compute the contrast out + z (out - mean v) of bidirectional attention, z = contrast / n * phi_q . sum_j phi_k.

With den = phi_q . sum_j phi_k + eps n, o = num / den and out = (1 + z) o - z m, the gradient of num is dout times
w = (1 + z) / den, which replaces 1 / den; that of den is w times

    drop = -(dout . o) + (c / w) (dout . o - dout . m),     c = contrast / n

and the gradient of the mean value m is -sum_i z_i dout_i. The rest of the backward pass is that of attention.

Outputs may lie near the mean, and z magnifies the rounding of their distance. Without rotary that distance is read from
sums that never contained the mean: with C = S - z_sum m and c = phi_q . C / den,

    out = (1 + z) c + m (phi_q . z_sum - z eps n) / den
"""

import triton
import triton.language as tl

from ...common.compiled.fastmath import constant

# as in ops.contrast
LARGEST_CONTRAST_SCALE = constant(1e12)


@triton.constexpr_function
def sums_size(D, V, PARTS, CONTRAST):
    """Return the elements of a sample and head: S, z, count and, for a contrast, the sum of the values."""
    return PARTS * D * (V + 2) + (V if CONTRAST else 0)


@triton.jit
def load_value_sum(ptr, D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, CONTRAST: tl.constexpr):
    """Load the sum of the values behind the sums of a sample and head, [BV]; zeros without a contrast."""
    value_sum = tl.zeros([BV], tl.float32)
    if CONTRAST:
        columns = tl.arange(0, BV)
        value_sum = tl.load(ptr + PARTS * D * (V + 2) + columns, mask=columns < V, other=0.0)
    return value_sum


@triton.jit
def store_value_sum(ptr, value_sum, D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr):
    columns = tl.arange(0, BV)
    tl.store(ptr + PARTS * D * (V + 2) + columns, value_sum, mask=columns < V)


@triton.jit
def without_mean(s, z, mean, CENTRED: tl.constexpr):
    """Return C = S - z m where CENTRED, else S; [BD, BV]."""
    if CENTRED:
        s -= z[:, None] * mean[None, :]
    return s


@triton.jit
def add_contrast(out, mean, contrast_scale, score, inverse, eps_count, CENTRED: tl.constexpr):
    """Apply the formulas above to o or, if CENTRED, to c; score = phi_q . z_sum, inverse = 1 / den."""
    if CENTRED:
        out = out * (1.0 + contrast_scale) + mean[None, :] * (inverse * (score - contrast_scale * eps_count))
    else:
        out += contrast_scale * (out - mean[None, :])
    return out


@triton.jit
def to_contrast_scale(inverse, per_score, eps_count):
    """Return z of rows, from 1 / den, [BN, 1]; rows that do not exist have a 1 / den of 0."""
    den = 1.0 / tl.where(inverse == 0.0, 1.0, inverse)
    return tl.minimum(per_score * (den - eps_count), LARGEST_CONTRAST_SCALE)


@triton.jit
def drop_with_contrast(drop, along_mean, contrast_scale, factor, per_score):
    """Return the drop above, from drop = -(1 + z) dout . o, along_mean = dout . m and factor = w."""
    drop = drop / (1.0 + contrast_scale)
    # a clamped scale has no gradient; rows that do not exist have a factor of 0
    share = tl.where(contrast_scale < LARGEST_CONTRAST_SCALE, per_score, 0.0) / tl.where(factor == 0.0, 1.0, factor)
    return drop - share * (drop + along_mean)
