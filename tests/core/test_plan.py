"""LinkPlan: spans cover the prompt, the last token is computed, and the label is the weakest one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.plan import Compute, LinkPlan, Load, PlanSpan, Relocate, Repair
from keepwarm.core.ports import BlockRef
from keepwarm.core.repair import RepairRule
from keepwarm.core.spans import Exactness, MissReason


def ref(start: int, end: int, tier: str = "ram") -> BlockRef:
    return BlockRef(b"i" * 32, b"p" * 32, "run", 0, start, end - start, tier)


def load(start: int, end: int, exactness: Exactness = Exactness.EXACT) -> Load:
    return Load(start, end, (ref(start, end),), exactness)


def test_a_cold_plan_computes_all() -> None:
    plan = LinkPlan(10, (Compute(0, 4), Compute(4, 10)))
    assert plan.exactness is Exactness.EXACT
    assert plan.cached_tokens == 0
    assert plan.loads == ()
    assert plan.computes == plan.spans
    assert plan.miss_reason is MissReason.NONE


def test_a_hit_loads_then_computes() -> None:
    plan = LinkPlan(10, (load(0, 6), Compute(6, 10)), 6, MissReason.NEW)
    assert plan.cached_tokens == 6
    assert plan.loads == (plan.spans[0],)
    assert plan.computes == (plan.spans[1],)
    assert ref(2, 6).end == 6


def test_the_label_is_the_weakest_of_the_parts() -> None:
    assert LinkPlan(9, (load(0, 4), load(4, 8, Exactness.PREFIX), Compute(8, 9))).exactness is Exactness.PREFIX
    moved = Relocate(4, 8, ref(0, 4), source_start=0)
    assert LinkPlan(9, (load(0, 4), moved, Compute(8, 9))).exactness is Exactness.BLENDED
    assert LinkPlan(9, (load(0, 4), moved, Compute(8, 9))).cached_tokens == 8


def test_repair_works_on_kv_that_is_in_place() -> None:
    moved = Relocate(0, 8, ref(20, 28), source_start=20)
    repair = Repair(0, 8, RepairRule("deviation", 0.15))
    plan = LinkPlan(9, (moved, repair, Compute(8, 9)))
    assert plan.exactness is Exactness.BLENDED
    assert plan.cached_tokens == 8
    with pytest.raises(ValueError, match="before its KV is placed"):
        LinkPlan(9, (repair, moved, Compute(8, 9)))


@pytest.mark.parametrize(
    ("length", "spans"),
    [
        pytest.param(10, (Compute(0, 4), Compute(5, 10)), id="gap"),
        pytest.param(10, (Compute(0, 6), Compute(5, 10)), id="overlap"),
        pytest.param(10, (Compute(1, 10),), id="late start"),
        pytest.param(10, (Compute(0, 9),), id="too short"),
        pytest.param(10, (Compute(0, 11),), id="too long"),
        pytest.param(10, (Compute(0, 10), Compute(10, 10)), id="empty span"),
        pytest.param(10, (load(0, 10),), id="nothing computed"),
        pytest.param(10, (Compute(0, 4), load(4, 10)), id="ends with a load"),
        pytest.param(10, (Compute(0, 10), Repair(0, 4, RepairRule("deviation", 1.0))), id="ends with a repair"),
        pytest.param(0, (), id="empty"),
    ],
)
def test_what_is_no_plan_is_refused(length: int, spans: tuple[PlanSpan, ...]) -> None:
    with pytest.raises(ValueError, match="span|plan|prompt"):
        LinkPlan(length, spans)


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from([*Exactness])), max_size=8), st.integers(1, 50))
def test_cached_and_computed_tokens_add_up(parts: list[tuple[int, Exactness]], tail: int) -> None:
    spans: list[PlanSpan] = []
    at = 0
    for width, exactness in parts:
        spans.append(load(at, at + width, exactness))
        at += width
    plan = LinkPlan(at + tail, (*spans, Compute(at, at + tail)))
    assert plan.cached_tokens + sum(c.end - c.start for c in plan.computes) == plan.length
    assert plan.exactness == max((exactness for _, exactness in parts), default=Exactness.EXACT)
