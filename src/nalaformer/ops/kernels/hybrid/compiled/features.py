"""Compute features of the softmax maps in one pass, [softmax(x) ; softmax(-x)], and their gradient in another."""

import triton
import triton.language as tl

from ...common.compiled.row_maps import signed_softmax_gradient, softmax
from ...common.compiled.tiles import load_rows, store_rows


@triton.jit(do_not_specialize=["tokens"])
def signed_softmax_kernel(
    x_ptr,  # [B, N, H, D]
    out_ptr,  # [B, N, H, 2 D], contiguous
    tokens,
    heads,
    stride_b,
    stride_n,
    stride_h,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
):
    sample = tl.cast(tl.program_id(1) // heads, tl.int64)
    head = tl.program_id(1) % heads
    first = tl.program_id(0) * BN
    rows = tl.arange(0, BN)
    channels = tl.arange(0, BD)
    ok = first + rows < tokens
    in_head = channels < D
    x_ptr += sample * stride_b + head * stride_h
    out_ptr += (sample * tokens * heads + head) * (2 * D)
    x = load_rows(x_ptr, first, rows, ok, channels, in_head, stride_n).to(tl.float32)
    store_rows(out_ptr, softmax(x, in_head[None, :]), first, rows, ok, channels, in_head, heads * 2 * D)
    store_rows(out_ptr + D, softmax(-x, in_head[None, :]), first, rows, ok, channels, in_head, heads * 2 * D)


@triton.jit(do_not_specialize=["tokens"])
def signed_softmax_gradient_kernel(
    x_ptr,  # [B, N, H, D]
    dout_ptr,  # [B, N, H, 2 D], contiguous
    dx_ptr,  # [B, N, H, D], contiguous
    tokens,
    heads,
    stride_b,
    stride_n,
    stride_h,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
):
    sample = tl.cast(tl.program_id(1) // heads, tl.int64)
    head = tl.program_id(1) % heads
    first = tl.program_id(0) * BN
    rows = tl.arange(0, BN)
    channels = tl.arange(0, BD)
    ok = first + rows < tokens
    in_head = channels < D
    x_ptr += sample * stride_b + head * stride_h
    line = sample * tokens * heads + head
    x = load_rows(x_ptr, first, rows, ok, channels, in_head, stride_n).to(tl.float32)
    dout_ptr += line * (2 * D)
    da = load_rows(dout_ptr, first, rows, ok, channels, in_head, heads * 2 * D).to(tl.float32)
    db = load_rows(dout_ptr + D, first, rows, ok, channels, in_head, heads * 2 * D).to(tl.float32)
    dx = signed_softmax_gradient(x, da, db, in_head[None, :])
    store_rows(dx_ptr + line * D, dx, first, rows, ok, channels, in_head, heads * D)
