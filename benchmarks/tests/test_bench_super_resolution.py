"""Memory and time of enlarging one image: all variants compute one function, and the sentences follow the results."""

from dataclasses import replace

import pytest
import torch

from benchmarks.image_cost import draw_image_costs
from benchmarks.measurement import OUT_OF_MEMORY, Result
from benchmarks.models import FORWARD, TRAINING
from benchmarks.super_resolution import (
    ATTENTION,
    FUSED,
    MATERIALISED,
    NORM_AWARE,
    STYLE,
    EnlargementMeasurement,
    plan_super_resolution,
    run_super_resolution,
    saving_lines,
)

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"device": "cpu", "side": 12, "direction": FORWARD, "model": "super_resolution_tiny"}


def test_materialised_softmax_is_torchs():
    materialised = EnlargementMeasurement(variant=MATERIALISED, **TINY)
    fused = replace(materialised, variant=FUSED)
    low, _ = fused.make_images()
    with torch.no_grad():
        found, expected = (measurement.make_model()(low) for measurement in (materialised, fused))
    assert torch.allclose(found, expected, atol=1e-5)
    assert materialised.check(None) < 1e-5


def test_a_wrong_path_is_seen(monkeypatch):
    measurement = EnlargementMeasurement(variant=MATERIALISED, **TINY)
    monkeypatch.setattr("benchmarks.super_resolution.MaterialisedSoftmax._attend_globally", lambda self, q, k, v, *_: v)
    assert measurement.check(None) > measurement.largest_error


def test_materialized_softmax_stores_all_pair_weights():
    largest = {}
    for variant in (NORM_AWARE, MATERIALISED):
        kept = []
        measurement = EnlargementMeasurement(variant=variant, **(TINY | {"direction": TRAINING, "side": 16}))
        pack = kept.append
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, pack=pack: pack(tensor.numel()) or tensor, lambda t: t):
            measurement.make_call(None)()
        largest[variant] = max(kept)
    # the materialized weights have two heads
    assert largest[NORM_AWARE] < 256**2 < largest[MATERIALISED] == 2 * 256**2


def test_a_run_writes_every_result_and_a_plot(tmp_path, monkeypatch):
    # in this process: a fresh one takes seconds to start
    monkeypatch.setattr("benchmarks.measurement.can_measure", lambda device: False)
    said = []
    options = {"seconds": 0.01, "model": "super_resolution_tiny", "say": said.append}
    results = run_super_resolution("cpu", tmp_path / "a.csv", [8], **options)
    assert len(results) == len(plan_super_resolution("cpu", [8])) == 2 * len(ATTENTION)
    assert all(result.is_right for result in results)
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + len(results)
    assert (tmp_path / "a.png").is_file()


def make_results(peaks):
    for variant, peak in peaks.items():
        measurement = EnlargementMeasurement(variant=variant, **(TINY | {"side": 264}))
        if peak is None:
            yield Result(measurement=measurement, outcome=OUT_OF_MEMORY)
        else:
            yield Result(measurement=measurement, median_ms=1.0, peak_extra_mib=peak)


def test_the_saving_is_said_against_each_softmax(tmp_path):
    results = list(make_results({NORM_AWARE: 100.0, MATERIALISED: None, FUSED: 125.0}))
    lines = saving_lines(results)
    assert lines[0] == "69,696 tokens, forward, norm-aware: softmax, materialised is out of memory (92.3% less, published)"
    assert lines[1].startswith("69,696 tokens, forward, norm-aware: 20.0% less peak memory than softmax, SDPA (92.3%")
    assert saving_lines(list(make_results({NORM_AWARE: 10.0, MATERIALISED: 100.0})))[0].count("90.0% less") == 1
    assert saving_lines(list(make_results({NORM_AWARE: 15.0, FUSED: 10.0})))[0].count("50.0% more") == 1
    # a variant without a figure is drawn by its name alone
    from nalaformer.machine import describe_machine

    assert draw_image_costs(results, tmp_path / "a.png", describe_machine(), STYLE).is_file()
