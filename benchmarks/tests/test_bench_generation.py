"""Time and memory of a denoising step: the right networks are compared, and the sentences follow the results."""

from dataclasses import replace

import pytest
import torch

from benchmarks.generation import (
    COLOURS,
    DASHES,
    HEAD_SIZES,
    LAYOUTS,
    NORM_AWARE,
    SOFTMAX,
    StepMeasurement,
    comparison_lines,
    growth_lines,
    plan_generation,
    run_generation,
)
from benchmarks.image_cost import ChartStyle, draw_image_costs
from benchmarks.measurement import OUT_OF_MEMORY, Result
from nalaformer.machine import describe_machine

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"device": "cpu", "image_size": 64, "head_size": 72, "depth": 1, "width": 144}


def test_both_head_sizes_make_every_width():
    assert all(layout["width"] % size == 0 for layout in LAYOUTS.values() for size in HEAD_SIZES)
    # 256 x 256 tokens, and DiT-XL with its 16 heads of 72
    largest = StepMeasurement(**(TINY | LAYOUTS["cuda"] | {"image_size": 4096}), variant=NORM_AWARE)
    assert (largest.tokens, largest.width // 72, largest.depth) == (65_536, 16, 28)


def test_a_step_has_the_given_tokens_and_attention_heads():
    from nalaformer.attention import Attention

    for variant, head_size in ((NORM_AWARE, 72), (SOFTMAX, 72), (SOFTMAX, 48)):
        measurement = StepMeasurement(**(TINY | {"head_size": head_size}), variant=variant)
        network, seen = measurement.make_network(), []
        (attention,) = (module for module in network.modules() if isinstance(module, Attention))
        attention.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(given[0].shape))
        with torch.no_grad():
            out = network(*measurement.make_inputs())
        assert [tuple(shape) for shape in seen] == [(1, 16, 144)]
        assert (attention.head_dim, attention.num_heads) == (head_size, 144 // head_size)
        assert (attention.config.feature_map is None) == (variant == SOFTMAX)
        # a network that starts as zero would make every path right
        assert out.std() > 1e-3


def test_a_wrong_path_is_seen(monkeypatch):
    from nalaformer.ops import chunked

    measurement = StepMeasurement(**TINY, variant=NORM_AWARE)
    assert measurement.check(None) < 1e-5
    right = chunked.linear_attention
    # a factor would be lost in the norm that follows
    monkeypatch.setattr(chunked, "linear_attention", lambda *given, **options: right(*given, **options).flip(-1))
    assert measurement.check(None) > measurement.largest_error


def test_a_run_writes_every_result_and_a_plot(tmp_path, monkeypatch):
    # in this process: a fresh one takes seconds to start
    monkeypatch.setattr("benchmarks.measurement.can_measure", lambda device: False)
    said = []
    results = run_generation("cpu", tmp_path / "a.csv", [32, 64], seconds=0.01, depth=1, width=576, say=said.append)
    assert len(results) == len(plan_generation("cpu", [32, 64])) == 2 * 2 * 2
    assert all(result.is_right for result in results)
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + len(results)
    assert (tmp_path / "a.png").is_file()
    assert sum("times the time of softmax" in line for line in said) == 4
    assert sum("time grows as N^" in line for line in said) == 4


def make_result(variant, image_size=512, milliseconds=None, peak=None):
    measurement = StepMeasurement(**(TINY | {"image_size": image_size}), variant=variant)
    outcome = {"outcome": OUT_OF_MEMORY} if milliseconds is None else {}
    return Result(measurement=measurement, median_ms=milliseconds, peak_extra_mib=peak, **outcome)


def test_lines_say_how_much_less_and_how_it_grows(tmp_path):
    sizes = ((1024, 4.0, 100.0), (2048, 16.0, 400.0))
    results = [make_result(NORM_AWARE, *figures) for figures in sizes]
    results += [make_result(SOFTMAX, 1024, 8.0, 50.0), make_result(SOFTMAX, 2048)]
    first, second = comparison_lines(results)
    assert first == "4,096 tokens, heads of 72, norm-aware: 0.50 times the time of softmax, SDPA, 2.00 times its peak memory"
    assert second == "16,384 tokens, heads of 72, norm-aware: softmax, SDPA is out of memory"
    (growth,) = growth_lines(results)
    assert growth.startswith("heads of 72, norm-aware: time grows as N^1.00, peak memory grows as N^1.00")
    quadratic = [replace(results[0]), replace(results[1], median_ms=64.0)]
    assert "time grows as N^2.00" in growth_lines(quadratic)[0]
    # a variant without a figure is drawn by its name alone
    style = ChartStyle(title="a step", tokens="tokens", colours=COLOURS, dashes=DASHES)
    assert draw_image_costs(results, tmp_path / "a.png", describe_machine(), style).is_file()


@pytest.mark.parametrize("sizes", [[], [0], [100]])
def test_sizes_with_fractional_tokens_raise(sizes):
    with pytest.raises(ValueError, match="positive multiples of 16"):
        plan_generation("cpu", sizes)
