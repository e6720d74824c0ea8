"""A conversation that grows: each turn computes what is new in it."""

from __future__ import annotations

from common import compare

from keepwarm import Engine

SYSTEM = {"role": "system", "content": "You are the clerk of a harbour and know all piers. " * 20}
TURNS = (
    "How deep is pier one, and who keeps its key?",
    "And pier two?",
    "Which of them is closed on Sundays?",
    "Write that down for the captain.",
)


def run(engine: Engine, tokens: int) -> None:
    messages = [SYSTEM]
    for number, said in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": said})
        answer = compare(engine, f"turn {number}: {said}", tokens, messages=messages)
        messages.append({"role": "assistant", "content": answer})
