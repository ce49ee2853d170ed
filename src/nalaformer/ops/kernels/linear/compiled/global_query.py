"""Compute the mean query of RALA and its products with keys, and their gradients: each tensor is read once.

It supports maps without parameters that are the same for queries and keys, with features >= 0.
"""

import triton
import triton.language as tl

from ...common.compiled.map_gradients import shared_phi_gradient
from ...common.compiled.tiles import load_per_row, load_rows, program_index, store_per_row, store_rows, visible_rows
from .mean_query import LARGEST_FEATURE, bounded_features, store_row


@triton.jit
def load_row(ptr, channels, D: tl.constexpr, PARTS: tl.constexpr):
    """Load the parts of a row [PARTS, D], each [1, BD]; a single part is returned twice."""
    a = tl.load(ptr + channels, mask=channels < D, other=0.0)[None, :]
    b = a
    if PARTS == 2:
        b = tl.load(ptr + D + channels, mask=channels < D, other=0.0)[None, :]
    return a, b


@triton.jit
def feature_sums_kernel(
    x_ptr,  # [B, N, H, D]
    mask_ptr,  # [B, N] uint8
    sums_ptr,  # [splits, B * H, PARTS, D]
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
    HAS_MASK: tl.constexpr,
):
    """Compute sum_i phi(x_i) over a split of visible tokens."""
    sample = tl.cast(tl.program_id(1) // heads, tl.int64)
    x_ptr += sample * stride_b + (tl.program_id(1) % heads) * stride_h
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, num_tokens)
    channels = tl.arange(0, BD)
    rows = tl.arange(0, BN)
    sum_a = tl.zeros([BN, BD], tl.float32)
    sum_b = tl.zeros([BN, BD], tl.float32)
    for first in range(start, stop, BN):
        ok = visible_rows(mask_ptr + sample * num_tokens, first, rows, rows < stop - first, HAS_MASK)
        x = load_rows(x_ptr, first, rows, ok, channels, channels < D, stride_n)
        a, b = bounded_features(x, ok, channels, D, MAP)
        sum_a += a
        sum_b += b
    store_row(sums_ptr + program_index() * (PARTS * D), sum_a, sum_b, channels, D, PARTS)


@triton.jit
def feature_products_kernel(
    x_ptr,  # [B, N, H, D]
    mask_ptr,  # [B, N] uint8
    row_ptr,  # [B * H, PARTS, D]
    out_ptr,  # [B, H, N]
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
    HAS_MASK: tl.constexpr,
):
    """Compute phi(x_i) . row of each token; 0 for masked ones."""
    sample = tl.cast(tl.program_id(1) // heads, tl.int64)
    place = tl.cast(tl.program_id(1), tl.int64)
    x_ptr += sample * stride_b + (tl.program_id(1) % heads) * stride_h
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, num_tokens)
    channels = tl.arange(0, BD)
    rows = tl.arange(0, BN)
    row_a, row_b = load_row(row_ptr + place * (PARTS * D), channels, D, PARTS)
    for first in range(start, stop, BN):
        exists = rows < stop - first
        ok = visible_rows(mask_ptr + sample * num_tokens, first, rows, exists, HAS_MASK)
        x = load_rows(x_ptr, first, rows, ok, channels, channels < D, stride_n)
        a, b = bounded_features(x, ok, channels, D, MAP)
        product = a * row_a
        if PARTS == 2:
            product += b * row_b
        store_per_row(out_ptr + place * num_tokens, tl.sum(product, axis=1)[:, None], first, rows, exists)


@triton.jit
def feature_gradient_kernel(
    x_ptr,  # [B, N, H, D]
    mask_ptr,  # [B, N] uint8
    row_ptr,  # [B * H, PARTS, D]
    number_ptr,  # [B, H, N]
    dx_ptr,  # [B, N, H, D]
    sums_ptr,  # [splits, B * H, PARTS, D]
    num_tokens,
    heads,
    split_size,
    stride_b,
    stride_n,
    stride_h,
    stride_dxb,
    stride_dx,
    stride_dxh,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_NUMBERS: tl.constexpr,
):
    """Compute dx_i = phi'(x_i) (g_i row), and the sum of g_i phi(x_i); without numbers g = 1, and no sum."""
    sample = tl.cast(tl.program_id(1) // heads, tl.int64)
    head = tl.program_id(1) % heads
    place = tl.cast(tl.program_id(1), tl.int64)
    x_ptr += sample * stride_b + head * stride_h
    dx_ptr += sample * stride_dxb + head * stride_dxh
    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, num_tokens)
    channels = tl.arange(0, BD)
    rows = tl.arange(0, BN)
    row_a, row_b = load_row(row_ptr + place * (PARTS * D), channels, D, PARTS)
    sum_a = tl.zeros([BN, BD], tl.float32)
    sum_b = tl.zeros([BN, BD], tl.float32)
    for first in range(start, stop, BN):
        exists = rows < stop - first
        ok = visible_rows(mask_ptr + sample * num_tokens, first, rows, exists, HAS_MASK)
        x = load_rows(x_ptr, first, rows, ok, channels, channels < D, stride_n).to(tl.float32)
        a, b = bounded_features(x, ok, channels, D, MAP)
        number = tl.full([BN, 1], 1.0, tl.float32)
        if HAS_NUMBERS:
            number = load_per_row(number_ptr + place * num_tokens, first, rows, ok)
            sum_a += number * a
            sum_b += number * b
        # a clamped feature has no gradient
        da = tl.where(a < LARGEST_FEATURE, number * row_a, 0.0)
        db = tl.where(b < LARGEST_FEATURE, number * row_b, 0.0)
        dx, g0, g1 = shared_phi_gradient(x, da, db, None, channels, 0.0, D, MAP)
        # masked tokens get a gradient of zero, which must be written
        store_rows(dx_ptr, tl.where(ok[:, None], dx, 0.0), first, rows, exists, channels, channels < D, stride_dx)
    if HAS_NUMBERS:
        store_row(sums_ptr + program_index() * (PARTS * D), sum_a, sum_b, channels, D, PARTS)
