"""Load or recompute: decided by what was measured, and by nothing before it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.cost import Costs

pytestmark = pytest.mark.hurried

MEGABYTE = 1 << 20


def test_until_both_are_measured_everything_is_loaded() -> None:
    costs = Costs(MEGABYTE)
    assert costs.estimate("disk", 100) is None
    costs.loaded("disk", 100, 1e6)
    assert costs.worth_loading([("disk", 100)]) == 1


def test_a_load_slower_than_computing_is_refused_and_tried_again_now_and_then() -> None:
    costs = Costs(MEGABYTE)
    costs.loaded("disk", 100, 10.0)
    costs.computed(100, 1.0)
    assert costs.estimate("disk", 50) == (5.0, 0.5)
    decisions = [costs.worth_loading([("disk", 100)]) for _ in range(32)]
    assert decisions.count(1) == 2
    for _ in range(20):  # the disk has recovered
        costs.loaded("disk", 100, 0.01)
    assert costs.worth_loading([("disk", 100)]) == 1


def test_small_measurements_say_nothing_of_the_speed() -> None:
    costs = Costs(16)
    costs.loaded("disk", 100, 10.0)
    costs.computed(5, 1.0)
    assert costs.estimate("disk", 100) is None


def test_a_few_tokens_behind_others_are_computed_if_a_load_costs_more() -> None:
    """The last tokens of a page may be the only ones that a slower tier has."""
    costs = Costs(1 << 10)
    costs.computed(1000, 0.2)
    parts = [("device", 2048), ("ram", 17), ("disk", 1)]
    assert costs.worth_loading(parts) == 3
    costs.loaded("disk", 2, 3e-3)
    assert costs.worth_loading(parts) == 2
    assert costs.copy().worth_loading(parts) == 2
    assert costs.worth_loading([("device", 2048), ("disk", 32)]) == 2
    costs.loaded("disk", 1000, 0.1)
    assert costs.estimate("disk", 30) == pytest.approx((6e-3, 6e-3))


@given(st.floats(1e-6, 10), st.floats(1e-6, 10), st.integers(1, 10_000))
def test_the_cheaper_is_chosen(load: float, compute: float, tokens: int) -> None:
    costs = Costs(MEGABYTE)
    costs.loaded("disk", 1000, load)
    costs.computed(1000, compute)
    assert costs.worth_loading([("disk", tokens)]) == (load <= compute)


def test_a_slow_tier_behind_a_fast_one_is_left_out_alone() -> None:
    costs = Costs(MEGABYTE)
    costs.computed(1000, 10.0)
    costs.loaded("disk", 1000, 1.0)
    costs.loaded("redis", 1000, 5.0)
    costs.loaded("s3", 1000, 100.0)
    assert costs.worth_loading([("ram", 500), ("disk", 100), ("redis", 100), ("s3", 100)]) == 3
    assert costs.worth_loading([("s3", 10), ("ram", 500)]) == 2  # what stands on it would be lost, too
    assert costs.worth_loading([("s3", 500), ("disk", 10)]) == 0
    assert costs.worth_loading([]) == 0


def test_a_small_load_that_took_long_is_put_right_by_a_large_one() -> None:
    costs = Costs(bytes_per_token=1024)
    costs.computed(1000, 1.0)
    costs.loaded("disk", 1, 5.0)
    costs.loaded("disk", 1024, 0.01)
    assert costs.worth_loading([("disk", 100)]) == 1
