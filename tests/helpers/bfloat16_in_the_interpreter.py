"""Triton's interpreter keeps bfloat16 as bits and computes with the bits; here it computes with the numbers.

Products take the numbers and add in float32, everything else rounds its result to bfloat16 again: what a GPU does, as far as
rounding goes.
"""

import numpy as np


def as_numbers(bits):
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def as_bits(numbers):
    """Rounded to nearest, ties to even."""
    numbers = np.ascontiguousarray(np.asarray(numbers, dtype=np.float32))
    wide = numbers.view(np.uint32).astype(np.uint64)
    rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def teach_bfloat16(monkeypatch) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, binary, cast, between_floats = builder.create_dot, builder.binary_op, builder.cast_impl, builder.create_fp_to_fp

    def is_bfloat16(x):
        return x.dtype.scalar == tl.bfloat16

    def create_dot(self, a, b, *rest):
        assert is_bfloat16(a) == is_bfloat16(b)
        a, b = (handle(as_numbers(x.data), tl.float32) if is_bfloat16(x) else x for x in (a, b))
        return dot(self, a, b, *rest)

    def binary_op(self, left, right, op):
        if not (is_bfloat16(left) and is_bfloat16(right)):
            return binary(self, left, right, op)
        out = op(as_numbers(left.data), as_numbers(right.data))
        return handle(out, tl.int1) if out.dtype == bool else handle(as_bits(out), tl.bfloat16)

    def cast_impl(self, x, to):
        if is_bfloat16(x) == (to.scalar == tl.bfloat16):
            return cast(self, x, to)
        if is_bfloat16(x):
            return handle(as_numbers(x.data).astype(interpreter._get_np_dtype(to)), to.scalar)
        return handle(as_bits(x.data.astype(np.float32)), tl.bfloat16)

    def create_fp_to_fp(self, x, to, rounding):
        if is_bfloat16(x) or to.scalar == tl.bfloat16:
            return cast_impl(self, x, to)
        return between_floats(self, x, to, rounding)

    def get_bf16(self, value):
        return handle(as_bits([value]), tl.bfloat16)

    for function in (create_dot, binary_op, cast_impl, create_fp_to_fp, get_bf16):
        # get_bf16: not in Triton 3.6, which makes such constants by a cast
        monkeypatch.setattr(builder, function.__name__, function, raising=function is not get_bf16)
