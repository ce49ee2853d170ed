"""Report the results of attention: a table, how fast cost grows with the number of tokens, and whether the bars are met."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .cases import GROWTH, SHORT, Case
from .implementations import IMPLEMENTATIONS, OURS, PUBLISHED, SOFTMAX
from .measurement import Result
from .ops import DIRECTIONS, FORWARD, OpMeasurement
from .runner import Bar, busy_lines, cell, mistake_lines

if TYPE_CHECKING:
    from rich.table import Table

OpResult = Result[OpMeasurement]

COLUMNS = (
    "op", "implementation", "device", "threads", "dtype", "shape", "direction", "median_ms", "floor_ms", "peak_extra_mib",
    "peak_extra_means", "relative_error", "others_cpu", "torch", "triton", "nalaformer", "commit", "date",
)  # fmt: skip
LEAST_SPEEDUP = 2.0
LARGEST_MEMORY_SHARE = 1 / 3
CASE_OF_BARS = Case(batch=1, heads=4, tokens=65536)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """cost ~ N^exponent: 1 is linear, 2 quadratic."""

    quantity: str
    direction: str
    exponent: float
    tokens: tuple[int, ...]
    """The numbers of tokens it was fitted to."""


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line through (log x, log y)."""
    if len(x) != len(y) or len(set(x)) < 2 or min(*x, *y) <= 0:
        raise ValueError(f"a slope needs positive values at two or more different places, got {list(x)} and {list(y)}")
    logs_x, logs_y = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_x, mean_y = sum(logs_x) / len(x), sum(logs_y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(logs_x, logs_y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in logs_x)


def growth(results: Sequence[OpResult], implementation: str = OURS) -> list[Growth]:
    """Exponents of time and memory over the cases that differ in the number of tokens alone."""
    found = []
    for direction in dict.fromkeys(result.measurement.direction for result in results):
        for quantity, field in (("time", "median_ms"), ("memory", "peak_extra_mib")):
            points = {
                result.measurement.case.tokens: getattr(result, field)
                for result in results
                if result.measurement.implementation == implementation
                and result.measurement.direction == direction
                and result.measurement.case in GROWTH
                and getattr(result, field)
            }
            if len(points) > 1:
                exponent = slope(list(points), list(points.values()))
                found.append(Growth(quantity=quantity, direction=direction, exponent=exponent, tokens=tuple(sorted(points))))
    return found


def crossover(results: Sequence[OpResult], direction: str) -> str | None:
    """The number of tokens from which ours is faster than exact softmax attention: where the two lines of log time against
    log N meet, or that it lies below or beyond what was measured. None without two lengths that both were measured at."""
    times: dict[int, dict[str, float]] = {}
    for result in results:
        measurement = result.measurement
        if measurement.direction == direction and measurement.case in (*SHORT, *GROWTH) and result.median_ms:
            times.setdefault(measurement.case.tokens, {})[measurement.implementation] = result.median_ms
    gaps = [(n, math.log(t[OURS] / t[SOFTMAX])) for n, t in sorted(times.items()) if OURS in t and SOFTMAX in t]
    if len(gaps) < 2:
        return None
    if gaps[0][1] <= 0:
        return f"fewer than {gaps[0][0]:,}"
    for (n, slower), (m, faster) in pairwise(gaps):
        if faster <= 0:
            share = slower / (slower - faster)
            return f"about {round(math.exp(math.log(n) + share * math.log(m / n)), -2):,.0f}"
    return f"more than {gaps[-1][0]:,}"


def bars(results: Sequence[OpResult]) -> list[Bar]:
    """The promises against the published formula at 65,536 tokens; none if that was not measured."""
    ours, published = (_forward_at_bars(results, name) for name in (OURS, PUBLISHED))
    if ours is None or published is None:
        return []
    found = []
    if ours.median_ms and published.median_ms:
        ratio = published.median_ms / ours.median_ms
        promise = f"forward at least {LEAST_SPEEDUP:g}x as fast as the published formula"
        found.append(Bar(promise=promise, measured=f"{ratio:.2f}x", is_met=ratio >= LEAST_SPEEDUP))
    if ours.peak_extra_mib and published.peak_extra_mib:
        share = ours.peak_extra_mib / published.peak_extra_mib
        promise = "forward with at most a third of its peak extra memory"
        found.append(Bar(promise=promise, measured=f"{share:.0%}", is_met=share <= LARGEST_MEMORY_SHARE))
    return found


def _forward_at_bars(results: Sequence[OpResult], implementation: str) -> OpResult | None:
    for result in results:
        measurement = result.measurement
        if (measurement.case, measurement.implementation, measurement.direction) == (CASE_OF_BARS, implementation, FORWARD):
            return result
    return None


def results_table(results: Sequence[OpResult]) -> "Table":
    """Return a line per case and implementation; "-" where one was skipped."""
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
    # baselines are in the table even where they were skipped, peers only where they ran
    names = [
        name
        for name in IMPLEMENTATIONS.names()
        if name in measured or (devices.intersection(IMPLEMENTATIONS[name].devices) and IMPLEMENTATIONS[name].package is None)
    ]
    for case in dict.fromkeys(r.measurement.case for r in results):
        for number, name in enumerate(names):
            own = [found.get((case, name, direction)) for direction in DIRECTIONS]
            figures = (*map(time_cell, own), *(cell(result, "peak_extra_mib") for result in own))
            table.add_row(case.shape if number == 0 else "", name, *figures, end_section=number == len(names) - 1)
    return table


def time_cell(result: OpResult | None) -> str:
    text = cell(result, "median_ms")
    return f"{text} ({result.median_ms / result.floor_ms:.1f}x)" if result and result.median_ms and result.floor_ms else text


def summary_lines(results: Sequence[OpResult], skipped_peers: Mapping[str, str] | None = None) -> list[str]:
    """Return growth, bars, decoding steps, skipped peers with the reason, and failures, as sentences."""
    lines = busy_lines(results)
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
        lines.append(f"{CASE_OF_BARS.tokens:,} tokens, {bar.line}")
    if not verdicts:
        lines.append(f"the bars stand at {CASE_OF_BARS.tokens:,} tokens, which this run did not measure")
    for result in results:
        if result.measurement.case.step and result.median_ms:
            case = result.measurement.case
            who = f"{result.measurement.implementation}, one step of decoding"
            where = f"{case.batch} samples, {case.heads} heads of {case.head_dim}, token {case.tokens:,}"
            lines.append(f"{who} ({where}): {1e3 * result.median_ms:,.3g} microseconds")
        if result.measurement.case.eager and result.median_ms:
            who = f"{result.measurement.implementation}, an eager call, {result.measurement.direction}"
            lines.append(f"{who} ({result.measurement.case.shape}): {result.median_ms:.3g} ms of the host")
    for name, reason in (skipped_peers or {}).items():
        lines.append(f"left out: {name}, which cannot be imported here ({reason})")
    return lines + mistake_lines(results)
