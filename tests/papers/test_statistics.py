"""Statistics against published values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers.statistics import compare, hellinger, slope, summary, t_quantile, t_share


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (1e6, 1.960)])
def test_quantiles_are_those_of_the_tables(freedom: float, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=1e-3)
    assert t_share(expected, freedom) == pytest.approx(0.975, abs=1e-4)


def test_a_sample() -> None:
    found = summary([10.0, 11.0, 12.0, 13.0, 100.0])
    assert found.mean == pytest.approx(29.2)
    assert found.outliers == 1
    assert found.low < 29.2 < found.high
    assert found.variation == pytest.approx(found.deviation / 29.2)


def test_welch_agrees_with_scipy() -> None:
    # expected: scipy.stats.ttest_ind(one, other, equal_var=False)
    one = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    other = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 30.5, 31.3]
    found = compare(one, other)
    assert (found.t, found.freedom, found.p) == pytest.approx((-2.9492368, 27.3116105, 0.0064604), rel=1e-5)
    assert found.d < -0.9


def test_samples_without_spread() -> None:
    assert compare([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert compare([2.0, 2.0], [1.0, 1.0]).d == math.inf


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_a_distribution_is_at_no_distance_from_itself(weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    assert hellinger(shares, shares) == pytest.approx(0, abs=1e-6)


def test_distances_and_slopes() -> None:
    assert hellinger([1.0, 0.0], [0.0, 1.0]) == 1.0
    assert slope([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]) == pytest.approx(2.0)
