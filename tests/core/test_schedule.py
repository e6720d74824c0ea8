"""Cuts of both kinds of arithmetic: they come from the left context alone, whatever stands to the right or is
cached."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.schedule import Breakpoint, Pages, Schedule, Scratch
from keepwarm.errors import ConfigError

LENGTHS = st.integers(0, 400)
POINTS = st.lists(st.builds(Breakpoint, st.integers(-5, 450), st.booleans(), st.sampled_from(["", "a"])), max_size=12)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    step = draw(st.integers(1, 90))
    scratches = st.builds(Scratch, st.integers(0, 50), st.integers(0, 3), st.integers(1, 20_000))
    return Schedule(step, draw(st.integers(0, step)), draw(st.none() | scratches))


@given(st.builds(Scratch, st.integers(0, 10**5), st.integers(0, 500), st.integers(1, 10**10)), st.integers(0, 10**5))
def test_a_step_is_the_longest_under_the_bound(scratch: Scratch, position: int) -> None:
    def taken(rows: int) -> int:
        return rows * scratch.row_bytes + rows * (position + rows) * scratch.score_bytes

    rows = scratch.most_rows(position)
    assert rows == 1 or taken(rows) <= scratch.bound
    assert taken(rows + 1) > scratch.bound or taken(10**6) == 0


def test_steps_shrink_as_the_context_grows() -> None:
    ends = Schedule(512, 0, Scratch(0, 1, 512 * 1024)).cuts(8000)
    lengths = [end - start for start, end in pairwise([0, *ends])]
    assert lengths[0] == 512
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert lengths[-2] < 100


def test_no_breakpoints_means_every_step() -> None:
    assert Schedule(128, 32).cuts(300) == (128, 256, 300)
    assert Schedule(128, 32).cuts(256) == (128, 256)
    assert Schedule(128, 32).cuts(0) == ()
    assert Schedule(128, 32).cuts(1) == (1,)


def test_steps_count_from_the_last_cut() -> None:
    assert Schedule(100, 10).cuts(330, [Breakpoint(130)]) == (100, 130, 230, 330)


def test_soft_breakpoints_need_min_step_tokens() -> None:
    schedule = Schedule(100, 40)
    assert schedule.cuts(90, [Breakpoint(39, soft=True)]) == (90,)
    assert schedule.cuts(90, [Breakpoint(40, soft=True)]) == (40, 90)
    assert schedule.cuts(90, [Breakpoint(30), Breakpoint(69, soft=True)]) == (30, 90)
    assert schedule.cuts(90, [Breakpoint(30), Breakpoint(70, soft=True)]) == (30, 70, 90)
    assert schedule.cuts(180, [Breakpoint(139, soft=True)]) == (100, 180), "distance is from the step's own cut"


def test_a_hard_breakpoint_is_taken_however_near() -> None:
    assert Schedule(100, 40).cuts(90, [Breakpoint(1), Breakpoint(2)]) == (1, 2, 90)


def test_hard_wins_where_both_are_declared() -> None:
    points = [Breakpoint(5, soft=True), Breakpoint(5), Breakpoint(5, soft=True)]
    assert Schedule(100, 40).cuts(90, points) == (5, 90)


def test_breakpoints_outside_the_prompt_are_ignored() -> None:
    assert Schedule(100, 0).cuts(50, [Breakpoint(-1), Breakpoint(0), Breakpoint(50), Breakpoint(51)]) == (50,)


@pytest.mark.parametrize(("step", "least"), [(0, 0), (-1, 0), (10, 11), (10, -1)])
def test_impossible_schedules_are_refused(step: int, least: int) -> None:
    with pytest.raises(ConfigError):
        Schedule(step, least)


@given(schedules(), LENGTHS, POINTS)
def test_cuts_rise_to_the_length_in_steps_of_at_most_g(
    schedule: Schedule, length: int, points: list[Breakpoint]
) -> None:
    cuts = schedule.cuts(length, points)
    widths = [b - a for a, b in pairwise((0, *cuts))]
    assert sum(widths) == length
    assert all(0 < width <= schedule.step for width in widths)


@given(schedules(), LENGTHS, POINTS)
def test_every_hard_breakpoint_inside_is_a_cut(schedule: Schedule, length: int, points: list[Breakpoint]) -> None:
    hard = {point.position for point in points if not point.soft and 0 < point.position < length}
    assert hard <= set(schedule.cuts(length, points))


@given(schedules(), LENGTHS, POINTS)
def test_every_other_cut_is_a_declared_one_or_a_full_step(
    schedule: Schedule, length: int, points: list[Breakpoint]
) -> None:
    declared = {point.position: point.soft for point in points}
    for last, cut in pairwise((0, *schedule.cuts(length, points))):
        if cut == length or cut - last == schedule.step_at(last):
            continue
        assert cut in declared
        hard = any(point.position == cut and not point.soft for point in points)
        assert hard or cut - last >= schedule.min_step


@given(schedules(), LENGTHS, LENGTHS, st.integers(0, 400), POINTS, POINTS, POINTS)
def test_cuts_depend_on_left_context_alone(
    schedule: Schedule,
    length: int,
    other_length: int,
    agreed: int,
    shared: list[Breakpoint],
    mine: list[Breakpoint],
    theirs: list[Breakpoint],
) -> None:
    """Two prompts that agree up to a position agree on all cuts up to it, whatever follows."""
    agreed = min(agreed, length, other_length)
    left = [point for point in shared if point.position <= agreed]
    a = schedule.cuts(length, left + [point for point in mine if point.position > agreed])
    b = schedule.cuts(other_length, [point for point in theirs if point.position > agreed] + left)
    # A prompt's end is a cut of its own only: up to there both must agree.
    below = [{cut for cut in cuts if cut <= agreed} - {length, other_length} for cuts in (a, b)]
    assert below[0] == below[1]


@given(schedules(), LENGTHS, POINTS, st.randoms())
def test_the_order_of_breakpoints_does_not_matter(
    schedule: Schedule, length: int, points: list[Breakpoint], random: object
) -> None:
    shuffled = list(points)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert schedule.cuts(length, shuffled) == schedule.cuts(length, points)


@given(st.integers(1, 90), st.integers(1, 40), LENGTHS, POINTS, st.sets(st.integers(-5, 450)))
def test_pages_end_at_absolute_positions_whatever_is_declared(
    step: int, page: int, length: int, points: list[Breakpoint], regions: set[int]
) -> None:
    pages = Pages(step, page=page)
    cuts = pages.cuts(length, points, regions)
    every = {*range(page, length, page), *(at for at in regions if 0 < at < length), length}
    assert cuts == tuple(sorted(every))


@given(st.one_of(schedules(), st.builds(Pages, st.integers(1, 90))), LENGTHS, LENGTHS, POINTS)
def test_steps_cover_what_is_left_to_compute(grid: Pages | Schedule, length: int, reached: int, points: Any) -> None:
    reached = min(reached, max(0, length - 1))
    cuts = grid.cuts(length, points)
    steps = list(grid.steps(cuts, reached))
    assert [start for start, _ in steps] == [reached, *(end for _, end in steps[:-1])][: len(steps)]
    assert not steps or steps[-1][1] == length
    assert all(0 < end - start <= grid.step for start, end in steps)
    if isinstance(grid, Schedule):
        assert {end for _, end in steps} == {cut for cut in cuts if cut > reached}, "the prompt's own steps"


@given(st.integers(1, 90), st.integers(0, 400), LENGTHS)
def test_steps_of_pages_are_few_and_have_the_same_length(step: int, reached: int, length: int) -> None:
    widths = [end - start for start, end in Pages(step).steps((reached + length,), reached)]
    assert len(widths) == -(-length // step)
    assert widths == sorted(widths, reverse=True)
    assert not widths or widths[0] - widths[-1] <= 1
