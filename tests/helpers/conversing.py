"""A conversation to have in a session, and the same without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from keepwarm import Engine
from keepwarm.core.blocks import common_length, token_ids
from keepwarm.sessions import turn as turns

SYSTEM = "You are the clerk of a harbour. " + " ".join(f"Pier {n} takes boats of {n} metres." for n in range(12))
SAID = ["Where does a boat of 9 metres go?", "And one of 3?", "Naïve question: 中文 🙂?", "Thank you.  ", "\n\nBye"]


QUIET: dict[str, Any] = {"settle_after": None, "step": 512}


class Runs:
    """Whose KV was computed, and what of it a prompt shares."""

    def __init__(self) -> None:
        self._runs: list[Any] = []

    def shared(self, engine: Engine, messages: Any, result: Any) -> int:
        """Leading tokens that a request for an answer to `messages` has in common with the earlier ones."""
        asked = engine.pipeline.prepare(None, {"messages": turns.marked(messages)}).compiled.tokens
        assert len(asked) == result.prompt_tokens
        found = max((common_length(each, asked) for each in self._runs), default=0)
        self._runs.append(np.concatenate([asked, token_ids(result.token_ids[:-1])]))
        return found


def fresh(engine: Engine, messages: Any, **arguments: Any) -> Any:
    """The same conversation as a request of its own that finds nothing and stores nothing."""
    return engine.generate(messages=turns.marked(messages), trace=True, reuse="off", **arguments)


def history(engine: Engine, name: str = "s", salt: str | None = None) -> list[dict[str, Any]]:
    return list(engine.sessions.show(name, salt).messages)
