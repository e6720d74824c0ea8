"""Whether requests are under way, for work that must not delay any."""

from __future__ import annotations

import threading
import time
from types import TracebackType

_PROMPT = 0.05  # seconds that background work waits for a prompt at most: a cold one may take many
_NEXT = 0.003  # seconds: by then a short answer has ended, and a program has asked a next question that is ready


class Activity:
    """Counts requests under way, as a context for each. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._last = time.monotonic()
        self._quiet_until = 0.0

    def touch(self) -> None:
        """Note that a request came in."""
        self._last = time.monotonic()
        self._quiet_until = self._last + _PROMPT

    def first_token(self) -> None:
        """Note that the prompt of a request is computed. A short answer may end before background work begins."""
        self._quiet_until = min(self._quiet_until, time.monotonic() + _NEXT)

    def quiet_seconds(self) -> float:
        """How long background work should pause, since a request waits for its first token or may come soon."""
        return max(0.0, self._quiet_until - time.monotonic())

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._running -= 1
            self._last = time.monotonic()
            self._quiet_until = max(self._quiet_until, self._last + _NEXT)

    def idle_seconds(self) -> float:
        """Seconds since the last request; negative while one runs."""
        with self._lock:
            return -1.0 if self._running else time.monotonic() - self._last
