"""A fixed system prompt, warmed once, under changing questions."""

from __future__ import annotations

from common import compare

from keepwarm import Engine

RULES = " ".join(
    f"Rule {n}: a guest who stays {n % 7 + 1} nights pays {60 - n % 9} crowns a night and leaves before {9 + n % 4}."
    for n in range(30)
)
SYSTEM = {"role": "system", "content": f"You answer guests of a small hotel, in one sentence. {RULES}"}
QUESTIONS = ("When must I leave?", "What do three nights cost?", "Is there a discount for a week?")


def run(engine: Engine, tokens: int) -> None:
    engine.warm(messages=[SYSTEM])
    for question in QUESTIONS:
        compare(engine, question, tokens, messages=[SYSTEM, {"role": "user", "content": question}])
