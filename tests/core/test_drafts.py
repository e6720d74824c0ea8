"""Drafts: the latest longest match, within the answer's room, and only as many tokens as pay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.drafts import Draft, Drafter, Pace, StepCosts

pytestmark = pytest.mark.hurried

ROWS = (1, 2, 4, 8, 16)


def nothing(most: int) -> TokenIds:
    return token_ids([])


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def expected(known: list[int], most: int) -> list[int]:
    """What follows the latest of the longest matches of the last tokens, by trying all."""
    for length in range(min(8, len(known) - 1), 0, -1):
        for begin in range(len(known) - length - 1, -1, -1):
            if known[begin : begin + length] == known[-length:]:
                found = known[begin + length :]
                return [found[number % len(found)] for number in range(most)]
    return []


@given(prompt=TOKENS, answer=st.lists(st.integers(0, 3), max_size=20), most=st.integers(1, 7), more=st.integers(0, 9))
def test_what_followed_the_longest_match(prompt: list[int], answer: list[int], most: int, more: int) -> None:
    drafter = Drafter(token_ids(prompt), len(answer) + more, most, nothing)
    for token in answer:
        drafter.add(token)
    found = drafter.draft()
    room = max(0, min(most, more - 1))  # the step's own token comes, too
    assert list(found.tokens) == expected([*prompt, *answer], room)[:room]


def repeating(most: int = 7) -> Drafter:
    return Drafter(token_ids([5, 6, 7, 8, 9] * 4), 100, most, nothing)


def paced(costs: StepCosts | None = None, sequences: int = 1) -> Pace:
    """One that has seen a step without drafts."""
    pace = Pace(costs or StepCosts())
    pace.took(sequences, sequences, 0.010)
    return pace


def test_a_long_match_is_drafted_behind_a_step_to_compare_with() -> None:
    pace = Pace(StepCosts())
    assert pace.drafts([repeating()]) == [Draft((), 8)]
    pace.took(1, 1, 0.010)
    assert pace.drafts([repeating()]) == [Draft((5, 6, 7, 8, 9, 5, 6), 8)]


def test_what_is_wrong_again_and_again_is_drafted_no_more_until_it_is_forgotten() -> None:
    drafter, pace = repeating(), paced()
    tried = []
    for _ in range(200):
        (draft,) = pace.drafts([drafter])
        drafter.was(draft, 0)
        tried.append(len(draft.tokens))
        pace.took(1, 1, 0.010)
    assert tried[0] == 7
    assert tried[30:].count(0) > 120  # most steps
    assert sum(tried[60:]) > 0  # now and then it is tried
    for _ in range(300):
        (draft,) = pace.drafts([drafter])
        drafter.was(draft, len(draft.tokens))
    assert len(draft.tokens) == 7


def run(costs: StepCosts, seconds: Callable[[int], float], steps: int = 400, accepted: int = 7) -> float:
    """The speed of an answer with a long match at every step, of whose drafts so many tokens are right, beside steps of
    one token."""
    drafter, pace, spent, tokens = repeating(), Pace(costs), 0.0, 0
    for _ in range(steps):
        (draft,) = pace.drafts([drafter])
        drafter.was(draft, min(accepted, len(draft.tokens)))
        rows = 1 + len(draft.tokens)
        pace.took(1, rows, seconds(rows))
        spent += seconds(rows)
        tokens += 1 + min(accepted, len(draft.tokens))
    return tokens * seconds(1) / spent


def test_rows_that_cost_as_much_as_steps_are_hardly_drafted() -> None:
    assert run(StepCosts(), lambda rows: 0.010 * rows, accepted=0) > 0.9


def test_rows_that_are_nearly_free_are_used() -> None:
    assert run(StepCosts(), lambda rows: 0.010 + 0.0003 * rows) > 6


def test_a_slow_time_is_forgotten() -> None:
    costs = StepCosts()
    run(costs, lambda rows: 0.010 if rows == 1 else 1.0, steps=60)
    assert max(costs.costs) <= 16
    assert run(costs, lambda rows: 0.010 + 0.0003 * rows, steps=1500) > 4


def test_one_slow_step_changes_little() -> None:
    costs = StepCosts()
    pace = paced(costs)
    pace.took(1, 4, 10.0)
    assert costs.cost(4) < 1.5
    assert len(pace.drafts([repeating()])[0].tokens) > 0


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 15), st.floats(0, 1e6)), max_size=60))
def test_costs_stay_between_the_least_and_single_rows(steps: list[tuple[int, int, float]]) -> None:
    costs = StepCosts()
    pace = Pace(costs)
    for sequences, more, seconds in steps:
        pace.took(sequences, min(16, sequences + more), seconds)
        assert all(
            least <= cost <= rows for least, cost, rows in zip(StepCosts().costs, costs.costs, ROWS, strict=True)
        )


def test_times_of_other_sequences_are_not_compared() -> None:
    costs = StepCosts()
    pace = paced(costs, sequences=2)
    pace.took(1, 4, 1.0)
    assert costs.costs == StepCosts().costs


def test_many_answers_at_once_draft_nothing() -> None:
    assert paced(sequences=9).drafts([repeating() for _ in range(9)]) == [Draft()] * 9


def test_answers_of_one_step_share_its_rows() -> None:
    found = paced(sequences=3).drafts([repeating(), None, repeating()])
    assert [len(draft.tokens) for draft in found] == [3, 0, 3]


def test_a_prompt_of_one_token_has_no_draft() -> None:
    assert Drafter(token_ids([1]), 5, 7, nothing).draft() == Draft()


def test_an_answer_given_before_is_drafted_from_its_first_token() -> None:
    asked: list[int] = []

    def before(most: int) -> TokenIds:
        asked.append(most)
        return token_ids([7, 8, 9, 10, 11, 12, 13, 14])

    drafter = Drafter(token_ids(range(100, 130)), 20, 7, before)
    drafter.add(7)
    assert drafter.draft() == Draft((8, 9, 10, 11, 12, 13, 14), 8)
    for token in (8, 9, 10, 99, 12):
        drafter.add(token)
    assert drafter.draft().tokens[:2] == (13, 14)  # it goes on behind a token that is another one
    assert asked == [20]


def test_an_answer_with_little_room_is_not_drafted_beyond_it() -> None:
    drafter = Drafter(token_ids([1, 2, 3]), 3, 7, lambda most: token_ids([4, 5, 6, 7])[:most])
    drafter.add(4)
    assert drafter.draft().tokens == (5,)
    drafter.add(5)
    assert drafter.draft().tokens == ()


def test_what_followed_before_is_remembered_late() -> None:
    drafter = Drafter(token_ids(range(100, 130)), 20, 7, lambda most: token_ids(range(7, 7 + most)))
    for token in (7, 8, 9):
        drafter.add(token)
    assert drafter.draft() == Draft((10, 11, 12, 13, 14, 15, 16), 8)


def test_answers_that_take_turns_are_drafted() -> None:
    pace, drafted = Pace(StepCosts()), 0
    answers = [repeating(), repeating()]
    for number in range(40):
        (draft,) = pace.drafts([answers[number % 2]])
        drafted += len(draft.tokens)
        pace.took(1, 1 + len(draft.tokens), 0.010)
    assert drafted > 100


def test_of_equal_matches_the_earlier_answer_is_drafted() -> None:
    prompt = [*range(10, 18), 1, *range(10, 18), 2, *range(50, 58)]
    drafter = Drafter(token_ids(prompt), 30, 7, lambda most: token_ids([*range(10, 18), 3, 4, 5, 6]))
    for token in range(10, 18):
        drafter.add(token)
        found = drafter.draft()
    assert found == Draft((3, 4, 5, 6, *range(10, 13)), 8)
