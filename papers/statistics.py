"""Statistics of repeated timings: intervals, spread, outliers, and whether two samples differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 200  # of the continued fraction below; it converges in far fewer
_TINY = 1e-300


@dataclass(frozen=True)
class Summary:
    """A sample of at least two values. `low` and `high` bound the mean's 95 % confidence interval (Student's t)."""

    n: int
    mean: float
    deviation: float  # standard, of the sample
    low: float
    high: float
    outliers: int  # further than 1.5 interquartile ranges from the quartiles (Tukey 1977)

    @property
    def variation(self) -> float:
        """Coefficient of variation."""
        return self.deviation / self.mean


@dataclass(frozen=True)
class Difference:
    """Two samples compared: Welch's t with its degrees of freedom and two-sided p, and Cohen's d."""

    t: float
    freedom: float
    p: float
    d: float


def summary(values: Sequence[float]) -> Summary:
    """Raises statistics.StatisticsError for fewer than two values."""
    n, mean, deviation = len(values), statistics.fmean(values), statistics.stdev(values)
    half = t_quantile(0.975, n - 1) * deviation / math.sqrt(n)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    reach = 1.5 * (third - first)
    outliers = sum(not first - reach <= value <= third + reach for value in values)
    return Summary(n, mean, deviation, mean - half, mean + half, outliers)


def compare(one: Sequence[float], other: Sequence[float]) -> Difference:
    """`one` minus `other` (Welch 1947; Cohen 1988, pooled deviation). Samples without any spread differ by infinity or
    not at all."""
    a, b = summary(one), summary(other)
    shares = a.deviation**2 / a.n, b.deviation**2 / b.n
    gap, error = a.mean - b.mean, math.sqrt(sum(shares))
    if error == 0:
        far = math.copysign(math.inf, gap) if gap else 0.0
        return Difference(far, float(a.n + b.n - 2), 0.0 if gap else 1.0, far)
    t = gap / error
    freedom = sum(shares) ** 2 / (shares[0] ** 2 / (a.n - 1) + shares[1] ** 2 / (b.n - 1))
    pooled = math.sqrt(((a.n - 1) * a.deviation**2 + (b.n - 1) * b.deviation**2) / (a.n + b.n - 2))
    return Difference(t, freedom, 2 * (1 - t_share(abs(t), freedom)), gap / pooled)


def t_share(t: float, freedom: float) -> float:
    """Student's cumulative distribution at `t`."""
    tail = _beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def t_quantile(share: float, freedom: float) -> float:
    """The `t` below which `share` of Student's distribution lies."""
    low, high = -1e6, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def hellinger(one: Sequence[float], other: Sequence[float]) -> float:
    """Distance of two distributions over the same outcomes: 0 is equal, 1 disjoint."""
    overlap = sum(math.sqrt(p * q) for p, q in zip(one, other, strict=True))
    return math.sqrt(max(0.0, 1 - overlap))


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the least-squares line."""
    return statistics.linear_regression(xs, ys).slope


def _beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function, by Lentz's continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    c, d = 1.0, 1 / _far(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _STEPS):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / _far(1 + numerator * d), _far(1 + numerator / c)
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction / a


def _far(value: float) -> float:
    """Away from zero."""
    return value if abs(value) > _TINY else _TINY
