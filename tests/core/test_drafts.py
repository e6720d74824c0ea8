"""Drafts: the latest longest match, within the answer's room, and only as many tokens as pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.core.blocks import token_ids
from keepwarm.core.drafts import Draft, Drafter, StepCosts, drafts

pytestmark = pytest.mark.hurried

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
    drafter = Drafter(token_ids(prompt), len(answer) + more, most)
    for token in answer:
        drafter.add(token)
    found = drafter.draft()
    room = max(0, min(most, more - 1))  # the step's own token comes, too
    assert list(found.tokens) == expected([*prompt, *answer], room)[:room]


def repeating(most: int = 7) -> Drafter:
    return Drafter(token_ids([5, 6, 7, 8, 9] * 4), 100, most)


def test_a_long_match_is_drafted_at_once() -> None:
    (found,) = drafts([repeating()], StepCosts())
    assert found == Draft((5, 6, 7, 8, 9, 5, 6), 8)


def test_what_is_wrong_again_and_again_is_drafted_no_more() -> None:
    drafter, costs = repeating(), StepCosts()
    for _ in range(40):
        drafter.was(Draft((5, 6, 7), 8), 0)
    assert drafts([drafter], costs) == [Draft((), 8)]
    for _ in range(20):
        drafter.was(Draft((5, 6, 7), 8), 3)
    assert len(drafts([drafter], costs)[0].tokens) == 7
    assert (drafter.drafted, drafter.accepted) == (180, 60)


def test_rows_that_cost_as_much_as_steps_are_not_drafted() -> None:
    costs = StepCosts()
    for _ in range(60):
        costs.took(1, 1, 0.010)
        for rows in (2, 4, 8):
            costs.took(1, rows, 0.010 * rows)
    assert costs.cost(4) > 3.5
    assert drafts([repeating()], costs)[0].tokens == ()


def test_one_slow_step_changes_little() -> None:
    costs = StepCosts()
    costs.took(1, 1, 0.010)
    costs.took(1, 4, 10.0)
    assert costs.cost(4) < 1.5
    assert len(drafts([repeating()], costs)[0].tokens) > 0


def test_no_measurement_makes_rows_cheaper_than_they_can_be() -> None:
    costs = StepCosts()
    costs.took(1, 1, 1.0)
    for _ in range(50):
        costs.took(1, 8, 0.001)
    assert costs.costs == StepCosts().costs


def test_times_of_other_sequences_are_not_compared() -> None:
    costs = StepCosts()
    costs.took(2, 2, 0.001)
    costs.took(1, 4, 1.0)
    costs.begin()
    costs.took(2, 4, 1.0)
    assert costs.costs == StepCosts().costs


def test_many_answers_at_once_draft_nothing() -> None:
    assert drafts([repeating() for _ in range(9)], StepCosts()) == [Draft()] * 9


def test_answers_of_one_step_share_its_rows() -> None:
    found = drafts([repeating(), None, repeating()], StepCosts())
    assert [len(draft.tokens) for draft in found] == [3, 0, 3]


def test_a_prompt_of_one_token_has_no_draft() -> None:
    assert Drafter(token_ids([1]), 5, 7).draft() == Draft()
