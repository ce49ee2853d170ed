"""Define numbers and elementary functions for kernels.

They are the GPU's own instructions: one issue slot each, where the accurate library versions take a dozen. lg2.approx is off by
2^-22 at most, far below what a bfloat16 tile keeps and within what float32 needs here. The interpreter has neither inline
assembly nor these instructions, so there the same names are numpy's functions.
"""

from typing import Any

import triton
import triton.language as tl

from ....backend import INTERPRETING


def constant(value: float) -> Any:
    """Return a global number for kernels: the compiler needs a constexpr, which the interpreter cannot multiply by a tensor."""
    return value if INTERPRETING else tl.constexpr(value)


if INTERPRETING:

    @triton.jit
    def log2(x):
        """Return log2 |x|; -150 at and near 0, so that powers vanish and products with them stay finite."""
        return tl.where(x != 0, tl.log2(tl.maximum(tl.abs(x), 1.2e-38)), -150.0)

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def unbounded_log2(x):
        """Return log2 |x|; -inf at 0 in kernels, an instruction less, for callers that only make a power of it."""
        return log2(x)

    @triton.jit
    def rsqrt(x):
        return 1.0 / tl.sqrt(x)

    @triton.jit
    def with_sign(x, of):
        """Return x, which is not negative, with the sign of the other."""
        return tl.where(of < 0, -x, x)

    @triton.jit
    def halves(x, TYPE: tl.constexpr):
        """Return max(x, 0) and max(-x, 0)."""
        a = tl.maximum(x, 0.0)
        b = tl.maximum(-x, 0.0)
        return (a, b) if TYPE is None else (a.to(TYPE), b.to(TYPE))

    @triton.jit
    def reciprocal(x):
        return 1.0 / x

    @triton.jit
    def laid_as(x, other):
        """Return x, float32, in the layout of a product, so that no computation with both moves values between threads."""
        return x

else:

    @triton.jit
    def unbounded_log2(x):
        """Return log2 |x|; -inf at 0, an instruction less, for callers that only make a power of it."""
        asm: tl.constexpr = "{.reg .f32 size; abs.f32 size, $1; lg2.approx.ftz.f32 $0, size;}"
        return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def log2(x):
        """Return log2 |x|; -150 at and near 0, so that powers vanish and products with them stay finite."""
        return tl.maximum(unbounded_log2(x), -150.0)

    @triton.jit
    def rsqrt(x):
        return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def with_sign(x, of):
        """Return x, which is not negative, with the sign of the other."""
        asm: tl.constexpr = "lop3.b32 $0, $1, $2, 0x80000000, 0xf8;"
        return tl.inline_asm_elementwise(asm, "=f,f,f", [x, of], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def halves(x, TYPE: tl.constexpr):
        """Return max(x, 0) and max(-x, 0); two bfloat16 values at once."""
        if TYPE is None:
            a = tl.maximum(x, 0.0)
            b = tl.maximum(-x, 0.0)
        elif tl.bfloat16 == TYPE:
            up: tl.constexpr = "{.reg .b32 zero; mov.b32 zero, 0; max.bf16x2 $0, $1, zero;}"
            down: tl.constexpr = """{.reg .b32 minus, zero; mov.b32 minus, 0xbf80bf80; mov.b32 zero, 0;
                fma.rn.relu.bf16x2 $0, $1, minus, zero;}"""
            x = x.to(tl.bfloat16)
            a = tl.inline_asm_elementwise(up, "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
            b = tl.inline_asm_elementwise(down, "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            a = tl.maximum(x, 0.0).to(TYPE)
            b = tl.maximum(-x, 0.0).to(TYPE)
        return a, b

    @triton.jit
    def exp2(x):
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def reciprocal(x):
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def laid_as(x, other):
        """Return x, float32, in the layout of a product, so that no computation with both moves values between threads."""
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,f", [x, other], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def cos(x):
    """Return cos(x) for |x| <= pi / 4, to float32; the GPU's own is off by 2^-21."""
    y = x * x
    return 1.0 + y * (-0.5 + y * (0.041666666666666664 + y * (-0.001388888888888889 + y * 2.48015873015873e-05)))


@triton.jit
def sin(x):
    """Return sin(x) for |x| <= pi / 4, to float32."""
    y = x * x
    series = -0.16666666666666666 + y * (0.008333333333333333 + y * (-0.0001984126984126984 + y * 2.7557319223985893e-06))
    return x + x * y * series
