"""Whether requests are under way, for work that must not delay any."""

from __future__ import annotations

import threading
import time
from types import TracebackType


class Activity:
    """Counts requests under way, as a context for each. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._last = time.monotonic()

    def touch(self) -> None:
        """A request came in."""
        self._last = time.monotonic()

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._running -= 1
            self._last = time.monotonic()

    def idle_seconds(self) -> float:
        """How long nothing was asked; negative while something runs."""
        with self._lock:
            return -1.0 if self._running else time.monotonic() - self._last
