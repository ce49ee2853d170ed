"""Confidence intervals for means and differences over a few seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5% quantiles of Student's t for 1 to 10 degrees of freedom; above, that of the normal distribution with some room
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MANY = 2.2


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean or a difference of means, and how far off it may be with 95% confidence; infinitely far with one seed."""

    middle: float
    half: float

    @property
    def is_positive(self) -> bool:
        """The whole interval lies above zero."""
        return self.middle - self.half > 0

    @property
    def is_negative(self) -> bool:
        return self.middle + self.half < 0


def mean_interval(values: Sequence[float]) -> Interval:
    """m +- t s / sqrt(n)."""
    if len(values) < 2:
        return Interval(middle=values[0], half=math.inf)
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(middle=statistics.mean(values), half=quantile(len(values) - 1) * spread)


def difference_interval(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Welch's interval of mean(first) - mean(second): the two may spread differently."""
    middle = statistics.mean(first) - statistics.mean(second)
    if len(first) < 2 or len(second) < 2:
        return Interval(middle=middle, half=math.inf)
    a, b = (statistics.variance(values) / len(values) for values in (first, second))
    if a + b == 0:
        return Interval(middle=middle, half=0.0)
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return Interval(middle=middle, half=quantile(math.floor(freedom + 1e-9)) * math.sqrt(a + b))


def quantile(freedom: int) -> float:
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else MANY
