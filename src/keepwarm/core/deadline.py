"""Work that can be abandoned: it asks now and then whether it still has time, and whether anybody waits for it.

Whoever starts the work runs it under a `Deadline`; what may take long calls `go_on`. Without one everything goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from keepwarm.errors import TookTooLong


class Deadline:
    """Of one piece of work. Any thread may give it up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._given_up = False

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._given_up = True

    def check(self) -> None:
        """Raises TookTooLong."""
        if self._given_up:
            raise TookTooLong("nobody waits for this request any more")
        if time.monotonic() > self._until:
            raise self.late

    @property
    def late(self) -> TookTooLong:
        """What is said when its time is over."""
        return TookTooLong(
            f"it took more than {self._seconds:g} s to read, render and tokenize the request: send less at once"
        )

    @contextmanager
    def governing(self) -> Iterator[None]:
        """What runs in here asks this deadline."""
        before = _now.set(self)
        try:
            yield
        finally:
            _now.reset(before)


_now: ContextVar[Deadline | None] = ContextVar("keepwarm_deadline", default=None)


def go_on() -> None:
    """Raises TookTooLong when the work that runs here is late, or abandoned."""
    governs = _now.get()
    if governs is not None:
        governs.check()
