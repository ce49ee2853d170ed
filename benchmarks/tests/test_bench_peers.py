"""Peers, decoding steps and causal cases: each is judged by its own truth."""

from dataclasses import replace

import pytest
import torch

from benchmarks import IMPLEMENTATIONS, Case, OpMeasurement, cases_for, measure, skipped_peers
from benchmarks.implementations import OURS, Implementation
from benchmarks.measurement import FAILED
from benchmarks.ops import BOTH, DIRECTIONS, FORWARD, plan
from benchmarks.ops_report import summary_lines
from benchmarks.peers import features_oracle
from benchmarks.runner import are_ours_right
from benchmarks.tests.bench_results import TINY, result

pytestmark = pytest.mark.usefixtures("one_thread")


def test_causal_case_is_measured_against_the_causal_truth():
    case = Case(batch=1, heads=2, tokens=40, head_dim=8, causal=True)
    for name in (OURS, "torch SDPA"):
        found = measure(OpMeasurement(case=case, implementation=name, direction=BOTH, device="cpu"), seconds=0, memory=False)
        assert found.is_right
    assert not IMPLEMENTATIONS["published formula"].runs(case, "cpu")
    inputs = case.inputs(device="cpu", dtype=torch.float32)[:3]
    full = Case(batch=1, heads=2, tokens=40, head_dim=8)
    causal, not_causal = (IMPLEMENTATIONS[OURS].make(each)(*inputs) for each in (case, full))
    assert not torch.allclose(causal, not_causal, atol=1e-2)


def attend_to_features(q, k, v):
    """Compute attention as a peer does: from features, heads first, causal, without our eps."""
    weights = (q @ k.transpose(-2, -1)).tril()
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-10)


def with_peer(monkeypatch, attend, package="json", **options):
    peer = Implementation(
        make=lambda case: attend,
        oracle=features_oracle,
        causal=True,
        bidirectional=False,
        heads_first=True,
        features=True,
        package=package,
        **options,
    )
    monkeypatch.setitem(IMPLEMENTATIONS._entries, "peer", peer)


CAUSAL = Case(batch=2, heads=2, tokens=37, head_dim=8, causal=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_peer_is_measured_on_ready_made_features(direction, monkeypatch):
    shapes = []

    def attend(q, k, v):
        shapes.append((q.shape, k.shape, v.shape))
        return attend_to_features(q, k, v)

    with_peer(monkeypatch, attend)
    assert "peer" not in {m.implementation for m in plan([TINY], "cpu")}
    (planned,) = [m for m in plan([CAUSAL], "cpu") if (m.implementation, m.direction) == ("peer", direction)]
    found = measure(planned, seconds=0, memory=False)
    assert found.is_right
    assert found.error < 2e-6
    assert found.median_ms > 0
    assert set(shapes) == {((2, 2, 37, 16), (2, 2, 37, 16), (2, 2, 37, 8))}
    assert "peer" not in skipped_peers("cpu")


def test_a_peer_without_its_package_is_skipped_with_the_reason(monkeypatch):
    with_peer(monkeypatch, attend_to_features, package="no_such_package.ops")
    assert "peer" not in {m.implementation for m in plan([CAUSAL], "cpu")}
    lines = summary_lines([result(CAUSAL)], skipped_peers("cpu"))
    assert any("left out: peer" in line and "No module named 'no_such_package'" in line for line in lines)


def test_peers_for_a_gpu_are_neither_asked_for_nor_missed_on_a_cpu(monkeypatch):
    monkeypatch.setattr(Implementation, "why_missing", lambda self: pytest.fail("imported") if self.package else None)
    assert skipped_peers("cpu") == {}
    assert not any(m.implementation.startswith(("fla", "flash-bla")) for m in plan(cases_for("cpu"), "cpu"))


def test_a_peer_that_breaks_does_not_stop_the_run(monkeypatch):
    def attend(q, k, v):
        raise RuntimeError("no such\nkernel image")

    with_peer(monkeypatch, attend)
    found = measure(OpMeasurement(case=CAUSAL, implementation="peer", direction=FORWARD, device="cpu"), seconds=0)
    assert (found.outcome, found.reason) == (FAILED, "no such kernel image")
    assert not found.is_right
    assert are_ours_right([found])
    assert any("FAILED and not timed: peer" in line for line in summary_lines([found]))


def test_a_wrong_peer_is_not_timed_and_a_rough_one_is(monkeypatch):
    measurement = OpMeasurement(case=CAUSAL, implementation="peer", direction=FORWARD, device="cpu")
    with_peer(monkeypatch, lambda q, k, v: attend_to_features(q, k, v) * (1 + 1e-5), slack=10.0)
    rough = measure(measurement, seconds=0, memory=False)
    assert 2e-6 < rough.error < 2e-5
    assert rough.median_ms > 0
    with_peer(monkeypatch, lambda q, k, v: attend_to_features(q, k, v) * (1 + 1e-4), slack=10.0)
    assert measure(measurement, seconds=0, memory=False).median_ms is None


def test_the_peer_oracle_is_normalized_attention_over_all_keys_too():
    q, k, v = (torch.rand(1, 5, 1, 4, dtype=torch.float64) for _ in range(3))
    weights = torch.einsum("bihf,bjhf->bhij", q, k)
    expected = torch.einsum("bhij,bjhd->bihd", weights / (weights.sum(-1, keepdim=True) + 5e-6), v)
    torch.testing.assert_close(features_oracle(q, k, v, None), expected)


@pytest.mark.parametrize("name", [OURS, "torch SDPA"])
def test_a_decoding_step_is_checked_against_all_tokens_and_timed(name):
    case = Case(batch=2, heads=2, tokens=19, head_dim=8, step=True)
    measured = [m for m in plan([case], "cpu") if m.implementation == name]
    assert [m.direction for m in measured] == [FORWARD]
    found = measure(measured[0], seconds=0)
    assert found.is_right
    assert found.median_ms > 0
    assert found.peak_extra_mib is None
    assert any(f"{name}, one step of decoding" in line and "microseconds" in line for line in summary_lines([found]))


def test_a_step_that_drops_a_token_is_wrong(monkeypatch):
    ours = IMPLEMENTATIONS[OURS]
    forgetful = replace(ours, make_step=lambda q, k, v: ours.make_step(q, k[:, 1:], v[:, 1:]))
    monkeypatch.setitem(IMPLEMENTATIONS._entries, "forgetful", forgetful)
    case = Case(batch=1, heads=1, tokens=19, head_dim=8, step=True)
    assert not measure(
        OpMeasurement(case=case, implementation="forgetful", direction=FORWARD, device="cpu"), seconds=0
    ).is_right
