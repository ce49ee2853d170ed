"""Compute silu(a) * b in one pass, and its gradients in another, which returns the product again."""

import triton
import triton.language as tl

from .norm import sigmoid


@triton.jit
def gated_product_kernel(
    a_ptr,  # [elements] side by side
    b_ptr,
    out_ptr,
    numbers,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    a = tl.load(a_ptr + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (a * sigmoid(a) * b).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_product_gradient_kernel(
    a_ptr,  # [elements] side by side
    b_ptr,
    dout_ptr,
    out_ptr,  # silu(a) * b
    da_ptr,
    db_ptr,
    numbers,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    a = tl.load(a_ptr + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + place, mask=inside, other=0.0).to(tl.float32)
    part = sigmoid(a)
    gate = a * part
    tl.store(out_ptr + place, (gate * b).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(db_ptr + place, (dout * gate).to(db_ptr.dtype.element_ty), mask=inside)
    da = dout * b * part * (1.0 + a * (1.0 - part))
    tl.store(da_ptr + place, da.to(da_ptr.dtype.element_ty), mask=inside)
