"""Time, memory and the work of other processes: what is measured is what was planted."""

import os
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.fresh_process import in_fresh_process
from benchmarks.memory import peak_extra_mib
from benchmarks.tests.bench_results import counts_memory
from benchmarks.timing import OtherProcesses

pytestmark = pytest.mark.usefixtures("one_thread")


def make_holding_call(mebibytes, keep):
    """Return a call that holds this much memory, up to its end or for a moment."""

    def call():
        block = torch.ones(mebibytes * 2**18)
        return block if keep else block.sum()

    return call


@counts_memory
@pytest.mark.parametrize("keep", [True, False])
def test_a_planted_allocation_is_seen(keep):
    assert 199 < peak_extra_mib(make_holding_call(200, keep)) < 260


@counts_memory
def test_a_call_that_holds_nothing_needs_nothing():
    assert peak_extra_mib(lambda: None) < 5


@counts_memory
def test_an_earlier_peak_does_not_count():
    make_holding_call(400, False)()
    assert 95 < peak_extra_mib(make_holding_call(100, True)) < 160


@counts_memory
def test_memory_that_was_freed_but_kept_does_not_hide_a_need():
    # small blocks come from the heap, and a block above them keeps it from shrinking
    blocks = [torch.ones(2**14) for _ in range(3200)]
    pin = torch.ones(2**14)
    del blocks
    found = peak_extra_mib(lambda: [torch.ones(2**14) for _ in range(3200)])
    assert found > 199
    del pin


@counts_memory
def test_a_planted_allocation_is_seen_in_a_fresh_process():
    found, milliseconds = in_fresh_process(f"{__name__}:make_holding_call", {"mebibytes": 200, "keep": False}, seconds=0.1)
    assert milliseconds > 0
    assert 199 < found < 260


def test_a_failing_measurement_says_what_failed():
    with pytest.raises(RuntimeError, match="no_such_function"):
        in_fresh_process(f"{__name__}:no_such_function", {}, seconds=0)


def test_our_own_work_does_not_count_as_other_processes(monkeypatch):
    clocks = iter([(100.0, 50.0, 7.0), (110.0, 56.0, 11.0)])
    monkeypatch.setattr(OtherProcesses, "_clocks", lambda self: next(clocks))
    assert OtherProcesses().share() == pytest.approx(0.2)


@pytest.mark.skipif(OtherProcesses._clocks() is None, reason="this system has no /proc/stat")
def test_a_working_neighbour_is_seen():
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        clocks = OtherProcesses()
        time.sleep(1.0)
        share = clocks.share()
    finally:
        neighbour.kill()
        neighbour.wait()
    # one CPU's worth, with room for clocks that tick a hundred times a second
    assert share > 0.5 / os.cpu_count()


def test_too_short_a_moment_says_nothing_about_others():
    assert OtherProcesses().share() is None
