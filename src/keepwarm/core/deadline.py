"""Work that can be abandoned: it checks now and then whether it still has time, and whether a caller still waits.

The caller runs the work under a `Deadline`; code that may take long calls `go_on`. Without a deadline, that does
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from keepwarm.errors import TookTooLong


class Deadline:
    """The deadline of one piece of work. Any thread may give the work up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._given_up = False

    def give_up(self) -> None:
        """Note that no caller waits for the work any more."""
        self._given_up = True

    def check(self) -> None:
        """Raise TookTooLong when the work is late, or was given up."""
        if self._given_up:
            raise TookTooLong("nobody waits for this request any more")
        if time.monotonic() > self._until:
            raise self.late

    @property
    def late(self) -> TookTooLong:
        """The error for work whose time is over."""
        return TookTooLong(
            f"it took more than {self._seconds:g} s to read, render and tokenize the request: send less at once"
        )

    @contextmanager
    def governing(self) -> Iterator[None]:
        """Apply this deadline to the code in the body."""
        before = _now.set(self)
        try:
            yield
        finally:
            _now.reset(before)


_now: ContextVar[Deadline | None] = ContextVar("keepwarm_deadline", default=None)


def go_on() -> None:
    """Raise TookTooLong when the present work is late, or was given up."""
    governs = _now.get()
    if governs is not None:
        governs.check()
