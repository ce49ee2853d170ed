"""Language models side by side: the plan, and the sentences about the results."""

import csv
from dataclasses import replace

import pytest
import torch

from benchmarks import Result, run_language
from benchmarks import language as bench_language
from benchmarks.language import (
    DECODE,
    LANGUAGE_COLUMNS,
    PREFILL,
    RANDOM,
    REAL,
    build_model,
    language_bars,
    language_lines,
    make_cache,
    make_step,
    plan_language,
)
from benchmarks.measurement import MEASURED, WRONG

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"size": "nano", "changes": {"vocab_size": 50}, "contexts": (16, 2000), "prefill": 100}


def test_run_writes_a_row_for_each_measurement_and_a_plot(tmp_path):
    said = []
    results = run_language("cpu", tmp_path / "language.csv", seconds=0.01, say=said.append, **SMALL)
    assert {result.outcome for result in results} == {MEASURED}
    with (tmp_path / "language.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == LANGUAGE_COLUMNS
    assert len(rows) == len(results) == len(bench_language.MIXERS) * (1 + 3)
    assert all(float(row["median_ms"]) > 0 and float(row["tokens_per_second"]) > 0 for row in rows)
    assert all(float(row["cache_mib"]) > 0 for row in rows if row["what"] == DECODE)
    assert (tmp_path / "language.png").stat().st_size > 10_000
    assert said[-1].startswith("results: ")


@pytest.mark.parametrize("mixer", bench_language.MIXERS)
def test_a_random_cache_has_real_shapes(mixer):
    plan = plan_language("cpu", **SMALL | {"contexts": (64,)})
    real, random = (m for m in plan if m.what == DECODE and m.mixer == mixer)
    assert (real.filled, random.filled) == (REAL, RANDOM)
    model = build_model(real)
    caches = [make_cache(m, model) for m in (real, random)]
    shapes = [{name: (x.shape, x.dtype) for name, x in cache.tensors().items()} for cache in caches]
    assert shapes[0] == shapes[1]
    assert [cache.get_seq_length() for cache in caches] == [64, 64]


@pytest.mark.parametrize("mixer", bench_language.MIXERS)
def test_measured_step_computes_what_generation_does(mixer):
    measurement = next(m for m in plan_language("cpu", **SMALL) if (m.mixer, m.filled) == (mixer, REAL))
    model = build_model(measurement)
    step = make_step(measurement, model, make_cache(measurement, model))
    prompt = bench_language.make_tokens(measurement, model, 16)
    token = bench_language.make_tokens(measurement, model, 1)
    with torch.no_grad():
        expected = model(torch.cat((prompt, token), dim=1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(step(), expected, rtol=1e-4, atol=1e-5)


def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_language, "checked_error", lambda measurement: float("nan"))
    results = run_language("cpu", tmp_path / "language.csv", seconds=0.01, say=lambda line: None, **SMALL)
    assert {result.outcome for result in results} == {WRONG}
    assert all(result.median_ms is None for result in results)
    assert not (tmp_path / "language.png").exists()


def results_with(times: dict[str, tuple[float, float]], prefills: dict[str, float]) -> list[Result]:
    found = []
    for m in plan_language("cpu", **SMALL):
        milliseconds = prefills[m.mixer] if m.what == PREFILL else times[m.mixer][m.context > 16]
        found.append(Result(measurement=m, outcome=MEASURED, median_ms=milliseconds, cache_mib=1.0))
    return found


def test_bars_are_flat_decoding_one_size_and_a_fast_prefill():
    times = {"linear": (1.0, 1.05), "forgetting": (1.0, 1.0), "gated_delta": (1.0, 1.2), "softmax": (1.0, 9.0)}
    results = results_with(times, {"linear": 1.0, "forgetting": 1.1, "gated_delta": 3.0, "softmax": 6.0})
    met = {bar.promise.split(" (")[0].split(" at least")[0]: bar.is_met for bar in language_bars(results)}
    span = "from 16 to 2,000 tokens, batch 1"
    assert met == {
        f"linear: time per token flat {span}": True,
        f"forgetting: time per token flat {span}": True,
        f"gated_delta: time per token flat {span}": False,
        f"linear: cache of one size {span}": True,
        f"forgetting: cache of one size {span}": True,
        f"gated_delta: cache of one size {span}": True,
        "linear: a layer over 100 tokens": True,
        "forgetting: a layer over 100 tokens": True,
        "gated_delta: a layer over 100 tokens": False,
    }
    grown = [replace(r, cache_mib=2.0) if r.measurement.context == 2000 else r for r in results]
    assert not any(bar.is_met for bar in language_bars(grown) if "one size" in bar.promise)
    assert sum("NOT met" in line for line in language_lines(results)) == 2


def test_plans_that_cannot_be_measured_raise():
    with pytest.raises(ValueError, match="device must be one of"):
        plan_language("tpu")
    with pytest.raises(ValueError, match="at least 2 tokens"):
        plan_language("cpu", contexts=(1,))
