"""A registry of names, and the error for unknown ones."""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Generic, TypeVar

T = TypeVar("T")


def unknown_name(kind: str, name: object, known: Iterable[str], *, compared: Callable[[str], str] = str) -> ValueError:
    """Return the error for an unknown name: the nearest names first, then all of them.

    compared: returns the part of a known name that `name` is compared with.
    """
    names = sorted(known)
    alike = get_close_matches(str(name), {compared(each) for each in names}, n=3, cutoff=0.5)
    near = [each for words in alike for each in names if compared(each) == words]
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}; {hint}known: {', '.join(names) or 'none'}")


def check_options(maker: Callable[..., object], options: Iterable[str], kind: str) -> None:
    """Reject options that the function or class does not take; kind: what it makes, in words."""
    taken = inspect.signature(maker).parameters
    for option in options:
        if option not in taken:
            raise unknown_name(f"option of {kind}:", option, taken)


class Registry(Generic[T]):
    """A table from names to objects of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its object under `name`."""

        def enter(thing: T) -> T:
            if name in self._entries:
                raise ValueError(f"the {self.kind} {name!r} is registered already; choose another name")
            self._entries[name] = thing
            return thing

        return enter

    def __getitem__(self, name: str) -> T:
        # a list, say, cannot be a key of a dict
        if not isinstance(name, str) or name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all names in the order of their registration."""
        return list(self._entries)
