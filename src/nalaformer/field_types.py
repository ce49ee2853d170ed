"""Type and range checks for the fields of configurations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

# the longest side of an image; at most 64 million pixels are decoded
LARGEST_SIDE = 8192
WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text", NoneType: "None"}


def check_field_types(config: Any) -> None:
    """Reject a dataclass whose fields hold values of other types than their annotations say.

    Checks truth values, numbers, text, dictionaries, and tuples of those. Lists pass as tuples, since JSON has no tuples, and
    whole numbers pass as floats. A float must be finite.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if is_known(field.type) and not holds(value, field.type):
            usual = "" if field.default is MISSING else f"; the default is {field.default!r}"
            raise ValueError(f"{field.name} must be {in_words(field.type)}, got {value!r}{usual}")


def check_ranges(
    config: Any,
    *,
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    below_one: Sequence[str] = (),
    shares: Sequence[str] = (),
    sides: Sequence[str] = (),
) -> None:
    """Reject a dataclass with numbers out of range: above 0, 0 or above, 0 <= x < 1, 0 <= x <= 1; sides: see `check_side`."""
    rules: tuple[tuple[Sequence[str], str, Callable[[float], bool]], ...] = (
        (positive, "be positive", lambda x: x > 0),
        (not_negative, "not be negative", lambda x: x >= 0),
        (below_one, "be at least 0 and below 1", lambda x: 0 <= x < 1),
        (shares, "be between 0 and 1", lambda x: 0 <= x <= 1),
    )
    for names, rule, is_allowed in rules:
        for name in names:
            if not is_allowed(getattr(config, name)):
                raise ValueError(f"{name} must {rule}, got {getattr(config, name)}")
    for name in sides:
        check_side(name, getattr(config, name))


def check_side(name: str, value: Any) -> None:
    """Reject a side of an image, or one of several, that is above LARGEST_SIDE; values of other types pass."""
    for side in value if isinstance(value, tuple | list) else (value,):
        if isinstance(side, int | float) and side > LARGEST_SIDE:
            raise ValueError(f"{name} must be at most {LARGEST_SIDE}, got {value}; choose a smaller image")


def is_known(kind: Any) -> bool:
    """True if `holds` can check values of this type."""
    if isinstance(kind, UnionType) or get_origin(kind) is tuple:
        return all(part is Ellipsis or is_known(part) for part in get_args(kind))
    return kind in WORDS or get_origin(kind) is dict


def holds(value: object, kind: Any) -> bool:
    """True if the value has this type."""
    if isinstance(kind, UnionType):
        return any(holds(value, part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple | list):
            return False
        parts = get_args(kind)
        parts = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(parts) == len(value) and all(holds(each, part) for each, part in zip(value, parts, strict=True))
    if get_origin(kind) is dict:
        return isinstance(value, Mapping)
    # bool is a subclass of int in Python
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real) and math.isfinite(value)
    return isinstance(value, kind)


def in_words(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return ", or ".join(in_words(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        return f"a tuple of {in_words(parts[0])} for each" if parts[-1] is Ellipsis else f"({', '.join(map(in_words, parts))})"
    return "a dictionary" if get_origin(kind) is dict else WORDS[kind]
