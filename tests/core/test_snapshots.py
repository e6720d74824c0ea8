"""Where snapshots of recurrent state are taken, and which of them go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.blocks import chain, token_ids
from keepwarm.core.identity import ArithmeticIdentity, ModelIdentity, Namespace
from keepwarm.core.schedule import SERIAL_TAIL, Breakpoint, Serial
from keepwarm.core.snapshots import (
    FEWEST,
    affordable,
    last_place,
    shared_end,
    snapshot_block,
    snapshot_id,
    superfluous,
    wanted,
    wanted_inside,
)

SPACE = Namespace(
    ModelIdentity("w", "c", "float32", "none", "none", "t"), ArithmeticIdentity("t", "cpu", "i", 1, "attention")
)
ENDS = (100, 300, 700, 1000, 1010)
POINTS = (Breakpoint(100), Breakpoint(300), Breakpoint(700, soft=True), Breakpoint(1000, soft=True))


def test_the_budget_bounds_them_and_two_are_always_allowed() -> None:
    assert affordable(10_000, 100, 100_000, 1.0) == 10
    assert affordable(10_000, 100, 100_000, 0.5) == 5
    assert affordable(10, 100, 100_000, 1.0) == FEWEST
    assert affordable(10_000, 0, 100_000, 1.0) == 39  # a model without any KV


def test_where_the_next_request_goes_on_comes_first() -> None:
    assert wanted(ENDS, POINTS, 0, 0, 1, whole=False) == (1000,)
    assert wanted(ENDS, POINTS, 0, 0, 2, whole=False) == (1000, 300)  # the end of what is shared
    assert wanted(ENDS, POINTS, 700, 0, 3, whole=False) == (1000, 300, 700)
    assert wanted(ENDS, POINTS, 0, 0, 9, whole=True) == (1010, 300, 1000, 100, 700)


PAGES = (*range(32, 1010, 32), 1010)
MESSAGES = (Breakpoint(100), Breakpoint(300), Breakpoint(700, soft=True), Breakpoint(1003, soft=True))


def test_inside_pages_what_is_declared_comes_first() -> None:
    assert wanted_inside(PAGES, MESSAGES, 0, 0, 2, whole=False) == (1003, 300)
    assert wanted_inside(PAGES, MESSAGES, 0, 0, 2, whole=True) == (1010, 300)
    assert wanted_inside(PAGES, MESSAGES, 651, 640, 3, whole=False) == (1003, 651, 700)
    few = wanted_inside(PAGES, MESSAGES, 0, 0, 6, whole=False)
    assert few == (1003, 300, 700, 100, 960, 928), "the last token and the last page are close to the last message"
    every = wanted_inside(PAGES, MESSAGES, 0, 0, 99, whole=False)
    assert sorted(every) == sorted({*PAGES[:-1], 100, 300, 700, 1003, 1009})


def test_the_same_prompt_goes_on_at_its_last_message_or_token() -> None:
    assert last_place(1010, MESSAGES) == 1003
    assert last_place(1050, MESSAGES) == 1049
    assert wanted_inside(PAGES, MESSAGES[:3], 0, 0, 1, whole=False) == (1009,)


def test_a_difference_close_behind_a_snapshot_takes_no_other() -> None:
    assert 707 not in wanted_inside(PAGES, (), 707, 700, 99, whole=False)
    assert 708 in wanted_inside(PAGES, (), 708, 700, 99, whole=False)


def test_only_what_is_computed_is_taken() -> None:
    assert wanted(ENDS, POINTS, 700, 700, 9, whole=False) == (1000,)
    assert wanted((50,), (), 0, 0, 9, whole=False) == ()


def test_what_saves_least_goes_first() -> None:
    assert superfluous([100, 110, 500, 900, 1000], 100, 4) == [110]
    assert superfluous([100, 110, 500, 900, 1000], 100, 3) == [110, 500]
    assert superfluous([100, 110, 500, 900, 1000], 100, 2) == [110, 500, 900]  # what is shared and the newest stay
    assert superfluous([100, 200], None, 2) == []


@given(st.sets(st.integers(1, 10_000), max_size=40), st.integers(1, 10_000), st.integers(2, 20))
def test_thinning_keeps_what_it_must_and_no_more_than_it_may(positions: set[int], shared: int, most: int) -> None:
    gone = superfluous(positions, shared, most)
    left = positions - set(gone)
    assert len(set(gone)) == len(gone)
    assert positions & {shared, max(positions, default=0)} <= left
    assert len(left) <= most or len(left) <= 3


@given(st.data())
def test_no_more_are_wanted_than_may_be(data: st.DataObject) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, 5_000), min_size=1, max_size=30)))
    points = [Breakpoint(at, data.draw(st.booleans())) for at in data.draw(st.lists(st.integers(1, 5_000), max_size=9))]
    reached, most = data.draw(st.integers(0, 5_000)), data.draw(st.integers(1, 9))
    found = wanted(ends, points, data.draw(st.integers(0, 5_000)), reached, most, whole=data.draw(st.booleans()))
    assert len(found) == len(set(found)) <= most
    assert all(at in ends and at > reached for at in found)


def test_a_snapshot_has_no_name_that_a_block_has() -> None:
    blocks = chain(token_ids(range(40)), (16, 32, 40), SPACE)
    at = snapshot_block(blocks[1])
    assert (at.start, at.end, at.tokens.tolist()) == (31, 32, [31])
    assert at.exact == snapshot_id(blocks[1].exact)
    assert at.parent_exact == blocks[1].exact
    names = {name for block in blocks for name in (block.exact, block.prefix, block.parent_exact, block.parent_prefix)}
    assert not {at.exact, at.prefix, at.parent_prefix} & names
    assert snapshot_block(blocks[0]).exact != at.exact


def test_what_is_shared_ends_at_the_last_hard_breakpoint() -> None:
    assert shared_end(POINTS, ENDS) == 300
    assert shared_end(POINTS, (700,)) is None


@given(st.integers(1, 3_000), st.lists(st.integers(0, 3_000), max_size=8))
def test_a_serial_prompt_is_cut_once_and_near_its_end(length: int, positions: list[int]) -> None:
    cuts = Serial(1024, 128).cuts(length, [Breakpoint(at, soft=True) for at in positions])
    assert cuts[-1] == length
    assert len(cuts) <= 2
    assert length - cuts[0] <= SERIAL_TAIL
