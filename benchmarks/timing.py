"""Time on the host's clock, the bandwidth of a GPU, and the work of other processes."""

import os
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from nalaformer.timing import median_ms


def host_ms(call: Callable[[], object], *, seconds: float = 2.0, in_a_row: int = 50) -> float:
    """Milliseconds of one of many eager calls in a row, on the host's clock: the median over such rows.

    The device works meanwhile, so this is what Python takes, or the device where that takes longer.
    """

    def row() -> float:
        start = time.perf_counter()
        for _ in range(in_a_row):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / in_a_row

    row()
    repeats = max(3, round(1e3 * seconds / max(row() * in_a_row, 1e-3)))
    return statistics.median(row() for _ in range(repeats))


@cache
def copy_bandwidth(*, gibibytes: float = 1.0) -> float:
    """Bytes per second through the GPU's memory in a plain copy, reading and writing counted."""
    source = torch.zeros(int(gibibytes * 2**28), device="cuda")
    target = torch.empty_like(source)
    # an elementwise kernel, not the copy engine, which is slower
    return 2 * source.nbytes / (1e-3 * median_ms(lambda: torch.neg(source, out=target), device="cuda", seconds=0.1))


class OtherProcesses:
    """Share of the machine's CPU time that other processes take: beside a busy one, a time means little."""

    def __init__(self) -> None:
        self.start = self._clocks()

    def share(self) -> float | None:
        """Since the start, 0 to 1; None where the system does not say or too little time has passed to tell."""
        now = self._clocks()
        if self.start is None or now is None:
            return None
        everything, busy, own = (after - before for after, before in zip(now, self.start, strict=True))
        # clocks tick a hundred times a second
        return None if everything < 0.2 else min(1.0, max(0.0, (busy - own) / everything))

    @staticmethod
    def _clocks() -> tuple[float, float, float] | None:
        """Seconds of all CPUs, of those the busy ones, and of those our own and our finished children's."""
        try:
            numbers = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None
        own = os.times()
        idle = numbers[3] + numbers[4]
        return sum(numbers) / ticks, (sum(numbers) - idle) / ticks, sum(own[:4])
