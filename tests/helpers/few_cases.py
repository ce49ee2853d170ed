"""Which cases run of tests that are marked `pairwise`."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator

import pytest

from helpers import products

# fixtures that choose code of its own by both their values, which each map must see: they count as one axis
TOGETHER = ("causal", "backend")


def few_cases(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the items to run: of each test that is marked `pairwise`, over all its parameters, a covering of its cases."""
    kept, of_test = set(), defaultdict(list)
    for item in items:
        if products.FULL or not item.get_closest_marker("pairwise") or not hasattr(item, "callspec"):
            kept.add(item)
        else:
            of_test[item.nodeid.split("[")[0]].append(item)
    for cases in of_test.values():
        kept |= {cases[number] for number in products.covering([list(values_of_axes(case)) for case in cases])}
    return kept


def values_of_axes(item: pytest.Item) -> Iterator[Hashable]:
    """Yield what an item has of each axis: a decorator, whatever it names, or a fixture with parameters."""
    left = dict(item.callspec.params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield tuple(repr(left.pop(name.strip())) for name in names)
    yield tuple(repr(left.pop(name)) for name in TOGETHER if name in left)
    yield from map(repr, left.values())
