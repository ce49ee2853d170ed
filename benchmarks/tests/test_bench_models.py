"""Whole backbones side by side: the plan, its order, and the sentences about the results."""

import csv

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import MODEL_VARIANTS, ModelMeasurement, describe_machine, measure, run_models, runner
from benchmarks import measurement as bench_measurement
from benchmarks import models as bench_models
from benchmarks.__main__ import build_app
from benchmarks.measurement import MEASURED, OUT_OF_MEMORY, WRONG, Result
from benchmarks.memory import can_measure
from benchmarks.models import (
    FORWARD,
    LINEAR,
    MALA,
    MALA_REFERENCE,
    MODEL_COLUMNS,
    RALA,
    RALA_REFERENCE,
    REFERENCE,
    RELEASED,
    SOFTMAX,
    TRAINING,
    model_bar_lines,
    model_bars,
    models_table,
    plan_models,
)
from nalaformer import get_backend, timing

TINY = {"embed_dims": (16, 32, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "projection": 32}


@pytest.fixture(autouse=True)
def one_thread():
    # threads that wait for each other crawl on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(bench_measurement, "can_measure", lambda device: False)


def make_measurement(variant=LINEAR, direction=TRAINING, size=32, device="cpu"):
    return ModelMeasurement(variant=variant, image_size=size, batch=2, direction=direction, device=device, changes=TINY)


def make_result(variant, ms, *, size, direction=TRAINING, outcome=MEASURED):
    return Result(measurement=make_measurement(variant, direction, size), outcome=outcome, median_ms=ms)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_run_writes_a_row_and_says_a_line_per_measurement(tmp_path, in_this_process):
    path, said = tmp_path / "new" / "models.csv", []
    results = run_models("cpu", path, (32,), seconds=0, changes=TINY, say=said.append)
    written = read(path)
    assert tuple(written[0]) == MODEL_COLUMNS
    assert {(row["variant"], row["direction"]) for row in written} == {
        (variant, direction) for variant in MODEL_VARIANTS for direction in (FORWARD, TRAINING)
    }
    assert len(written) == len(results) == 16
    for row in written:
        assert row["outcome"] == MEASURED
        assert row["dtype"] == "float32"
        assert float(row["images_per_second"]) == pytest.approx(2e3 / float(row["median_ms"]), rel=2e-3)
        # only the linear stages of the fast paths have something to be compared with
        assert bool(row["relative_error"]) == (row["variant"] in (LINEAR, RELEASED, MALA, RALA))
    assert any(line.startswith("[16/16] 32 px x 2") for line in said)
    assert said[-1] == f"results: {path}"


def test_a_run_that_is_stopped_keeps_what_it_measured(tmp_path, monkeypatch):
    def measure_two(measurement, *, seconds, prepared):
        if measurement.variant == SOFTMAX:
            raise KeyboardInterrupt
        return Result(measurement=measurement, outcome=MEASURED, median_ms=5.0)

    monkeypatch.setattr(runner, "measure", measure_two)
    monkeypatch.setattr(runner, "build_and_check", lambda measurement: None)
    with pytest.raises(KeyboardInterrupt):
        run_models("cpu", tmp_path / "a.csv", (32,), say=lambda line: None)
    assert [row["variant"] for row in read(tmp_path / "a.csv")] == [LINEAR, REFERENCE]


@pytest.mark.skipif(not can_measure("cpu"), reason="this system does not count peak memory")
def test_memory_is_measured_in_a_fresh_process():
    # the first stage alone keeps several maps of 64 x 64 tokens with 64 hidden channels: 2 images, 4 bytes
    found = measure(make_measurement(size=256), seconds=0)
    assert found.outcome == MEASURED, found.reason
    assert 10 < found.peak_extra_mib < 500


def test_what_the_bars_need_comes_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = plan_models("cuda")
    assert [(m.image_size, m.variant, m.direction) for m in plan[:6]] == [
        (size, variant, TRAINING) for size in (224, 1024) for variant in (LINEAR, REFERENCE, SOFTMAX)
    ]
    assert len(set(map(str, plan))) == len(plan) == 8 * 4 * 2
    assert {(m.image_size, m.batch) for m in plan} == {(224, 512), (512, 96), (1024, 24), (2048, 6)}
    assert {m.dtype for m in plan} == {torch.bfloat16}


def test_a_cpu_measures_one_size_unless_asked():
    assert {m.image_size for m in plan_models("cpu")} == {224}
    assert {m.image_size for m in plan_models("cpu", (96, 64))} == {64, 96}


@pytest.mark.parametrize(("device", "sizes", "rule"), [("tpu", None, "device must be"), ("cpu", (31,), "at least 32")])
def test_an_impossible_plan_raises(device, sizes, rule):
    with pytest.raises(ValueError, match=rule):
        plan_models(device, sizes)


def test_variants_differ_in_the_stages_and_the_backend_they_are_named_for(monkeypatch):
    found = {}

    def build_and_watch(measurement):
        model = build(measurement)
        stages = model.config.attention_stages
        model.register_forward_hook(lambda m, i, out: found.update({measurement.variant: (stages, get_backend())}))
        return model

    build = bench_models.build_variant
    monkeypatch.setattr(bench_models, "build_variant", build_and_watch)
    for name in MODEL_VARIANTS:
        make_measurement(name, FORWARD).make_call(None)()
    assert found == {
        LINEAR: ("llll", "auto"),
        REFERENCE: ("llll", "reference"),
        SOFTMAX: ("vvvv", "auto"),
        RELEASED: ("llvv", "auto"),
        **dict.fromkeys((MALA, RALA), ("llll", "auto")),
        **dict.fromkeys((MALA_REFERENCE, RALA_REFERENCE), ("llll", "reference")),
    }


def test_training_is_in_train_mode_and_forward_is_not(monkeypatch):
    modes = []

    def build_and_watch(measurement):
        model = build(measurement)
        model.register_forward_hook(lambda m, i, out: modes.append((m.training, torch.is_grad_enabled())))
        return model

    build = bench_models.build_variant
    monkeypatch.setattr(bench_models, "build_variant", build_and_watch)
    for direction in (TRAINING, FORWARD):
        make_measurement(direction=direction).make_call(None)()
    assert modes == [(True, True), (False, False)]


def test_training_differentiates_every_parameter():
    gradients = make_measurement().make_call(None)()
    parameters = list(bench_models.build_variant(make_measurement()).parameters())
    assert [g.shape for g in gradients] == [p.shape for p in parameters]
    assert all(g.isfinite().all() and g.any() for g in gradients)


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_wrong_logits_are_not_timed(factor, monkeypatch, in_this_process):
    def wrong(measurement):
        model = original(measurement)
        # wrong on the fast path alone
        model.register_forward_hook(lambda m, i, out: out if get_backend() == "reference" else out * factor)
        return model

    original = bench_models.build_variant
    monkeypatch.setattr(bench_models, "build_variant", wrong)
    found = measure(make_measurement(), seconds=0)
    assert (found.outcome, found.median_ms, found.per_second) == (WRONG, None, None)
    assert any(line.startswith("WRONG and not timed: 32 px x 2, linear, training") for line in model_bar_lines([found]))
    assert measure(make_measurement(REFERENCE), seconds=0).outcome == MEASURED


def test_too_little_memory_is_an_outcome(tmp_path, monkeypatch, in_this_process):
    def full(*_):
        def call():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")

        return call

    monkeypatch.setattr(bench_models, "make_backbone_call", full)
    found = measure(make_measurement(SOFTMAX), seconds=0)
    assert found.outcome == OUT_OF_MEMORY
    row = runner.make_row(found, describe_machine())
    assert (row["outcome"], row["images_per_second"], row["median_ms"]) == (OUT_OF_MEMORY, "", "")
    assert OUT_OF_MEMORY in models_table([found])[3]


def test_a_reference_path_without_memory_leaves_the_others_to_be_timed(monkeypatch, in_this_process):
    def fits_unless_reference(module, arguments):
        if get_backend() == "reference":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    def build_limited(measurement):
        model = original(measurement)
        model.register_forward_pre_hook(fits_unless_reference)
        return model

    original = bench_models.build_variant
    monkeypatch.setattr(bench_models, "build_variant", build_limited)
    found = measure(make_measurement(), seconds=0)
    assert (found.outcome, found.error) == (MEASURED, None)
    assert measure(make_measurement(REFERENCE), seconds=0).outcome == OUT_OF_MEMORY


@pytest.mark.parametrize("kind", [RuntimeError, Exception])
def test_another_error_is_told_with_its_reason(kind, monkeypatch, in_this_process):
    def raise_error(*_):
        raise kind("no kernel for\nthis")

    monkeypatch.setattr(bench_models, "make_backbone_call", raise_error)
    found = measure(make_measurement(SOFTMAX), seconds=0)
    assert model_bar_lines([found])[-1].endswith("softmax, training: failed: no kernel for this")


@pytest.mark.parametrize(
    ("reference_ms", "softmax_ms", "met"),
    [(30.0, 20.0, [True, True]), (29.0, 20.0, [False, True]), (30.0, 19.0, [True, False])],
)
def test_bars_compare_training_with_the_reference_at_224_and_softmax_at_1024(reference_ms, softmax_ms, met):
    results = [
        make_result(LINEAR, 10.0, size=224),
        make_result(REFERENCE, reference_ms, size=224),
        make_result(SOFTMAX, 1.0, size=224),
        make_result(LINEAR, 1e6, size=224, direction=FORWARD),
        make_result(LINEAR, 10.0, size=1024),
        make_result(REFERENCE, 1.0, size=1024),
        make_result(SOFTMAX, softmax_ms, size=1024),
    ]
    found = model_bars(results)
    assert [bar.is_met for bar in found] == met
    assert [bar.measured for bar in found] == [f"{reference_ms / 10:.2f}x", f"{softmax_ms / 10:.2f}x"]
    assert [("NOT met" in line) for line in model_bar_lines(results)] == [not is_met for is_met in met]


def test_a_bar_without_results_is_never_met():
    assert model_bars([make_result(LINEAR, 10.0, size=224)]) == []
    assert all("not measured" in line for line in model_bar_lines([]))
    results = [make_result(LINEAR, 10.0, size=1024), make_result(SOFTMAX, None, size=1024, outcome=OUT_OF_MEMORY)]
    (bar,) = model_bars(results)
    assert not bar.is_met
    assert OUT_OF_MEMORY in bar.measured


def test_eager_calls_are_timed_without_a_graph(monkeypatch):
    monkeypatch.setattr(timing, "_timed_on_gpu", timing._timed_on_cpu)
    monkeypatch.setattr(timing, "captured", lambda call: pytest.fail("captured"))
    assert len(timing.times_ms(lambda: None, device="cuda", seconds=0, capture=False)) == 3


def test_the_command_measures_the_sizes_it_is_given(monkeypatch, tmp_path):
    def planted_result(measurement, *, seconds, prepared):
        assert seconds == 0.5
        return Result(measurement=measurement, outcome=outcome, median_ms=5.0, error=0.5)

    monkeypatch.setattr(runner, "measure", planted_result)
    monkeypatch.setattr(runner, "build_and_check", lambda measurement: None)
    arguments = ["models", "--size", "64", "--size", "32", "--seconds", "0.5", "--out", str(tmp_path / "a.csv")]
    outcome = MEASURED
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    assert {row["image_size"] for row in read(tmp_path / "a.csv")} == {"32", "64"}
    assert max(map(len, done.output.split("results:")[0].splitlines())) <= 100
    outcome = WRONG
    assert CliRunner().invoke(build_app(), arguments).exit_code == 1
