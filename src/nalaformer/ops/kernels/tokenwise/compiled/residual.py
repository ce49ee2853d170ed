"""Compute x + scale * keep * y in one pass, and its gradients in another."""

import triton
import triton.language as tl


@triton.jit
def residual_kernel(
    x_ptr,  # [B * N, C]
    y_ptr,  # [B * N, C]
    scale_ptr,  # [C]; not read without SCALED
    keep_ptr,  # [B]; not read without DROPPED
    out_ptr,  # [B * N, C]
    rows,
    tokens,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    SCALED: tl.constexpr,
    DROPPED: tl.constexpr,
):
    row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    channel = tl.arange(0, BC)
    is_row = row < rows
    inside = is_row[:, None] & (channel < C)[None, :]
    at = row[:, None] * C + channel[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        y *= tl.load(scale_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    if DROPPED:
        y *= tl.load(keep_ptr + row // tokens, mask=is_row, other=0.0).to(tl.float32)[:, None]
    out = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + y
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def residual_gradient_kernel(
    y_ptr,  # [B * N, C]
    scale_ptr,  # [C]; not read without SCALED
    keep_ptr,  # [B]; not read without DROPPED
    dout_ptr,  # [B * N, C]
    dy_ptr,  # [B * N, C]
    partial_ptr,  # [programs, C] float32: gradient of the scale; not written without SCALED
    rows,
    tokens,
    split_size,  # steps of BR rows per program
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    SCALED: tl.constexpr,
    DROPPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    channel = tl.arange(0, BC)
    is_channel = channel < C
    dscale = tl.zeros((BR, BC), tl.float32)
    if SCALED:
        scale = tl.load(scale_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    last = tl.minimum((program + 1) * split_size, tl.cdiv(rows, BR))
    for step in tl.range(program * split_size, last, num_stages=STAGES):
        row = (step * BR + tl.arange(0, BR)).to(tl.int64)
        is_row = row < rows
        inside = is_row[:, None] & is_channel[None, :]
        at = row[:, None] * C + channel[None, :]
        dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if DROPPED:
            dout *= tl.load(keep_ptr + row // tokens, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if SCALED:
            dscale += dout * tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
            dout *= scale
        tl.store(dy_ptr + at, dout.to(dy_ptr.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(partial_ptr + program.to(tl.int64) * C + channel, tl.sum(dscale, axis=0), mask=is_channel)
