"""What callers are told about sessions: plain, JSON-ready records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SessionInfo:
    """One session in a list."""

    name: str
    turns: int  # answers recorded, on all branches
    tokens: int  # of the last prompt and its answer
    settled: bool  # the whole history is stored as an exact prefix of the next turn
    created: float  # seconds since the epoch
    used: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SessionView:
    """One session in full."""

    info: SessionInfo
    messages: tuple[dict[str, Any], ...]  # of the current branch
    branches: tuple[int, ...]  # messages that each other branch shares with the current one
    waits: bool  # the last message is not an answer; `regenerate` makes one

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
