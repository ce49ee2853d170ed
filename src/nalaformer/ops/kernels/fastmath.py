"""Numbers and elementary functions for kernels.

The GPU's own instructions: one issue slot each, where the accurate library versions take a dozen. lg2.approx is off by 2^-22
at most, far below what a bfloat16 tile keeps and within what we ask of float32. The interpreter has neither inline assembly
nor these instructions, so there the same names are numpy's functions.
"""

from typing import Any

import triton
import triton.language as tl

from ..backend import INTERPRETING


def constant(value: float) -> Any:
    """A global number for kernels: compiled code must see a constexpr, which the interpreter cannot multiply by a tensor."""
    return value if INTERPRETING else tl.constexpr(value)


if INTERPRETING:

    @triton.jit
    def log2(x):
        """log2 x for x >= 0; -150 at and near 0, so that powers vanish and products with them stay finite."""
        return tl.where(x > 0, tl.log2(tl.maximum(x, 1.2e-38)), -150.0)

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def reciprocal(x):
        return 1.0 / x

    @triton.jit
    def cos(x):
        return tl.cos(x)

    @triton.jit
    def sin(x):
        return tl.sin(x)

else:

    @triton.jit
    def log2(x):
        """log2 x for x >= 0; -150 at and near 0, so that powers vanish and products with them stay finite."""
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return tl.maximum(y, -150.0)

    @triton.jit
    def exp2(x):
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def reciprocal(x):
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def cos(x):
        return tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def sin(x):
        return tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
