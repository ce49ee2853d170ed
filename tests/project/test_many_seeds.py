"""What `make test-seeds` measures and prints."""

import json
from pathlib import Path

import pytest
import torch

from helpers.many_seeds import Room, shift_seeds
from helpers.places import PROJECT
from run_seeds import table


@pytest.mark.parametrize(
    "file", ["conftest.py", "tests/ops/test_a.py", "research/tests/test_a.py", "benchmarks/tests/test_a.py"]
)
def test_a_shift_changes_what_tests_draw_and_not_what_the_library_draws(file):
    test, library = (
        compile("torch.manual_seed(0)", str(path), "exec") for path in (PROJECT / file, PROJECT / "src" / "library.py")
    )
    drawn = []
    for shift in (0, 1, 1):
        undo = shift_seeds(shift)
        exec(test)  # noqa: S102
        mine = torch.rand(()).item()
        exec(library)  # noqa: S102
        drawn.append((mine, torch.rand(()).item()))
        undo()
    assert drawn[0][0] != drawn[1][0]
    assert drawn[1] == drawn[2]
    assert drawn[0][1] == drawn[1][1]


@pytest.mark.parametrize(
    ("op", "left", "right", "ratio"),
    [
        ("<", 2e-7, 1e-6, 0.2),
        ("<=", torch.tensor(4e-7), torch.tensor(1e-6), 0.4),
        ("==", 1.001, pytest.approx(1.0, abs=0.01), 0.1),
        # no bars on errors: sizes, shares, lower bounds
        ("<", 3, 7, None),
        ("<", 0.4, 0.53, None),
        (">", 2e-7, 1e-9, None),
    ],
)
def test_room_is_error_over_bar(tmp_path, op, left, right, ratio):
    room = Room(tmp_path / "room.jsonl", 0)
    room.pytest_assertrepr_compare(op, left, right)
    assert [found for found, _, _ in room.largest.values()] == pytest.approx([] if ratio is None else [ratio], rel=1e-5)


def test_the_room_of_tensors_is_that_of_the_worst_entry(tmp_path):
    room = Room(tmp_path / "room.jsonl", 0)
    expected = torch.tensor([1.0, 10.0, 0.0], dtype=torch.float64)
    room.assert_close(expected + torch.tensor([0.02, 0.05, 0.0]), expected, rtol=0.01, atol=0.03)
    ((ratio, error, bar),) = room.largest.values()
    assert (ratio, error, bar) == pytest.approx((0.5, 0.02, 0.04))
    with pytest.raises(AssertionError):
        room.assert_close(expected + 1, expected, rtol=0, atol=0.1)


def write_rows(folder: Path, *rows: dict) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"seed": 4, "test": "tests/a.py::test_a"} | row) + "\n" for row in rows))


def test_the_table_has_the_tight_bars_worst_first(tmp_path, capsys):
    name = Path(__file__).relative_to(PROJECT)
    ratios = {1: 0.4, 2: 0.9, 3: 0.3}
    bars = [{"at": f"{name}:{line}", "ratio": ratio, "error": ratio, "bar": 1.0} for line, ratio in ratios.items()]
    write_rows(tmp_path, *bars)
    assert table(tmp_path) == 0
    found = capsys.readouterr().out
    assert "3 bars" in found
    assert found.index(f"{name}:2") < found.index(f"{name}:1 ")
    assert f"{name}:3" not in found


def test_a_bar_that_is_argued_is_listed_apart(tmp_path, capsys):
    # room: this comment stands above the line that the row names
    line = test_a_bar_that_is_argued_is_listed_apart.__code__.co_firstlineno + 2
    write_rows(tmp_path, {"at": f"{Path(__file__).relative_to(PROJECT)}:{line}", "ratio": 0.5, "error": 0.5, "bar": 1.0})
    table(tmp_path)
    found = capsys.readouterr().out
    assert "0 with less than a factor of 3 of room\n" in found
    assert "1 with less than a factor of 3 of room, argued" in found


def test_a_failure_is_named_and_fails_the_command(tmp_path, capsys):
    write_rows(tmp_path, {"failed": "assert 3 < 2"})
    assert table(tmp_path) == 1
    assert "seed 4  tests/a.py::test_a: assert 3 < 2" in capsys.readouterr().out
