"""Compute features of a row of all heads of a token together; cross_head_op.py explains when they are needed."""

import triton
import triton.language as tl

from ...common.compiled.map_gradients import phi_key_gradient
from ...common.compiled.maps import phi_key


@triton.jit
def tile_offsets(tile, sample, num_tokens, stride_b, stride_n, stride_h, D: tl.constexpr, C: tl.constexpr, BC, BN):
    """Return offsets of a tile of tokens and its channels in a [B, N, H, D] view and in a contiguous one, and their masks."""
    tokens = tile * BN + tl.arange(0, BN)
    channels = tl.arange(0, BC)
    wide = tokens.to(tl.int64)
    here = tl.cast(sample, tl.int64) * stride_b + (wide * stride_n)[:, None]
    here += (channels // D * stride_h + channels % D)[None, :]
    there = ((tl.cast(sample, tl.int64) * num_tokens + wide) * C)[:, None] + channels[None, :]
    ok = tokens < num_tokens
    return here, there, channels, ok, ok[:, None] & (channels < C)[None, :]


@triton.jit
def features_kernel(
    x_ptr,  # [B, N, H, D]
    param_ptr,  # [B or 1, P * C]
    out_ptr,  # [B, N, H, D], contiguous
    num_tokens,
    stride_b,
    stride_n,
    stride_h,
    stride_param,  # 0: one row for all samples
    alpha,
    D: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
):
    sample = tl.program_id(1)
    param_ptr += tl.cast(sample, tl.int64) * stride_param
    here, there, channels, ok, inside = tile_offsets(
        tl.program_id(0), sample, num_tokens, stride_b, stride_n, stride_h, D, C, BC, BN
    )
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    a, b = phi_key(x, ok, param_ptr, channels, 0.0, alpha, C, MAP, False)
    tl.store(out_ptr + there, a.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def features_gradient_kernel(
    x_ptr,  # [B, N, H, D]
    dout_ptr,  # [B, N, H, D], contiguous
    param_ptr,  # [B or 1, P * C]
    dx_ptr,  # [B, N, H, D], contiguous
    dparam_ptr,  # [programs, B, 2, C]
    num_tokens,
    stride_b,
    stride_n,
    stride_h,
    stride_param,
    alpha,
    D: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    LEARNED: tl.constexpr,
):
    sample = tl.program_id(1)
    param_ptr += tl.cast(sample, tl.int64) * stride_param
    p0 = tl.zeros([BC], tl.float32)
    p1 = tl.zeros([BC], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BN), tl.num_programs(0)):
        here, there, channels, ok, inside = tile_offsets(tile, sample, num_tokens, stride_b, stride_n, stride_h, D, C, BC, BN)
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(dout_ptr + there, mask=inside, other=0.0).to(tl.float32)
        dx, g0, g1 = phi_key_gradient(x, da, da, param_ptr, channels, 0.0, alpha, C, MAP, False)
        tl.store(dx_ptr + there, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if LEARNED:
            p0 += tl.sum(tl.where(inside, g0, 0.0), axis=0)
            p1 += tl.sum(tl.where(inside, g1, 0.0), axis=0)
    if LEARNED:
        channels = tl.arange(0, BC)
        dparam_ptr += (tl.cast(tl.program_id(0), tl.int64) * tl.num_programs(1) + sample) * (2 * C)
        tl.store(dparam_ptr + channels, p0, mask=channels < C)
        tl.store(dparam_ptr + C + channels, p1, mask=channels < C)
