"""Examples that every request begins with; only the new input is computed."""

from __future__ import annotations

from common import compare

from keepwarm import Engine

LETTERS = (
    ("The desk was closed again and nobody answered.", "angry"),
    ("Thank you for mending the lamp so quickly.", "friendly"),
    ("My card has the number four thousand.", "neutral"),
)
SHOWN = "\n\n".join(f"Letter: {text}\nTone: {tone}" for text, tone in LETTERS * 8)
SYSTEM = {"role": "system", "content": f"Name the tone of a letter in one word.\n\n{SHOWN}"}
NEW = ("I will not pay for a broken window.", "The meeting is at ten.", "Please give my regards to the cook.")


def run(engine: Engine, tokens: int) -> None:
    engine.warm(messages=[SYSTEM])
    for letter in NEW:
        asked = {"role": "user", "content": f"Letter: {letter}\nTone:"}
        compare(engine, letter, tokens, messages=[SYSTEM, asked])
