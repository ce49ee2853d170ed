"""Measure the time of a call."""

import statistics
import time
from collections.abc import Callable

import torch

from .ops.graphs import captured


def median_ms(call: Callable[[], object], *, device: str = "cpu", seconds: float = 2.0, capture: bool = True) -> float:
    """Return the median milliseconds of a call after warm-up; see `times_ms`."""
    return statistics.median(times_ms(call, device=device, seconds=seconds, capture=capture))


def times_ms(
    call: Callable[[], object],
    *,
    device: str = "cpu",
    seconds: float = 2.0,
    least: int = 3,
    most: int = 50,
    capture: bool = True,
) -> list[float]:
    """Return the milliseconds of repeated calls after warm-up.

    The call is repeated for about `seconds`, at least `least` and at most `most` times. On a GPU it is captured once and
    replayed between events with a cold cache, so the result is device time without Python's overhead.
    capture=False: eager calls between events, so that the time includes waiting for Python.
    """
    if least < 1 or most < least:
        raise ValueError(f"repetitions must satisfy 1 <= least <= most, got {least} and {most}")
    timed = _timed_on_gpu if device == "cuda" else _timed_on_cpu
    if device == "cuda" and capture:
        call = captured(call)
    # the first call also builds thread pools, compiled code and the allocator's blocks
    timed(call, 1)
    once = timed(call, 1)
    repeats = min(most, max(least, round(1e3 * seconds / max(once[0], 1e-3))))
    return once + timed(call, repeats - 1)


def _timed_on_cpu(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _timed_on_gpu(call: Callable[[], object], repeats: int) -> list[float]:
    # larger than any cache; otherwise a second run would read its inputs from the cache
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    events = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]
