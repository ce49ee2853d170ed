"""What the figures say: how fast cost grows with the number of tokens, and whether the bars are met."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .cases import GROWTH, SHORT, Case
from .implementations import OURS, PUBLISHED, SOFTMAX
from .ops import FORWARD, Result

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


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One promise, and what came of it."""

    promise: str
    measured: str
    is_met: bool


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line through (log x, log y)."""
    if len(x) != len(y) or len(set(x)) < 2 or min(*x, *y) <= 0:
        raise ValueError(f"a slope needs positive values at two or more different places, got {list(x)} and {list(y)}")
    logs_x, logs_y = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_x, mean_y = sum(logs_x) / len(x), sum(logs_y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(logs_x, logs_y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in logs_x)


def growth(results: Sequence[Result], implementation: str = OURS) -> list[Growth]:
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


def crossover(results: Sequence[Result], direction: str) -> str | None:
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


def bars(results: Sequence[Result]) -> list[Bar]:
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


def _forward_at_bars(results: Sequence[Result], implementation: str) -> Result | None:
    for result in results:
        measurement = result.measurement
        if (measurement.case, measurement.implementation, measurement.direction) == (CASE_OF_BARS, implementation, FORWARD):
            return result
    return None
