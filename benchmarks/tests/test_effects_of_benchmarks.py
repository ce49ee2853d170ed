"""Every option of `python -m benchmarks`: what is measured, for how long, and where it is written. Nothing is timed here."""

import csv
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import Case, Result, cases, runner
from benchmarks import language as bench_language
from benchmarks import language_training as bench_training
from benchmarks.__main__ import build_app
from helpers.option_effects import Effects, options_of_command
from nalaformer.models.language import NaLaConfig

pytestmark = pytest.mark.usefixtures("one_thread")
BENCH = Effects(
    f"{name}.{option}"
    for name in ("ops", "models", "language", "training")
    for option in options_of_command(name, build=build_app)
)


def test_every_option_has_an_effect_test():
    assert BENCH.missing() == []


def run(*arguments):
    done = CliRunner().invoke(build_app(), list(map(str, arguments)))
    assert done.exit_code == 0, f"{done.output} {done.exception!r}"


def read_rows(path):
    with Path(path).open() as file:
        return list(csv.DictReader(file))


@BENCH.of("ops.quick", "ops.out", "ops.shape", "ops.seconds")
def test_bench_ops_measures_its_cases_into_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cases, "QUICK", (Case(batch=1, heads=1, tokens=20, head_dim=8),))
    monkeypatch.setitem(cases.CASES, "cpu", (Case(batch=1, heads=1, tokens=24, head_dim=8),))
    asked = []

    def measure(measurement, *, seconds, prepared):
        asked.append(seconds)
        return right(measurement, seconds=0, memory=False, prepared=prepared)

    right = runner.measure
    monkeypatch.setattr(runner, "measure", measure)
    run("ops", "--quick", "--out", tmp_path / "quick.csv")
    assert {row["shape"] for row in read_rows(tmp_path / "quick.csv")} == {"B1 H1 N20 D8"}
    assert set(asked) == {0.3}
    run("ops")
    assert {row["shape"] for row in read_rows("benchmarks/results/ops_cpu.csv")} == {"B1 H1 N24 D8"}
    assert asked[-1] == 2.0
    two = tuple(Case(batch=1, heads=1, tokens=tokens, head_dim=8, beside_softmax=True) for tokens in (24, 28))
    monkeypatch.setitem(cases.CASES, "cpu", two)
    run("ops", "--shape", "B1 H1 N28 D8", "--seconds", 0.1)
    written = read_rows("benchmarks/results/ops_cpu.csv")
    assert {row["shape"] for row in written} == {"B1 H1 N28 D8"}
    assert {row["implementation"] for row in written} == {"nalaformer", "torch SDPA"}
    assert asked[-1] == 0.1


def test_a_shape_that_is_no_case_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"B1 H4 N4096 D64"):
        cases.cases_for("cpu", shapes=["B1 H4 N4097 D64"])


def test_an_eager_call_is_timed_on_the_host(monkeypatch):
    from benchmarks import OpMeasurement, measure, ops

    asked = []
    monkeypatch.setattr(ops, "host_ms", lambda call, *, seconds: asked.append(call()) or 0.5)
    case = Case(batch=1, heads=1, tokens=20, head_dim=8, beside_softmax=True, eager=True)
    found = measure(OpMeasurement(case=case, implementation="nalaformer", direction="forward", device="cpu"), seconds=0.1)
    assert found.median_ms == 0.5
    assert asked[0].shape == (1, 20, 1, 8)
    assert found.measurement.row(found)["op"] == "bidirectional attention, eager call"


@BENCH.of("models.size", "models.seconds", "models.out")
def test_bench_models_measures_its_sizes_for_so_long_into_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def measure(measurement, *, seconds, prepared):
        asked.append(seconds)
        return Result(measurement=measurement, median_ms=5.0)

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(runner, "build_and_check", lambda measurement: None)
    run("models", "--size", 64, "--size", 32, "--seconds", 0.5, "--out", "mine.csv")
    assert {row["image_size"] for row in read_rows("mine.csv")} == {"32", "64"}
    assert set(asked) == {0.5}
    run("models")
    assert {row["image_size"] for row in read_rows("benchmarks/results/models_cpu.csv")} == {"224"}


@BENCH.of("models.case")
def test_bench_models_measures_the_case_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "measure", lambda measurement, **_: Result(measurement=measurement, median_ms=5.0))
    monkeypatch.setattr(runner, "build_and_check", lambda measurement: None)
    run("models", "--case", "super_resolution", "--size", 20)
    assert {row["tokens"] for row in read_rows("benchmarks/results/super_resolution_cpu.csv")} == {"400"}
    assert Path("benchmarks/results/super_resolution_cpu.png").is_file()
    run("models", "--case", "generation", "--size", 320)
    assert {row["tokens"] for row in read_rows("benchmarks/results/generation_cpu.csv")} == {"400"}
    assert Path("benchmarks/results/generation_cpu.png").is_file()


@BENCH.of(
    *("language.size", "language.context", "language.batch", "language.prefill"),
    *("language.seconds", "language.out"),
)
def test_bench_language_measures_its_plan_for_so_long_into_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def measure(measurement, *, seconds, prepared):
        asked.append((seconds, prepared.built.config.hidden_size))
        return Result(measurement=measurement, median_ms=5.0, cache_mib=1.0)

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(bench_language, "checked_error", lambda measurement: 0.0)
    monkeypatch.setattr("benchmarks.language.draw_language", lambda *_: None)
    plan = ("--context", 16, "--context", 32, "--batch", 2, "--batch", 3, "--prefill", 77)
    run("language", "--size", "nano", *plan, "--seconds", 0.25, "--out", "mine.csv")
    rows = read_rows("mine.csv")
    decoded = {(row["batch"], row["context"]) for row in rows if row["what"] == bench_language.DECODE}
    assert decoded == {("2", "16"), ("2", "32"), ("3", "16"), ("3", "32")}
    assert {row["context"] for row in rows if row["what"] == bench_language.PREFILL} == {"77"}
    assert set(asked) == {(0.25, NaLaConfig.from_size("nano").hidden_size)}
    run("language", *plan)
    assert Path("benchmarks/results/language_cpu.csv").is_file()
    assert asked[-1] == (0.5, NaLaConfig.from_size("tiny").hidden_size)


@BENCH.of(*(f"training.{name}" for name in ("size", "model", "form", "shape", "seconds", "out", "profile")))
def test_bench_training_measures_its_plan_for_so_long_into_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked, shown = [], []

    def measure(measurement, *, seconds, prepared):
        asked.append(seconds)
        return Result(measurement=measurement, median_ms=5.0)

    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(runner, "build_and_check", lambda measurement: None)
    monkeypatch.setattr(bench_training, "make_step", lambda measurement: measurement)
    monkeypatch.setattr(bench_training, "kernel_lines", lambda step, device: shown.append(step.label) or [])
    plan = ("--model", "delta", "--model", "llama", "--form", "blocks", "--form", "whole", "--shape", "3x16", "--shape", "1x32")
    run("training", "--size", "tiny", *plan, "--seconds", 0.25, "--out", "mine.csv")
    rows = read_rows("mine.csv")
    assert {row["size"] for row in rows} == {"tiny"}
    assert {(row["model"], row["form"]) for row in rows} == {(m, f) for m in ("delta", "llama") for f in ("blocks", "whole")}
    assert {(row["batch"], row["context"]) for row in rows} == {("3", "16"), ("1", "32")}
    assert (set(asked), shown) == ({0.25}, [])
    run("training", "--profile")
    assert {row["form"] for row in read_rows("benchmarks/results/training_cpu.csv")} == {"eager"}
    assert asked[-1] == 1.5
    assert shown == ["linear, eager, 2 x 128 tokens"]


@BENCH.of("ops.device", "models.device", "language.device", "training.device")
def test_a_benchmark_without_its_device_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("ops", "models", "language", "training"):
        refused = CliRunner().invoke(build_app(), [name, "--device", "cuda", "--out", str(tmp_path / "a.csv")])
        assert "no CUDA device was found" in str(refused.exception)


def test_a_fractional_mebibyte_is_not_written_as_zero():
    from benchmarks.language_picture import in_digits

    assert [in_digits(value, 0) for value in (0.1, 1, 5, 20_000)] == ["0.1", "1", "5", "20,000"]
