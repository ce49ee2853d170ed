"""Linear attention beside softmax attention: what is timed is right, and what is wrong is not timed."""

import time

import pytest

from nalaformer import op_bench, timing
from nalaformer.timing import median_ms, times_ms

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = {"heads": 2, "head_dim": 8, "seconds": 0.0}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("feature_map", ["norm_aware", "relu"])
def test_both_are_timed(feature_map, causal, backward):
    found = op_bench.compare_with_softmax(300, feature_map=feature_map, causal=causal, backward=backward, **SHAPE)
    assert found.linear_ms > 0
    assert found.softmax_ms > 0


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_output_is_not_timed(monkeypatch, factor):
    right = op_bench.linear_attention
    # the reference is called in float64, and stays as it is
    monkeypatch.setattr(
        op_bench, "linear_attention", lambda q, *rest, **k: right(q, *rest, **k) * (factor if q.element_size() < 8 else 1)
    )
    monkeypatch.setattr(op_bench, "median_ms", lambda *_, **__: pytest.fail("was timed"))
    with pytest.raises(ArithmeticError, match="linear attention is off by"):
        op_bench.compare_with_softmax(20, **SHAPE)


def test_no_tokens_and_unknown_maps_are_refused():
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        op_bench.compare_with_softmax(0)
    with pytest.raises(ValueError, match="did you mean 'relu'"):
        op_bench.compare_with_softmax(8, feature_map="rely")


# ---- the clock


@pytest.mark.parametrize("slow", [1, 4])
def test_one_slow_call_does_not_count(slow, monkeypatch):
    # a clock of our own: on a busy machine every call may be slow
    clock, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call():
        calls.append(1)
        clock[0] += 0.5 if len(calls) == slow else 0.01

    assert median_ms(call, seconds=0.1) == pytest.approx(10)
    # one to warm up, then for a tenth of a second
    assert len(calls) == 1 + 10


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 4), (100.0, 21)])
def test_calls_are_repeated_within_the_limits(seconds, expected):
    calls = []
    times = times_ms(lambda: (calls.append(1), time.sleep(0.001)), seconds=seconds, least=3, most=20)
    assert len(calls) == expected
    assert len(times) == expected - 1


def test_limits_the_wrong_way_round_are_refused():
    with pytest.raises(ValueError, match="least <= most"):
        times_ms(lambda: None, least=5, most=3)
