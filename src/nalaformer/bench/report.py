"""The results as a CSV file and as text for the terminal."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..whole_files import whole_file
from .implementations import IMPLEMENTATIONS
from .machine import Machine
from .ops import DIRECTIONS, Result
from .verdict import CASE_OF_BARS, bars, crossover, growth

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "op",
    "implementation",
    "device",
    "threads",
    "dtype",
    "shape",
    "direction",
    "median_ms",
    "floor_ms",
    "peak_extra_mib",
    "peak_extra_means",
    "relative_error",
    "others_cpu",
    "torch",
    "triton",
    "nalaformer",
    "commit",
    "date",
)
# of the CPU time of a machine; one that does nothing else stays well below
DISTURBED = 0.1
# the definition travels with every row: figures of two files are comparable only if it is the same
PEAK_EXTRA_MEANS = {
    "cpu": "resident memory of a fresh process: peak (VmHWM) minus before the call; q k v and the output's gradient are "
    "held before and do not count; output and gradients of q k v count",
    "cuda": "torch allocator: peak (max_memory_allocated) minus before the call; q k v and the output's gradient are held "
    "before and do not count; output and gradients of q k v count",
}


def write_csv(results: Sequence[Result], path: str | Path, machine: Machine) -> Path:
    """One row per result; figures that were not measured are empty. An existing file is replaced as a whole."""
    date = datetime.now(UTC).date().isoformat()
    return replace_csv(path, COLUMNS, (csv_row(result, machine, date) for result in results))


def replace_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Path:
    """The columns of the rows, as a whole file in the place of an old one; what a row does not have is empty."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def csv_row(result: Result, machine: Machine, date: str) -> dict[str, object]:
    measurement = result.measurement
    return {
        "op": measurement.case.op,
        "implementation": measurement.implementation,
        "device": machine.device_name(measurement.device),
        "threads": machine.threads if measurement.device == "cpu" else "",
        "dtype": str(measurement.dtype).removeprefix("torch."),
        "shape": measurement.case.shape,
        "direction": measurement.direction,
        "median_ms": rounded(result.median_ms),
        "floor_ms": rounded(result.floor_ms),
        "peak_extra_mib": rounded(result.peak_extra_mib),
        "peak_extra_means": PEAK_EXTRA_MEANS[measurement.device],
        "relative_error": f"{result.error:.2g}",
        "others_cpu": "" if result.others_cpu is None else f"{result.others_cpu:.2f}",
        "torch": machine.torch,
        "triton": machine.triton,
        "nalaformer": machine.nalaformer,
        "commit": machine.commit,
        "date": date,
    }


def rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def results_table(results: Sequence[Result]) -> "Table":
    """A line per case and implementation; "-" where one was left out."""
    from rich import box
    from rich.table import Table

    found = {(r.measurement.case, r.measurement.implementation, r.measurement.direction): r for r in results}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("shape", no_wrap=True)
    table.add_column("implementation", no_wrap=True)
    for title in ("forward\nms", "fwd+bwd\nms", "forward\nextra MiB", "fwd+bwd\nextra MiB"):
        table.add_column(title, justify="right", no_wrap=True)
    devices = {r.measurement.device for r in results}
    measured = {r.measurement.implementation for r in results}
    # what we compare ourselves with stands in the table even where it was left out; peers are there where they ran
    names = [
        name
        for name in IMPLEMENTATIONS.names()
        if name in measured or (devices.intersection(IMPLEMENTATIONS[name].devices) and IMPLEMENTATIONS[name].package is None)
    ]
    for case in dict.fromkeys(r.measurement.case for r in results):
        for number, name in enumerate(names):
            cells = [found.get((case, name, direction)) for direction in DIRECTIONS]
            table.add_row(
                case.shape if number == 0 else "",
                name,
                *(figure(result, "median_ms") for result in cells),
                *(figure(result, "peak_extra_mib") for result in cells),
                end_section=number == len(names) - 1,
            )
    return table


def figure(result: Result | None, field: str) -> str:
    if result is None:
        return "-"
    if not result.is_right:
        return "failed" if result.failure else "wrong"
    value = getattr(result, field)
    if value is None:
        return "-"
    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{number} ({value / result.floor_ms:.1f}x)" if field == "median_ms" and result.floor_ms else number


def summary_lines(results: Sequence[Result], left_out: Mapping[str, str] | None = None) -> list[str]:
    """Growth, bars, decoding steps, what was left out and why, and whatever went wrong, as sentences."""
    lines = []
    disturbed = [r for r in results if r.others_cpu and r.others_cpu > DISTURBED]
    if disturbed:
        lines.append(
            f"BUSY machine: in {len(disturbed)} of {len(results)} measurements other processes took over {DISTURBED:.0%} "
            "of the CPU time; times and what follows from them are worth little"
        )
    for fit in growth(results):
        span = f"{fit.tokens[0]:,} to {fit.tokens[-1]:,} tokens"
        lines.append(f"nalaformer, {fit.direction}: {fit.quantity} ~ N^{fit.exponent:.2f} from {span} (1 = linear)")
    if any(result.floor_ms for result in results):
        lines.append("in brackets: times the floor, each input read once and each output written once at the speed of a copy")
    for direction in DIRECTIONS:
        length = crossover(results, direction)
        if length is not None:
            lines.append(f"nalaformer, {direction}: faster than torch SDPA from {length} tokens on (1 sample, 4 heads of 64)")
    verdicts = bars(results)
    for bar in verdicts:
        lines.append(f"{CASE_OF_BARS.tokens:,} tokens, {bar.promise}: {bar.measured}, {'met' if bar.is_met else 'NOT met'}")
    if not verdicts:
        lines.append(f"the bars stand at {CASE_OF_BARS.tokens:,} tokens, which this run did not measure")
    for result in results:
        if result.measurement.case.step and result.median_ms:
            case = result.measurement.case
            who = f"{result.measurement.implementation}, one step of decoding"
            where = f"{case.batch} samples, {case.heads} heads of {case.head_dim}, token {case.tokens:,}"
            lines.append(f"{who} ({where}): {1e3 * result.median_ms:,.3g} microseconds")
    for name, reason in (left_out or {}).items():
        lines.append(f"left out: {name}, which cannot be imported here ({reason})")
    for result in results:
        if not result.is_right:
            measurement = result.measurement
            what = f"{measurement.implementation}, {measurement.case.shape}, {measurement.direction}"
            if result.failure:
                lines.append(f"FAILED and not timed: {what}: {result.failure}")
            else:
                lines.append(f"WRONG and not timed: {what}: relative error {result.error:.2g} against float64")
    return lines
