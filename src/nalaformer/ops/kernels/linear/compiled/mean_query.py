"""Compute weights of keys by the mean query (RALA), inside the kernels that read the keys anyway.

With r = D^-1/2 mean_i phi(q_i), p_j = r . phi(k_j) and w_j = exp(p_j), keys weigh n w_j / sum_j w_j. The kernels skip
n / sum_j w_j: it cancels between numerator and denominator, and in eps n, which becomes eps sum_j w_j. With g_j the gradient of
w_j phi(k_j), the gradient of a product is

    dp_j = w_j phi(k_j) . g_j  -  w_j / sum_j w_j * c,     c = sum_j w_j phi(k_j) . g_j = S . dS + z . dz

so c is known before any key is read, the same pass sums dr = sum_j dp_j phi(k_j), and queries come last.

It supports maps without parameters that are the same for queries and keys, with features >= 0.
"""

import triton
import triton.language as tl

from ...common.compiled.fastmath import constant
from ...common.compiled.maps import LOG2_E, shared_phi
from ...common.compiled.tiles import load_both_sums, load_rows, program_index, visible_rows

# as in ops.key_weight
LARGEST_FEATURE = constant(1e17)
NEARLY_ALL = constant(1.0 - 2.0**-20)
# splits whose sums are loaded together
AT_ONCE = constant(32)


@triton.jit
def bounded_features(x, ok, channels, D: tl.constexpr, MAP: tl.constexpr):
    """Return phi(x), clamped so that its products stay finite, 0 in rows that are not ok; maps of one part return it twice."""
    # these maps have no parameters, so the pointer is never read
    a, b = shared_phi(x.to(tl.float32), ok, None, channels, 0.0, D, MAP)
    return tl.minimum(a, LARGEST_FEATURE), tl.minimum(b, LARGEST_FEATURE)


@triton.jit
def has_slope(x):
    """True if a feature was not clamped."""
    return tl.abs(x) < LARGEST_FEATURE


@triton.jit
def product_with_mean(a, b, mean_a, mean_b, PARTS: tl.constexpr):
    """Return log2 of exp(r . phi(k_j)), [BN, 1]."""
    # no factor comes after the sum: fused with the difference from the largest product, it would keep its rounding there
    product = tl.minimum(a, LARGEST_FEATURE) * (mean_a * LOG2_E)
    if PARTS == 2:
        product += tl.minimum(b, LARGEST_FEATURE) * (mean_b * LOG2_E)
    return tl.sum(product, axis=1)[:, None]


@triton.jit
def store_row(ptr, a, b, channels, D: tl.constexpr, PARTS: tl.constexpr):
    """Store a and b [*, BD], summed over their rows."""
    tl.store(ptr + channels, tl.sum(a, axis=0), mask=channels < D)
    if PARTS == 2:
        tl.store(ptr + D + channels, tl.sum(b, axis=0), mask=channels < D)


@triton.jit
def sum_rows(ptr, splits, SIZE: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Return elements FIRST .. FIRST + D - 1 of this program's row in [splits, rows, SIZE], summed over the splits, [1, BD]."""
    channels = tl.arange(0, BD)
    steps = tl.arange(0, AT_ONCE)
    total = tl.zeros([AT_ONCE, BD], tl.float32)
    for first in range(0, splits, AT_ONCE):
        place = tl.cast(first + steps, tl.int64) * tl.num_programs(1) + tl.program_id(1)
        ok = (first + steps < splits)[:, None] & (channels < D)[None, :]
        total += tl.load(ptr + place[:, None] * SIZE + (FIRST + channels)[None, :], mask=ok, other=0.0)
    return tl.sum(total, axis=0)[None, :]


@triton.jit
def mean_from_sums(ptr, splits, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr):
    """Return r in one or two parts, [1, BD], and D^-1/2 / n, from the output of query_sums_kernel."""
    SIZE: tl.constexpr = PARTS * D + 1
    SCALE: tl.constexpr = D**-0.5
    share = SCALE / tl.maximum(tl.sum(sum_rows(ptr, splits, SIZE, SIZE - 1, 1, 16)), 1.0)
    mean_a = sum_rows(ptr, splits, SIZE, 0, D, BD) * share
    mean_b = mean_a
    if PARTS == 2:
        mean_b = sum_rows(ptr, splits, SIZE, D, D, BD) * share
    return mean_a, mean_b, share


@triton.jit
def store_mean(ptr, mean_a, mean_b, share, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr):
    """Store the mean for the backward pass, in this program's row of [rows, PARTS * D + 1]."""
    ptr += tl.cast(tl.program_id(1), tl.int64) * (PARTS * D + 1)
    store_row(ptr, mean_a, mean_b, tl.arange(0, BD), D, PARTS)
    tl.store(ptr + PARTS * D, share)


@triton.jit
def load_mean(ptr, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr):
    """Load the parts of the mean, [1, BD] each; a single part is returned twice."""
    ptr += tl.cast(tl.program_id(1), tl.int64) * (PARTS * D + 1)
    channels = tl.arange(0, BD)
    mean_a = tl.load(ptr + channels, mask=channels < D, other=0.0)[None, :]
    mean_b = mean_a
    if PARTS == 2:
        mean_b = tl.load(ptr + D + channels, mask=channels < D, other=0.0)[None, :]
    return mean_a, mean_b


@triton.jit
def mean_gradient(mean_ptr, dmean_ptr, splits, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr):
    """Return the gradient of each query's features: D^-1/2 / n dr, [1, BD] for each part."""
    share = tl.load(mean_ptr + tl.cast(tl.program_id(1), tl.int64) * (PARTS * D + 1) + PARTS * D)
    row_a = sum_rows(dmean_ptr, splits, PARTS * D, 0, D, BD) * share
    row_b = row_a
    if PARTS == 2:
        row_b = sum_rows(dmean_ptr, splits, PARTS * D, D, D, BD) * share
    return row_a, row_b


@triton.jit
def along_sums(
    ptr, ds_a, ds_b, dz_a, dz_b, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr
):
    """Return c / sum_j w_j, from the sums at ptr and their gradients."""
    s_a, s_b, z_a, z_b = load_both_sums(ptr, D, V, BD, BV, PARTS)
    total = tl.sum(tl.sum(s_a * ds_a, axis=1) + z_a * dz_a)
    if PARTS == 2:
        total += tl.sum(tl.sum(s_b * ds_b, axis=1) + z_b * dz_b)
    weights = tl.load(ptr + V + 1)
    return total / tl.where(weights == 0.0, 1.0, weights)


@triton.jit
def query_sums_kernel(
    x_ptr,  # [B, N, H, D]
    mask_ptr,  # [B, N] uint8
    sums_ptr,  # [splits, B * H, PARTS * D + 1]
    num_tokens,
    heads,
    split_size,
    stride_b,
    stride_n,
    stride_h,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_QUERY_MASK: tl.constexpr,
    AHEAD: tl.constexpr,  # stages of the loop: without a product in it, Triton reads ahead only with this hint
):
    """Compute sum_i phi(x_i) over a split of visible tokens, and count them."""
    sample = tl.cast(tl.program_id(1) // heads, tl.int64)
    x_ptr += sample * stride_b + (tl.program_id(1) % heads) * stride_h
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, num_tokens)
    channels = tl.arange(0, BD)
    rows = tl.arange(0, BN)
    sum_a = tl.zeros([BN, BD], tl.float32)
    sum_b = sum_a
    count = tl.zeros([BN], tl.float32)
    for first in tl.range(start, stop, BN, num_stages=AHEAD):
        ok = visible_rows(mask_ptr + sample * num_tokens, first, rows, rows < stop - first, HAS_QUERY_MASK)
        x = load_rows(x_ptr, first, rows, ok, channels, channels < D, stride_n)
        a, b = bounded_features(x, ok, channels, D, MAP)
        sum_a += a
        if PARTS == 2:
            sum_b += b
        count += ok.to(tl.float32)
    ptr = sums_ptr + program_index() * (PARTS * D + 1)
    store_row(ptr, sum_a, sum_b, channels, D, PARTS)
    tl.store(ptr + PARTS * D, tl.sum(count))
