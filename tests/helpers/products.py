"""Fewer cases than a full product: every two values of two axes meet in one case at least.

A mistake mostly takes one value, or two together, to be seen. `make test-full` runs the full products.
"""

import os
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

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
    # greedy: the case that brings most of what is missing; of equals any, so that more than pairs of values differ
    order = list(range(len(cases)))
    Random(0).shuffle(order)
    while missing:
        best = max(order, key=lambda number: (met[number] & missing).bit_count())
        chosen.append(best)
        missing &= ~met[best]
    return sorted(chosen)
