"""One way for all benchmarks of speed: a case is checked, then timed, and its row is in the file before the next begins."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import torch

from nalaformer.atomic_files import write_csv
from nalaformer.machine import Machine, version_of

from .measurement import MEASURED, OUT_OF_MEMORY, WRONG, M, Measurement, Result, error_outcome, give_back_memory

Say = Callable[[str], object]
# share of the machine's CPU time that other processes take; an idle machine stays well below
DISTURBED = 0.1
COUNTED_BY = {
    "cpu": "resident memory of a fresh process: peak (VmHWM) minus before the call",
    "cuda": "torch allocator: peak (max_memory_allocated) minus before the call",
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One promise, and what came of it."""

    promise: str
    measured: str
    is_met: bool

    @property
    def line(self) -> str:
        return f"{self.promise}: {self.measured}, {'met' if self.is_met else 'NOT met'}"


@dataclass(frozen=True, kw_only=True)
class CheckedSubject:
    """Subject that several measurements share, built and checked once."""

    subject: object
    built: Any
    checked: Result[Any]


def build_and_check(measurement: Measurement) -> CheckedSubject:
    """Build the subject and check it."""
    built = None

    def check() -> Result[Any]:
        nonlocal built
        built = measurement.build()
        error = measurement.check(built)
        # written so that NaN is wrong too
        is_wrong = error is not None and not error <= measurement.largest_error
        return Result(measurement=measurement, outcome=WRONG if is_wrong else MEASURED, error=error)

    checked = _attempt(Result(measurement=measurement), check)
    return CheckedSubject(subject=measurement.subject, built=built, checked=checked)


def measure(measurement: M, *, seconds: float = 2.0, memory: bool = True, prepared: CheckedSubject | None = None) -> Result[M]:
    """Correctness, then time and memory; too little memory and a failure are outcomes."""
    prepared = prepared or build_and_check(measurement)
    result: Result[M] = replace(prepared.checked, measurement=measurement)
    if result.outcome != MEASURED:
        return result
    figures = measurement.measure_call
    return _attempt(result, lambda: replace(result, **figures(prepared.built, seconds=seconds, memory=memory)))


def _attempt(result: Result[M], work: Callable[[], Result[M]]) -> Result[M]:
    try:
        return work()
    except Exception as error:  # a compiler's errors have no common class, and what follows can still be measured
        if result.measurement.stops_the_run(error):
            raise
        # the error itself must not live on: its frames hold the activations that did not fit
        return replace(result, **error_outcome(error))
    finally:
        # a garbage collection takes long, and pays where memory is short
        if result.measurement.device == "cuda":
            give_back_memory()


def run_measurements(measurements: Iterable[M], *, seconds: float, deadline: float = inf) -> Iterator[Result[M]]:
    """Each result as it comes; nothing is begun after the deadline (of time.monotonic)."""
    prepared = None
    for measurement in measurements:
        if time.monotonic() > deadline:
            return
        if prepared is None or prepared.subject != measurement.subject:
            # the memory of the last one is needed
            prepared = None
            prepared = build_and_check(measurement)
        yield measure(measurement, seconds=seconds, prepared=prepared)


def record_results(
    measurements: Iterable[M], path: Path, columns: Sequence[str], machine: Machine, *, seconds: float
) -> Iterator[Result[M]]:
    """Each result as soon as its row is in the file: if a long run stops, its measurements stay."""
    # a path that cannot be written should say so now and not after minutes
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for result in run_measurements(measurements, seconds=seconds):
        rows.append(make_row(result, machine))
        write_csv(path, columns, rows)
        yield result


def run_plan(
    measurements: Sequence[M], path: Path, columns: Sequence[str], machine: Machine, *, seconds: float, say: Say
) -> list[Result[M]]:
    """All results, each said and written as it comes."""
    say(headline(machine, measurements[0]))
    results = []
    for result in record_results(measurements, path, columns, machine, seconds=seconds):
        results.append(result)
        say(f"[{len(results)}/{len(measurements)}] {result.line}")
    return results


def run_part(
    measurements: Sequence[M], *, seconds: float, add: Callable[..., None], say: Say, deadline: float
) -> list[Result[M]]:
    """Run measurements as a part of a study: `add` takes the columns of a row."""
    results = []
    for result in run_measurements(measurements, seconds=seconds, deadline=deadline):
        results.append(result)
        add(**result.measurement.row(result), error=result.error, note=result.note if result.is_right else result.verdict)
        say(result.line)
    if len(results) < len(measurements):
        left = len(measurements) - len(results)
        say(f"{measurements[len(results)].label}: not begun, the time is over; {left} measurements are left")
    return results


def say_on_stdout(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# ---- rows and sentences


def make_row(result: Result[Any], machine: Machine) -> dict[str, object]:
    """Everything that a benchmark may have a column for: result, machine, versions, and its own columns."""
    measurement = result.measurement
    return {
        "threads": machine.threads if measurement.device == "cpu" else "",
        "dtype": dtype_name(measurement.dtype),
        "outcome": result.verdict,
        "median_ms": format_number(result.median_ms),
        "timed": result.timed,
        "floor_ms": format_number(result.floor_ms),
        "cache_mib": format_number(result.cache_mib),
        "peak_extra_mib": format_number(result.peak_extra_mib),
        "peak_extra_means": f"{COUNTED_BY[measurement.device]}; {measurement.what_counts}",
        "relative_error": "" if result.error is None else f"{result.error:.2g}",
        "others_cpu": "" if result.others_cpu is None else f"{result.others_cpu:.2f}",
        "timm": version_of("timm") or "none",
        "transformers": version_of("transformers") or "none",
        "flash_linear_attention": version_of("flash-linear-attention") or "none",
        "date": today(),
        **machine.columns(measurement.device),
        **measurement.row(result),
    }


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def headline(machine: Machine, measurement: Measurement) -> str:
    device = measurement.device
    threads = f", {machine.threads} threads" if device == "cpu" else ""
    dtype = dtype_name(measurement.dtype)
    return f"{machine.device_name(device)}{threads}, {dtype}, torch {machine.torch}, commit {machine.commit}"


def busy_lines(results: Sequence[Result[Any]]) -> list[str]:
    """A warning where other processes took much of the CPU that was measured."""
    disturbed = [r for r in results if r.measurement.device == "cpu" and r.others_cpu and r.others_cpu > DISTURBED]
    if not disturbed:
        return []
    return [
        f"BUSY machine: in {len(disturbed)} of {len(results)} measurements other processes took over {DISTURBED:.0%} "
        "of the CPU time; times and what follows from them are worth little"
    ]


def mistake_lines(results: Sequence[Result[Any]]) -> list[str]:
    """Whatever was not measured, and why."""
    return [f"{result.outcome.upper()} and not timed: {result.line}" for result in results if not result.is_right]


def cell(result: Result[Any] | None, field: str) -> str:
    """A figure in a table; "-" where there is none."""
    if result is not None and not result.is_right:
        return result.outcome
    value = None if result is None else getattr(result, field)
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def are_ours_right(results: Iterable[Result[Any]]) -> bool:
    """Return True if nothing of ours was wrong or failed; too little memory counts as neither."""
    return all(result.outcome in (MEASURED, OUT_OF_MEMORY) for result in results if result.measurement.is_ours)
