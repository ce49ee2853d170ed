"""Triton's interpreter without what takes it most of its time and changes no result.

Where a device function is called, it looks through all of triton.language for functions to replace by interpreted ones, though
the launch has done so; that is half of the time of a kernel. An exclusive or it takes number by number. Each sum and product of
integers it computes again to look for an overflow that it reports only in a debug build. And each value gets a type of its own,
with a shape that is checked, wrapped and printed anew; here values of the same type and shape share them.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np

NOTHING_TO_RESTORE = SimpleNamespace(restore=lambda: None)
INTEGER = {int}


def quicken() -> None:
    from triton.runtime import interpreter

    try:
        replace_functions_once(interpreter)
        share_types(interpreter)
        leave_out_unread_checks(interpreter.interpreter_builder)
    except (AttributeError, TypeError):
        # a version with other names or options inside: slower, and as right
        return


def replace_functions_once(interpreter) -> None:
    language = interpreter.tl
    reduction, exclusive_or = interpreter.ReduceOps, language.standard._xor_combine
    replace_all, one_by_one = interpreter._patch_lang, reduction.generic_reduce

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


def leave_out_unread_checks(builder) -> None:
    """The check of an overflow ends in an assert, which is nothing unless the interpreter debugs."""
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def share_types(interpreter) -> None:
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    block, value, constant = core.block_type, core.tensor, core.constexpr
    make_block, make_value, numpy_type = block.__init__, value.__init__, interpreter._get_np_dtype
    unwrap, equal, broadcast = core._unwrap_if_constexpr, core.tuple.__eq__, semantic.broadcast_impl_value
    # what the plain functions made, by the name of the type; shapes by their sizes, so that equal ones are the same object
    blocks, values, numpy_types, shapes = {}, {}, {}, {}

    def shared_block(self, element_ty, shape):
        sizes = tuple([x.value if type(x) is constant else x for x in shape])
        # 16.0 and True find what 16 and 1 left behind, and are no sizes
        known = blocks.get((element_ty.name, sizes)) if INTEGER.issuperset(map(type, sizes)) else None
        if known is None:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            known = blocks[element_ty.name, sizes] = dict(self.__dict__)
        self.__dict__.update(known)
        self.element_ty = element_ty

    # its argument is called type in Triton, and passed by position there
    def shared_value(self, handle, its_type):
        known = values.get(its_type.name)
        if known is None:
            make_value(self, handle, its_type)
            values[its_type.name] = {name: x for name, x in self.__dict__.items() if name not in ("handle", "type", "dtype")}
            return
        self.__dict__.update(known)
        self.handle, self.type, self.dtype = handle, its_type, its_type.scalar

    def kept_numpy_type(its_type):
        known = numpy_types.get(its_type.name)
        if known is None:
            known = numpy_types[its_type.name] = numpy_type(its_type)
        return known

    def quick_unwrap(x):
        kind = type(x)
        if kind is constant:
            return x.value
        return x if kind is int or kind is value else unwrap(x)

    def quick_equal(self, other):
        if type(other) is list and INTEGER.issuperset(map(type, other)):
            return constant(self.values == other)
        return equal(self, other)

    def quick_broadcast(self, left, right):
        if isinstance(left.type, block) and isinstance(right.type, block) and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    block.__init__, value.__init__, interpreter._get_np_dtype = shared_block, shared_value, kept_numpy_type
    core._unwrap_if_constexpr, core.tuple.__eq__, semantic.broadcast_impl_value = quick_unwrap, quick_equal, quick_broadcast
