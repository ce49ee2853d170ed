"""The bench of hybrid attention over prompts, at a size where only its way is tried."""

from dataclasses import replace

import pytest
import torch

from benchmarks import prompts, runner
from benchmarks.measurement import Result
from benchmarks.prompts import SOFTMAX, TORCH, PromptShape, PromptStudy, checked_error, plan_prompts

SMALL = PromptShape(heads=2, key_heads=1, head_dim=8)
TOY = PromptStudy(shapes=(SMALL,), lengths=(40, 56), chunk_size=8, max_salient=8, checked=45, longest_torch=40, seconds=0.0)


def run_rows(study, deadline=1e18):
    rows = []
    plan, quiet = plan_prompts(study, "cpu"), lambda line: None
    runner.run_part(plan, seconds=study.seconds, add=lambda **row: rows.append(row), say=quiet, deadline=deadline)
    return rows


@pytest.mark.slow
def test_every_method_is_timed_both_ways_at_every_length():
    rows = run_rows(TOY)
    assert all(row["ms"] > 0 for row in rows)
    assert max(row["error"] for row in rows) < 2e-5
    timed = {(row["method"], row["length"], row["timed"]) for row in rows}
    both = ("forward", "forward+backward")
    lengths = {name: (40,) if name == TORCH else (40, 56) for name in TOY.methods}
    assert timed == {(name, length, way) for name in TOY.methods for length in lengths[name] for way in both}


def test_a_wrong_method_is_not_timed(monkeypatch):
    right = prompts.hybrid_attention

    def slightly_off(q, k, v, **options):
        out = right(q, k, v, **options)
        return out if q.dtype == torch.float64 else 1.01 * out

    monkeypatch.setattr(prompts, "hybrid_attention", slightly_off)
    assert {row["method"]: row["note"] for row in run_rows(TOY)} == {
        name: "" if name == SOFTMAX else "wrong" for name in TOY.methods
    }


def test_gradients_are_compared_too(monkeypatch):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    right = prompts.hybrid_attention
    monkeypatch.setattr(
        prompts,
        "hybrid_attention",
        lambda q, k, v, **o: right(q if q.dtype == torch.float64 else Doubled.apply(q), k, v, **o),
    )
    settings = TOY.methods["window"]
    assert checked_error("window", settings, SMALL, 45, device="cpu", dtype=torch.float32) == pytest.approx(1.0, abs=1e-3)


def test_nothing_is_begun_after_the_deadline():
    assert run_rows(TOY, deadline=0.0) == []


def test_the_cap_on_salient_tokens_belongs_to_what_is_compared(monkeypatch):
    right = prompts.hybrid_attention

    def without_a_cap(q, k, v, *, settings, **options):
        settings = settings if q.dtype == torch.float64 else replace(settings, max_salient=0)
        return right(q, k, v, settings=settings, **options)

    monkeypatch.setattr(prompts, "hybrid_attention", without_a_cap)
    settings = TOY.methods["still, no cap"]
    for cap, is_wrong in ((0, False), (1000, True)):
        # more than the checked tokens could ever fill
        given = replace(settings, max_salient=cap)
        error = checked_error("still", given, SMALL, 45, device="cpu", dtype=torch.float32)
        assert (error > 1e-2) == is_wrong, (cap, error)


def test_no_length_is_begun_after_the_deadline(monkeypatch):
    clock = [0.0]

    def measure(measurement, **_):
        clock[0] += 1.0
        return Result(measurement=measurement, median_ms=1.0)

    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(runner, "measure", measure)
    rows = run_rows(replace(TOY, lengths=(40, 48, 56)), deadline=2.5)
    # the third measurement begins in time, nothing after it does
    found = [(row["method"], row["length"], row["timed"]) for row in rows]
    assert found == [(SOFTMAX, 40, "forward"), (SOFTMAX, 40, "forward+backward"), (SOFTMAX, 48, "forward")]
