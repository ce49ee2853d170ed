"""The runner of all benchmarks: what is shared, what is an outcome, and what stands in the files."""

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks import measurement, runner
from benchmarks.cases import Case
from benchmarks.generation import GENERATION_COLUMNS, plan_generation
from benchmarks.language import LANGUAGE_COLUMNS, LanguageMeasurement, plan_language
from benchmarks.language_training import TRAINING_COLUMNS, plan_training
from benchmarks.measurement import FAILED, MEASURED, OUT_OF_MEMORY, WRONG, CallMeasurement, Result
from benchmarks.models import MODEL_COLUMNS, plan_models
from benchmarks.ops import plan
from benchmarks.ops_report import COLUMNS
from benchmarks.super_resolution import SUPER_RESOLUTION_COLUMNS, plan_super_resolution
from nalaformer.machine import describe_machine
from research.linearization import Rows
from research.scoreboard.report import COLUMNS as SCOREBOARD_COLUMNS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def time_alone(monkeypatch):
    # counting memory takes longer than all the rest
    monkeypatch.setattr(measurement, "can_measure", lambda device: False)


@dataclass(frozen=True, kw_only=True)
class Fake(CallMeasurement):
    """Notes what is asked of it."""

    device: str = "cpu"
    name: str = "a"
    number: int = 0
    off: float = 0.0
    fails: tuple[str, Exception] | None = None
    asked: list = field(default_factory=list, compare=False)
    largest_error = 0.1

    @property
    def label(self):
        return f"{self.name} {self.number}"

    @property
    def subject(self):
        return self.name

    def _note(self, what):
        self.asked.append(f"{what} {self.name}")
        if self.fails is not None and self.fails[0] == what:
            raise self.fails[1]

    def build(self):
        self._note("build")
        return f"built {self.name}"

    def check(self, built):
        assert built == f"built {self.name}"
        self._note("check")
        return self.off

    def make_call(self, built):
        assert built == f"built {self.name}"
        self._note("time")
        return lambda: None

    def row(self, result):
        return {"part": "fake", "length": self.number}

    def describe(self, result):
        return "fast"


def collect_results(*measurements, **options):
    return list(runner.run_measurements(measurements, seconds=0.0, **options))


def test_consecutive_measurements_build_and_check_a_subject_once():
    asked = []
    order = (("a", 0), ("a", 1), ("b", 2), ("a", 3))
    found = collect_results(*(Fake(name=name, number=number, asked=asked) for name, number in order))
    built = [entry for entry in asked if not entry.startswith("time")]
    assert built == ["build a", "check a", "build b", "check b", "build a", "check a"]
    assert sum(entry.startswith("time") for entry in asked) == 4
    assert [result.measurement.number for result in found] == [0, 1, 2, 3]


@pytest.mark.parametrize("off", [0.2, math.nan])
def test_a_wrong_subject_is_not_timed(off):
    asked = []
    found = collect_results(*(Fake(number=number, off=off, asked=asked) for number in (0, 1)))
    assert [(result.outcome, result.median_ms) for result in found] == [(WRONG, None)] * 2
    assert asked == ["build a", "check a"]


@pytest.mark.parametrize("where", ["build", "check", "time"])
@pytest.mark.parametrize(
    ("error", "outcome"), [(RuntimeError("no\nkernel"), FAILED), (MemoryError("full"), OUT_OF_MEMORY), (KeyError("x"), FAILED)]
)
def test_an_error_is_an_outcome_wherever_it_comes_from_and_the_others_run(where, error, outcome):
    broken, right = collect_results(Fake(fails=(where, error)), Fake(name="b"))
    assert (broken.outcome, broken.median_ms) == (outcome, None)
    assert (right.outcome, right.error) == (MEASURED, 0.0)


def test_a_missing_package_stops_the_run():
    with pytest.raises(ModuleNotFoundError, match="timm"):
        collect_results(Fake(fails=("build", ModuleNotFoundError("timm"))))


def test_a_study_part_reports_what_its_deadline_skipped():
    rows, said = [], []
    plan_of_two = [Fake(number=number) for number in (0, 1)]
    runner.run_part(plan_of_two, seconds=0.0, add=lambda **row: rows.append(row), say=said.append, deadline=-1.0)
    assert (rows, said) == ([], ["a 0: not begun, the time is over; 2 measurements are left"])
    runner.run_part(plan_of_two, seconds=0.0, add=lambda **row: rows.append(row), say=said.append, deadline=math.inf)
    assert [(row["length"], row["error"], row["note"]) for row in rows] == [(0, 0.0, ""), (1, 0.0, "")]
    assert said[1:] == ["a 0: fast", "a 1: fast"]


def test_an_unwritable_path_raises_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    asked = []
    with pytest.raises(OSError, match="file"):
        list(
            runner.record_results([Fake(asked=asked)], tmp_path / "file" / "a.csv", ("part",), describe_machine(), seconds=0.0)
        )
    assert asked == []


TABLES = {
    "ops": (COLUMNS, lambda: plan([Case(batch=1, heads=1, tokens=20)], "cpu")[0]),
    "models": (MODEL_COLUMNS, lambda: plan_models("cpu")[0]),
    "language": (LANGUAGE_COLUMNS, lambda: plan_language("cpu")[0]),
    "super_resolution": (SUPER_RESOLUTION_COLUMNS, lambda: plan_super_resolution("cpu")[0]),
    "training": (TRAINING_COLUMNS, lambda: plan_training("cpu")[0]),
    "generation": (GENERATION_COLUMNS, lambda: plan_generation("cpu")[0]),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_benchmark_or_the_runner_fills_every_column(name):
    columns, make = TABLES[name]
    row = runner.make_row(Result(measurement=make(), median_ms=2.0, error=0.5), describe_machine())
    assert set(columns) <= set(row)
    assert (row["median_ms"], row["relative_error"]) == ("2", "0.5")
    assert row["torch"]


def test_earlier_files_have_columns_that_are_still_written():
    known = {name: columns for name, (columns, _) in TABLES.items()}
    known |= {"backbone_peers": MODEL_COLUMNS, "scoreboard": SCOREBOARD_COLUMNS}
    known["linearization"] = (*Rows.COLUMNS, *describe_machine().columns("cpu"))
    files = sorted(RESULTS.glob("*.csv"))
    assert len(files) >= 5
    for path in files:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        columns = next(columns for name, columns in known.items() if path.stem.startswith(name))
        assert header == [name for name in columns if name in header], path.name


def test_a_layer_over_a_prompt_counts_all_its_tokens():
    given = {"mixer": "linear", "batch": 2, "context": 100, "device": "cpu", "size": "nano"}
    prefill, decode = (LanguageMeasurement(what=what, **given) for what in ("prefill of one layer", "decode"))
    assert [Result(measurement=m, median_ms=10.0).per_second for m in (prefill, decode)] == [20_000, 200]
