"""Compute GELU, x * Phi(x) with the normal distribution Phi, as torch's without an approximation."""

import triton
import triton.language as tl

from ...common.compiled.fastmath import exp2, reciprocal


@triton.jit
def tail_and_bell(x):
    """Return Phi(-|x|) and exp(-x^2 / 2).

    erfc is formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions, with an error of at most 1.5e-7. Its
    two special instructions cost less than the library's erf.
    """
    bell = exp2(x * x * -0.7213475204444817)
    t = reciprocal(1.0 + 0.2316418882 * tl.abs(x))
    polynomial = 0.5 * 1.061405429 * t - 0.5 * 1.453152027
    polynomial = polynomial * t + 0.5 * 1.421413741
    polynomial = polynomial * t - 0.5 * 0.284496736
    polynomial = polynomial * t + 0.5 * 0.254829592
    return polynomial * t * bell, bell


@triton.jit
def gelu(x):
    tail, _ = tail_and_bell(x)
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def gelu_and_slope(x):
    """Return GELU, and its derivative Phi(x) + x * bell(x) / sqrt(2 pi)."""
    tail, bell = tail_and_bell(x)
    share = tl.where(x < 0, tail, 1.0 - tail)
    return x * share, share + x * bell * 0.3989422804014327
