"""Linear attention beside softmax attention: what is timed is right, and what is wrong is not timed."""

import pytest

from nalaformer import op_bench

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
