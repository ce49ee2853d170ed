"""Triton's interpreter without what takes it most of its time and changes no result.

Where a device function is called, it looks through all of triton.language for functions to replace by interpreted ones, though
the launch has done so; that is half of the time of a kernel. An exclusive or it takes number by number.
"""

from types import SimpleNamespace

import numpy as np

NOTHING_TO_RESTORE = SimpleNamespace(restore=lambda: None)


def quicken() -> None:
    from triton.runtime import interpreter

    language = interpreter.tl
    try:
        reduction, exclusive_or = interpreter.ReduceOps, language.standard._xor_combine
        replace_all, one_by_one = interpreter._patch_lang, reduction.generic_reduce
    except AttributeError:
        # a version with other names inside: slower, and as right
        return

    def replace_missing(function):
        # launches put triton.language back when they end; its core is replaced when the first reduction asks for it
        if any(language.core.is_builtin(module.load) for module in (language, language.core)):
            return replace_all(function)
        return NOTHING_TO_RESTORE

    def at_once(self, numbers):
        if self.combine_fn is not exclusive_or:
            return one_by_one(self, numbers)
        (bits,) = numbers
        return self.to_tensor(np.bitwise_xor.reduce(bits.handle.data, axis=self.axis, keepdims=self.keep_dims), bits.dtype)

    interpreter._patch_lang, reduction.generic_reduce = replace_missing, at_once
