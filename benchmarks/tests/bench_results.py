"""Cases and results of benchmarks."""

import pytest

from benchmarks import Case, OpMeasurement, Result
from benchmarks.implementations import OURS
from benchmarks.measurement import MEASURED, WRONG
from benchmarks.memory import can_measure
from benchmarks.ops import FORWARD

TINY = Case(batch=2, heads=2, tokens=37, head_dim=16)
counts_memory = pytest.mark.skipif(not can_measure("cpu"), reason="this system does not count peak memory")


def result(case=TINY, implementation=OURS, direction=FORWARD, *, ms=1.0, mib=1.0, error=0.0, others=None):
    measurement = OpMeasurement(case=case, implementation=implementation, direction=direction, device="cpu")
    outcome = MEASURED if error <= measurement.largest_error else WRONG
    figures = {"median_ms": ms, "others_cpu": others, "peak_extra_mib": mib}
    return Result(measurement=measurement, outcome=outcome, error=error, **figures)
