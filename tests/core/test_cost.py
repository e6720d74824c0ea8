"""Load or recompute: decided by what was measured, and by nothing before it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.cost import Costs

MEGABYTE = 1 << 20


def test_until_both_are_measured_everything_is_loaded() -> None:
    costs = Costs(MEGABYTE)
    assert costs.estimate(100) is None
    costs.loaded(100, 1e6)
    assert not costs.recompute(100)


def test_a_load_slower_than_computing_is_refused_and_tried_again_now_and_then() -> None:
    costs = Costs(MEGABYTE)
    costs.loaded(100, 10.0)
    costs.computed(100, 1.0)
    assert costs.estimate(50) == (5.0, 0.5)
    decisions = [costs.recompute(100) for _ in range(32)]
    assert decisions.count(False) == 2
    for _ in range(20):  # the disk has recovered
        costs.loaded(100, 0.01)
    assert not costs.recompute(100)


def test_small_measurements_say_nothing() -> None:
    costs = Costs(16)
    costs.loaded(100, 10.0)
    costs.computed(5, 1.0)
    assert costs.estimate(100) is None


@given(st.floats(1e-6, 10), st.floats(1e-6, 10), st.integers(1, 10_000))
def test_the_cheaper_is_chosen(load: float, compute: float, tokens: int) -> None:
    costs = Costs(MEGABYTE)
    costs.loaded(1000, load)
    costs.computed(1000, compute)
    assert costs.recompute(tokens) == (load / 1000 > compute / 1000)
