"""A chat with several last questions."""

from __future__ import annotations

STEP = 64


SYSTEM = "You are the clerk of a small harbour. " + " ".join(
    f"Pier {n} takes boats up to {n * 3} metres." for n in range(40)
)


QUESTIONS = ("Where can a boat of 20 metres go?", "Name a pier.", "Write one line about the sea.\nThen stop.")


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
