"""What the figures say: how fast cost grows with the number of tokens, and whether the bars are met."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .cases import GROWTH, Case
from .implementations import OURS, PUBLISHED
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
