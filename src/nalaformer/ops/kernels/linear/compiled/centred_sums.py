"""Compute the sums without the part of the mean value; bidirectional_gradient.py explains why."""

import triton
import triton.language as tl

from ...common.compiled.tiles import load_both_sums


@triton.jit
def grows(c, z, mean):
    """Return 1 where an element of c is more than twice what it was before z m was subtracted, else 0."""
    return (tl.abs(c) > 2.0 * tl.abs(c + z[:, None] * mean[None, :])).to(tl.int32)


@triton.jit
def centred_sums(
    ptr,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Return C = S - z m of both parts, [BD, BV]; z of both parts, [BD]; and m, [BV].

    m is 0 unless CENTRED, and in columns where it would make C larger than S: there the values that queries see have no such
    mean, and C would round worse than S.
    """
    s_a, s_b, z_a, z_b = load_both_sums(ptr, D, V, BD, BV, PARTS)
    mean = tl.zeros([BV], tl.float32)
    if CENTRED:
        mean = tl.sum(s_a, axis=0)
        size = tl.sum(z_a)
        if PARTS == 2:
            mean += tl.sum(s_b, axis=0)
            size += tl.sum(z_b)
        mean = mean / tl.where(size == 0.0, 1.0, size)
        s_a -= z_a[:, None] * mean[None, :]
        s_b -= z_b[:, None] * mean[None, :]
        worse = tl.max(grows(s_a, z_a, mean), axis=0)
        if PARTS == 2:
            worse += tl.max(grows(s_b, z_b, mean), axis=0)
        # added again where it makes C larger
        wrong = tl.where(worse > 0, mean, 0.0)
        mean -= wrong
        s_a += z_a[:, None] * wrong[None, :]
        s_b += z_b[:, None] * wrong[None, :]
    return s_a, s_b, z_a, z_b, mean
