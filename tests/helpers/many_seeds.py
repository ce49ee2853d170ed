"""Other numbers for every test (`--seed`), and how much room they leave under every bar (`--room`); run_seeds.py runs it.

A bar is the right side of `assert error < bar`, or the tolerance of assert_close, allclose and pytest.approx.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.places import ALL_TESTS, PROJECT

# above this a bound is a size, a share or a time; errors are judged by less
LARGEST_BAR = 0.05
# processes that tests start draw with them too, unshifted, and are compared
ALSO_RUN_BY_CHILDREN = ("training_example.py", "linearize_on_ranks.py", "language_recipe.py")
# the relative and absolute tolerances that torch.testing.assert_close takes by itself
DEFAULTS = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}


def shift_seeds(shift: int) -> Callable[[], None]:
    """Let torch.manual_seed, called by a test, seed with other numbers; returns what undoes it.

    Seeds that the library sets, and generators of a test's own, stay: their numbers are part of what those tests mean.
    """
    plain = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        path = Path(sys._getframe(1).f_code.co_filename)
        ours = is_a_test(path) and path.name not in ALSO_RUN_BY_CHILDREN
        return plain(seed + 1_000_003 * shift if ours else seed)

    torch.manual_seed = manual_seed

    def undo() -> None:
        torch.manual_seed = plain

    return undo


class Room:
    """Write error / bar of every comparison that a test makes: the largest at each line, one JSON row, after each test."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.largest: dict[str, tuple[float, float, float]] = {}
        self.plain_close, self.plain_allclose = torch.testing.assert_close, torch.allclose

    def note(self, error: float, bar: float) -> None:
        place = line_of_the_test()
        ratio = error / bar
        # a ratio that is no number is larger than any
        if place not in self.largest or not ratio <= self.largest[place][0]:
            self.largest[place] = (ratio, error, bar)

    def pytest_configure(self) -> None:
        torch.testing.assert_close, torch.allclose = self.assert_close, self.allclose

    def pytest_unconfigure(self) -> None:
        torch.testing.assert_close, torch.allclose = self.plain_close, self.plain_allclose

    def assert_close(
        self, actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, **rest: Any
    ) -> None:
        self.note_tensors(actual, expected, rtol, atol)
        self.plain_close(actual, expected, rtol=rtol, atol=atol, **rest)

    def allclose(self, first: Tensor, second: Tensor, rtol: float = 1e-5, atol: float = 1e-8, **rest: Any) -> bool:
        close = self.plain_allclose(first, second, rtol=rtol, atol=atol, **rest)
        # what is far apart is what a test with `not` asks for
        if close:
            self.note_tensors(first, second, rtol, atol)
        return close

    def note_tensors(self, actual: Any, expected: Any, rtol: float | None, atol: float | None) -> None:
        """The entry with the least room: |a - b| / (atol + rtol |b|)."""
        if isinstance(actual, Sequence):
            for one, other in zip(actual, expected, strict=True):
                self.note_tensors(one, other, rtol, atol)
            return
        if (
            not isinstance(actual, Tensor)
            or not actual.is_floating_point()
            or actual.shape != expected.shape
            or not actual.numel()
        ):
            return
        if rtol is None or atol is None:
            both = [DEFAULTS[x.dtype] for x in (actual, expected)]
            rtol, atol = max(r for r, _ in both), max(a for _, a in both)
        actual, expected = actual.detach().double(), expected.detach().double()
        error, bar = (actual - expected).abs().flatten(), (atol + rtol * expected.abs()).flatten()
        worst = (error / bar).nan_to_num(0.0).argmax()
        # entries that must be equal have no bar
        if bar[worst] > 0:
            self.note(float(error[worst]), float(bar[worst]))

    def pytest_assertion_pass(self) -> None:
        """While this hook is there, pytest compares also for asserts that hold (with enable_assertion_pass_hook)."""

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        if op == "==" and hasattr(right, "tolerance"):
            error, bar = number(left), number(right.tolerance)
            error = None if error is None else abs(error - float(right.expected))
        elif op in ("<", "<="):
            error, bar = number(left), number(right)
        else:
            return
        if error is not None and bar is not None and 0 < bar <= LARGEST_BAR and not error < 0:
            self.note(error, bar)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        rows = []
        if report.failed:
            reason = report.longrepr.reprcrash.message if hasattr(report.longrepr, "reprcrash") else str(report.longrepr)
            rows.append({"failed": reason[:300]})
        if report.when == "call":
            rows += [
                {"at": place, "ratio": ratio, "error": error, "bar": bar} for place, (ratio, error, bar) in self.largest.items()
            ]
            self.largest.clear()
        if rows:
            with self.path.open("a") as file:
                file.writelines(json.dumps({"seed": self.seed, "test": item.nodeid} | row) + "\n" for row in rows)
        return report


def number(x: object) -> float | None:
    """A single real number that is no integer, as a float."""
    if isinstance(x, Tensor | np.ndarray) and np.prod(x.shape) == 1 and "float" in str(x.dtype):
        return float(x.detach() if isinstance(x, Tensor) else x)
    return float(x) if isinstance(x, float | np.floating) else None


def line_of_the_test() -> str:
    """The innermost line of the tests that is being run, this file aside."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if is_a_test(path) and path != Path(__file__):
            return f"{path.relative_to(PROJECT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def is_a_test(path: Path) -> bool:
    # the conftest of all tests lies above them
    return path == PROJECT / "conftest.py" or any(folder in path.parents for folder in ALL_TESTS)
