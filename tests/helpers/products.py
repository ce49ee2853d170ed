"""Fewer cases than a full product: every two values of two axes meet in one case at least.

A mistake mostly takes one value, or two together, to be seen. `make test-full` runs the full products.
"""

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest

FULL = bool(os.environ.get("NALAFORMER_FULL"))


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases with one value of each axis, such that every two values of two axes meet in a case; or the full product.

    For `parametrize`: the same cases in every process and run. With two axes it is the full product.
    """
    values = [list(axis) for axis in axes]
    # by number: values need not be hashable
    cases = list(product(*(range(len(axis)) for axis in values)))
    chosen = range(len(cases)) if FULL else covering(cases)
    return [tuple(axis[at] for axis, at in zip(values, cases[number], strict=True)) for number in chosen]


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return which of the cases to keep, in order, so that every pair of values that meets in a case meets in one of these."""
    bits: dict[Any, int] = {}
    met = []
    for case in cases:
        values = list(enumerate(case))
        met.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in (*combinations(values, 1), *combinations(values, 2))))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        # greedy: the case that brings most of what is missing, the first of equals
        best = max(range(len(cases)), key=lambda number: (met[number] & missing).bit_count())
        chosen.append(best)
        missing &= ~met[best]
    return sorted(chosen)


def few_cases(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the items to run: of each test that is marked `pairwise`, over all its parameters, a covering of its cases."""
    kept, of_test = set(), defaultdict(list)
    for item in items:
        if FULL or not item.get_closest_marker("pairwise") or not hasattr(item, "callspec"):
            kept.add(item)
        else:
            of_test[item.nodeid.split("[")[0]].append(item)
    for cases in of_test.values():
        kept |= {cases[number] for number in covering([list(values_of_axes(case)) for case in cases])}
    return kept


def values_of_axes(item: pytest.Item) -> Iterator[Hashable]:
    """Yield what an item has of each axis: a decorator, whatever it names, or a fixture with parameters."""
    left = dict(item.callspec.params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield tuple(repr(left.pop(name.strip())) for name in names)
    yield from map(repr, left.values())
