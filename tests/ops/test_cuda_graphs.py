"""Capturing a call: what it changes is put back, and its own failures are told from those of the capture."""

import contextlib

import pytest
import torch

from nalaformer.ops import graphs


class Quiet:
    """Stands for streams, graphs and generators of CUDA."""

    device_index = 0

    def __init__(self, *_, **__):
        self.is_capturing = False

    def wait_stream(self, _):
        pass

    def replay(self):
        pass

    def clone_state(self):
        pass

    def graphsafe_set_state(self, _):
        pass


@pytest.fixture
def no_device(monkeypatch):
    """torch.cuda as far as a capture needs it; says whether one is going on, and which stream was set."""
    told = Quiet()
    told.stream = "before"

    @contextlib.contextmanager
    def graph(*_, **__):
        told.is_capturing, told.stream = True, "of the capture"
        yield
        told.is_capturing, told.stream = False, "before"

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Quiet)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(told, "stream", "before"))
    monkeypatch.setattr(torch.cuda, "default_generators", [Quiet()])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Quiet)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(graphs, "streams", lambda number: (Quiet(), Quiet()))
    return told


def test_every_warm_up_starts_from_what_was_there(no_device):
    counter, seen = torch.tensor(5), []

    def count():
        seen.append(int(counter))
        if not no_device.is_capturing:
            counter.add_(1)

    graphs.captured(count, restore=[counter])
    assert seen == [5] * (graphs.WARM_UPS + 1)
    assert int(counter) == 5


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (RuntimeError("operation not permitted"), graphs.NotCapturable),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (ValueError("wrong"), ValueError),
    ],
)
def test_only_what_a_graph_cannot_hold_is_not_capturable(no_device, failure, told):
    def waits_for_the_host():
        if no_device.is_capturing:
            raise failure

    with pytest.raises(told, match=str(failure)):
        graphs.captured(waits_for_the_host)
    assert no_device.stream == "before"


def test_a_call_that_fails_by_itself_says_so_and_leaves_no_trace(no_device):
    counter = torch.tensor(5)

    def broken():
        counter.add_(1)
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match=r"^an illegal") as caught:
        graphs.captured(broken, restore=[counter])
    assert not isinstance(caught.value, graphs.NotCapturable)
    assert int(counter) == 5
