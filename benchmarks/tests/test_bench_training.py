"""Training steps side by side: what is measured is right, learns, and lands in the file."""

import csv

import pytest

from benchmarks import language_training as bench_training
from benchmarks import run_training
from benchmarks.language_training import FORMS, MODELS, TRAINING_COLUMNS, kernel_lines, make_step, plan_training
from benchmarks.measurement import MEASURED, WRONG

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"size": "nano", "changes": {"vocab_size": 50, "num_hidden_layers": 1}, "shapes": ["2x12"]}


def test_run_writes_a_row_for_each_measurement(tmp_path):
    said = []
    results = run_training("cpu", tmp_path / "training.csv", seconds=0.01, say=said.append, **SMALL)
    assert {result.outcome for result in results} == {MEASURED}
    with (tmp_path / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == TRAINING_COLUMNS
    assert [row["model"] for row in rows] == list(MODELS)
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    # a peer has nothing to be compared with
    assert [row["model"] for row in rows if not row["relative_error"]] == ["llama"]
    assert said[-1].startswith("results: ")


def test_a_wrong_gradient_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_training, "checked_error", lambda measurement: 0.5)
    (result,) = run_training("cpu", tmp_path / "a.csv", say=lambda line: None, models=["linear"], **SMALL)
    assert (result.outcome, result.median_ms) == (WRONG, None)


@pytest.mark.parametrize("model", MODELS)
def test_measured_steps_learn(model):
    (measurement,) = plan_training("cpu", models=[model], **SMALL)
    step = make_step(measurement)
    losses = [step().item() for _ in range(12)]
    assert losses[-1] < losses[0]


def test_profiled_kernels_come_longest_first():
    (measurement,) = plan_training("cpu", models=["softmax"], **SMALL)
    times = [float(line.split()[0]) for line in kernel_lines(make_step(measurement), "cpu")]
    assert times == sorted(times, reverse=True)
    assert len(times) > 5


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"models": ["linaer"]}, "linear"),
        ({"forms": ["compiled"]}, "|".join(FORMS)),
        ({"shapes": ["16"]}, "rows x tokens.*got '16'"),
        ({"shapes": ["2x1"]}, "at least two tokens"),
    ],
)
def test_wrong_plans_are_named(plan, message):
    with pytest.raises((ValueError, KeyError), match=message):
        plan_training("cpu", **plan)
