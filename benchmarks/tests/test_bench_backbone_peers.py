"""NaLaFormer-T beside backbones of timm: what is measured, how it is made and checked, and what the bars say."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks import Result, backbone_peers, measure, runner
from benchmarks.__main__ import build_app
from benchmarks.backbone_peers import (
    COMPILED,
    CONVNEXT,
    EAGER,
    FOLDED,
    FOLDED_COMPILED,
    FOLDED_GRAPHS,
    GRAPHS,
    OURS,
    PEERS,
    PeerMeasurement,
    peer_bars,
    plan_peers,
)
from benchmarks.measurement import WRONG
from benchmarks.models import FORWARD, TRAINING
from nalaformer.models.vision import build

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"embed_dims": (16, 16, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "projection": 16}


def make_measurement(model=OURS, form=EAGER, direction=FORWARD, size=32):
    return PeerMeasurement(model=model, form=form, image_size=size, batch=2, direction=direction, device="cpu")


@pytest.fixture
def tiny(monkeypatch):
    """Small networks instead of the named ones, and what was asked to be compiled; nothing is."""
    compiled = []

    def record_mode(network, *, dynamic, mode):
        compiled.append(mode)
        return network

    import timm

    monkeypatch.setattr(timm, "create_model", lambda name: build(OURS, **TINY))
    monkeypatch.setattr(torch, "compile", record_mode)
    return compiled


def test_every_peer_is_measured_eager_and_compiled_in_both_directions():
    found = {(m.model, m.form, m.direction) for m in plan_peers("cpu")}
    for direction in (FORWARD, TRAINING):
        assert {(name, form, direction) for name in (OURS, *PEERS) for form in (EAGER, COMPILED)} <= found
    assert {form for name, form, direction in found if name == OURS and direction == FORWARD} == {
        *(EAGER, COMPILED, FOLDED, FOLDED_COMPILED)
    }


def test_what_the_bars_need_comes_first():
    plan = plan_peers("cpu", (64, 96))
    models = [m.model in (OURS, CONVNEXT) for m in plan]
    assert models == sorted(models, reverse=True)
    assert {m.image_size for m in plan[:8]} == {64}


@pytest.mark.parametrize("form", [EAGER, COMPILED, GRAPHS, FOLDED, FOLDED_COMPILED, FOLDED_GRAPHS])
def test_a_form_is_what_it_is_called(form, tiny):
    network = make_measurement(form=form).build()
    has_norms = any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    assert has_norms == (form in (EAGER, COMPILED, GRAPHS))
    modes = {COMPILED: [None], FOLDED_COMPILED: [None], GRAPHS: ["reduce-overhead"], FOLDED_GRAPHS: ["reduce-overhead"]}
    assert tiny == modes.get(form, [])


@pytest.mark.parametrize(("device", "has_them"), [("cpu", False), ("cuda", True)])
def test_graphs_are_measured_where_there_are_any(device, has_them, monkeypatch):
    monkeypatch.setattr(backbone_peers, "check_device", lambda device: None)
    found = {(m.model, m.direction) for m in plan_peers(device) if m.form == GRAPHS}
    assert found == ({(name, way) for name in (OURS, *PEERS) for way in (FORWARD, TRAINING)} if has_them else set())
    folded = {(m.model, m.direction) for m in plan_peers(device) if m.form == FOLDED_GRAPHS}
    assert folded == ({(OURS, FORWARD)} if has_them else set())


@pytest.mark.parametrize("direction", [FORWARD, TRAINING])
def test_graphs_are_recorded_before_they_are_timed_and_every_call_is_a_step(direction, tiny, monkeypatch):
    steps = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append("step"))
    measurement = make_measurement(form=GRAPHS, direction=direction)
    built = measurement.build()
    built.register_forward_hook(lambda *_: steps.append("call"))
    call = measurement.make_call(built)
    assert steps == ["step", "call"] * backbone_peers.RECORDING_CALLS
    call()
    assert steps[-2:] == ["step", "call"]


def test_memory_that_graphs_hold_between_calls_is_not_called_none(tiny):
    assert measure(make_measurement(form=GRAPHS), seconds=0, memory=True).peak_extra_mib is None
    assert measure(make_measurement(form=COMPILED), seconds=0, memory=True).peak_extra_mib is not None


@pytest.mark.parametrize("direction", [FORWARD, TRAINING])
def test_ours_is_checked_in_inference_and_timed_in_both_directions(direction, tiny):
    found = measure(
        make_measurement(form=FOLDED if direction == FORWARD else EAGER, direction=direction), seconds=0, memory=False
    )
    assert found.is_right, found.reason
    assert found.per_second > 0
    assert (found.error is not None) == (direction == FORWARD)


def test_a_network_that_folding_changed_is_wrong(tiny, monkeypatch):
    import nalaformer.conversion

    monkeypatch.setattr(nalaformer.conversion, "fold", lambda network: shift_bias(network))
    assert measure(make_measurement(form=FOLDED), seconds=0, memory=False).outcome == WRONG


def shift_bias(network):
    with torch.no_grad():
        network.head.fc.bias += 1
    return network


@pytest.mark.parametrize("size", [64, 224])
def test_a_peer_that_knows_its_size_is_made_for_it(size, monkeypatch):
    import timm

    asked = []
    monkeypatch.setattr(timm, "create_model", lambda name, **options: asked.append((name, options)) or nn.Identity())
    for name in PEERS:
        make_measurement(name, size=size).make_network()
    assert asked == [
        (CONVNEXT, {}),
        ("swin_tiny_patch4_window7_224", {"img_size": size}),
        ("vit_small_patch16_224", {"img_size": size}),
        ("efficientvit_b2", {}),
    ]


def test_timm_knows_every_peer():
    import timm

    assert [name for name in PEERS if not timm.is_model(name)] == []


def make_result(model, form, ms, direction=FORWARD):
    return Result(measurement=make_measurement(model, form, direction), median_ms=ms)


@pytest.mark.parametrize(("ours", "is_met"), [(4.0, True), (6.0, False)])
def test_the_bar_compares_the_faster_forms(ours, is_met):
    results = [
        make_result(OURS, EAGER, 9.0),
        make_result(OURS, FOLDED, ours),
        make_result(CONVNEXT, EAGER, 8.0),
        make_result(CONVNEXT, COMPILED, 5.0),
    ]
    (bar,) = peer_bars(results)
    assert bar.is_met == is_met
    assert bar.measured == f"{5.0 / ours:.2f}x"


def test_compiled_slower_than_eager_is_a_bar_not_met():
    slow, fast = (peer_bars([make_result(OURS, EAGER, 5.0), make_result(OURS, COMPILED, ms)])[0] for ms in (6.0, 4.0))
    assert not slow.is_met
    assert fast.is_met


def test_folded_and_compiled_slower_than_folded_is_a_bar_not_met():
    slow, fast = (peer_bars([make_result(OURS, FOLDED, 5.0), make_result(OURS, FOLDED_COMPILED, ms)])[0] for ms in (6.0, 4.0))
    assert not slow.is_met
    assert fast.is_met


def test_training_must_be_a_quarter_faster():
    for ms, is_met in ((4.0, True), (4.2, False)):
        (bar,) = peer_bars([make_result(OURS, EAGER, ms, TRAINING), make_result(CONVNEXT, EAGER, 5.0, TRAINING)])
        assert bar.is_met == is_met


def test_the_command_measures_peers_into_their_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "measure", lambda measurement, **_: Result(measurement=measurement, median_ms=5.0))
    monkeypatch.setattr(runner, "build_and_check", lambda measurement: None)
    done = CliRunner().invoke(build_app(), ["models", "--case", "peers", "--size", "64"])
    assert done.exit_code == 0, done.output
    with Path("benchmarks/results/backbone_peers_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {OURS, *PEERS}
    assert {row["images_per_second"] for row in rows} == {"400"}


def test_sizes_below_the_stride_raise():
    with pytest.raises(ValueError, match="at least 32"):
        backbone_peers.plan_peers("cpu", (31,))
