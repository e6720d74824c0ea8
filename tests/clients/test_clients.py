"""Every client starts, asks, and is answered; its second start and its next turn are nearly all reused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.clients.clients import CLIENTS, Client
from tests.clients.runs import Place, Run, shown

QUESTIONS = ("Say hello.", "What is two plus two? Answer in one word.", "And three plus three?")
SECOND_START, NEXT_TURN = 0.95, 0.98  # of the prompt


def answered(client: Client, run: Run) -> Run:
    assert run.code == 0, run.output
    assert client.refused or not run.refused, run.refused
    assert run.answers, run.output
    return run


@pytest.mark.parametrize("name", CLIENTS)
def test_the_second_start_and_the_next_turn_are_reused(
    name: str, place: Callable[[Client], Place], serving: Callable[[Client], Any], record: Callable[..., None]
) -> None:
    client = CLIENTS[name]
    here = place(client)
    with serving(client) as server:
        cold = answered(client, here.run(client, server, QUESTIONS[0]))
    here.fresh()
    with serving(client) as server:  # a new one: what it has is on disk
        second = answered(client, here.run(client, server, QUESTIONS[1]))
        turn = answered(client, here.run(client, server, QUESTIONS[2], then=True))
    runs = {"cold": cold, "second_start": second, "next_turn": turn}
    row = {kind: shown(run.main) for kind, run in runs.items()}
    others = {kind: [shown(each) for each in run.answers if each is not run.main] for kind, run in runs.items()}
    record(client, **row, others=others)
    for run, bound in ((second, SECOND_START), (turn, NEXT_TURN)):
        assert run.main["cached_tokens"] >= bound * (run.main["prompt_tokens"] - client.behind), run.main
