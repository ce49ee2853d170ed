"""`python -m benchmarks` as a user meets it."""

import csv
import sys

import pytest
from typer.testing import CliRunner

from benchmarks import Case, cases, measurement, ops, runner
from benchmarks.__main__ import build_app
from benchmarks.ops_report import COLUMNS
from nalaformer.cli import run_app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(build_app(), list(arguments))


def test_bench_ops_prints_and_writes_its_results(run, tmp_path, monkeypatch):
    tiny = (Case(batch=1, heads=1, tokens=40, head_dim=8), Case(batch=1, heads=2, tokens=33, head_dim=8))
    monkeypatch.setattr(cases, "QUICK", tiny)
    monkeypatch.setattr(measurement, "can_measure", lambda device: False)
    path = tmp_path / "new" / "ops.csv"
    result = run("ops", "--quick", "--out", str(path))
    assert result.exit_code == 0, result.output
    with path.open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(ops.plan(tiny, "cpu")) >= 2 * 3 * 2
    assert tuple(written[0]) == COLUMNS
    assert all(float(row["median_ms"]) > 0 for row in written)
    for text in (
        "nalaformer",
        "published formula",
        "torch SDPA",
        "B1 H2 N33 D8",
        "threads",
        f"[1/{len(written)}] ",
        f"results: {path}",
    ):
        assert text in result.output


def test_a_run_that_is_stopped_keeps_what_it_measured(run, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "QUICK", (Case(batch=1, heads=1, tokens=40, head_dim=8),))
    measured = []

    def measure_two(measurement, *, seconds, prepared):
        measured.append(measurement)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return right(measurement, seconds=0, memory=False, prepared=prepared)

    right = runner.measure
    monkeypatch.setattr(runner, "measure", measure_two)
    assert run("ops", "--quick", "--out", str(tmp_path / "ops.csv")).exit_code != 0
    assert len((tmp_path / "ops.csv").read_text().splitlines()) == 1 + 2


def test_a_wrong_result_is_an_exit_code(run, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "QUICK", (Case(batch=1, heads=1, tokens=40, head_dim=8),))
    monkeypatch.setattr(ops, "relative_error", lambda measurement: 1.0)
    result = run("ops", "--quick", "--out", str(tmp_path / "ops.csv"))
    assert result.exit_code == 1
    assert "WRONG and not timed" in result.output


@pytest.mark.parametrize("arguments", [("ops", "--device", "tpu"), ("ops", "--quick", "--out", "/dev/null/a.csv")])
def test_a_wrong_value_is_one_line_and_exit_code_two(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as stopped:
        run_app(build_app, "python -m benchmarks")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
