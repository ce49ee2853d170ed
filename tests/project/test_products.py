"""The cases that stand for a full product."""

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from helpers import products
from helpers.few_cases import few_cases

AXES = (range(18), (False, True), "ab", (None, "x", "y"))


@pytest.mark.parametrize("axes", [AXES, AXES[:3], (range(3), range(4), range(5), range(4))], ids=str)
def test_every_two_values_of_two_axes_meet_in_few_cases(axes, monkeypatch):
    monkeypatch.setattr(products, "FULL", False)
    cases = products.pairs(*axes)
    for one, other in combinations(range(len(axes)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(axes[one], axes[other]))
    sizes = sorted(len(axis) for axis in axes)
    assert len(cases) == len(set(cases)) <= 1.5 * sizes[-1] * sizes[-2]
    assert cases == products.pairs(*axes)


def test_full_products_stay_available(monkeypatch):
    monkeypatch.setattr(products, "FULL", True)
    assert products.pairs(*AXES) == list(product(*AXES))


def test_a_marked_test_runs_few_of_its_cases_and_another_all(monkeypatch):
    monkeypatch.setattr(products, "FULL", False)

    def items(marked):
        class Item(SimpleNamespace):
            __hash__ = object.__hash__

        return [
            Item(
                nodeid=f"test_file.py::test_{marked}[{case}]",
                callspec=SimpleNamespace(params=dict(zip("abcd", (*case, case[-1]), strict=True))),
                get_closest_marker=lambda name: marked,
                # the other two are of fixtures
                iter_markers=lambda name: [SimpleNamespace(args=("c, d", ()))],
            )
            for case in product(range(3), repeat=3)
        ]

    marked, other = items(True), items(False)
    kept = few_cases([*marked, *other])
    assert kept.issuperset(other)
    assert {(item.callspec.params["a"], item.callspec.params["c"]) for item in kept & set(marked)} == set(
        product(range(3), repeat=2)
    )
    assert len(kept & set(marked)) < 15
