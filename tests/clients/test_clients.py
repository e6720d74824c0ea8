"""Every client starts, asks, and is answered; its second start and its next turn are nearly all reused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.clients.clients import CLIENTS, Client
from tests.clients.runs import Place, Run, ended, endpoint_of, shown

QUESTIONS = ("Say hello.", "What is two plus two? Answer in one word.", "And three plus three?")
SECOND_START, NEXT_TURN = 0.95, 0.98  # of the prompt
PAGE = Path(__file__).parents[2] / "docs" / "serving" / "agents.md"
SHOWN = {  # what the page shows as a program, by its heading
    "openai-agents": "OpenAI Agents SDK",
    "pydantic-ai": "pydantic-ai",
    "ai-sdk": "AI SDK",
    "openai-ts": "OpenAI's TypeScript SDK",
}


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


@pytest.mark.parametrize("name", SHOWN)
def test_the_program_of_the_page_runs(
    name: str, place: Callable[[Client], Place], serving: Callable[[Client], Any]
) -> None:
    client = CLIENTS[name]
    here = place(client)
    pattern = rf"^## {re.escape(SHOWN[name])}\n\n```(python|js)\n(.*?)^```$"
    language, program = re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    file = here.installed / f"page.{'py' if language == 'python' else 'mjs'}"  # beside the packages that it imports
    with serving(client) as server:
        endpoint = endpoint_of(server)
        file.write_text(program.replace("http://127.0.0.1:8000", server.url).replace('"demo"', f'"{endpoint.model}"'))
        runner = "python" if language == "python" else "node"
        code, output = ended([runner, str(file)], here.project, here.environment())
    assert code == 0, output
    assert output.strip()
