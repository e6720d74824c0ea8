"""A circuit breaker: after a failure, requests are refused at once until a test in the background succeeds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

FIRST_PAUSE = 0.5  # seconds until the first test after a failure; doubled by each test that fails
LONGEST_PAUSE = 30.0


class Breaker:
    """Closed: requests pass. Open: no request passes until a `probe` succeeds. Safe for use from several threads."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, first_pause: float = FIRST_PAUSE) -> None:
        self._clock = clock
        self._first_pause = first_pause
        self._lock = threading.Lock()
        self._pause = first_pause
        self._next = 0.0  # when to test, while open
        self._closed = True
        self.opened = 0  # how often

    @property
    def closed(self) -> bool:
        return self._closed

    def failed(self) -> bool:
        """Open it, or wait longer before the next test. Return whether it was closed."""
        with self._lock:
            was_closed, self._closed = self._closed, False
            self.opened += was_closed
            # With jitter, so that many replicas do not come back at the same moment.
            self._next = self._clock() + self._pause * random.uniform(0.75, 1.25)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return was_closed

    def worked(self) -> None:
        """Note that a request succeeded: the next failure starts with the first pause again."""
        self._pause = self._first_pause

    def wait(self) -> float:
        """Seconds until a test is due; infinite while closed."""
        with self._lock:
            return float("inf") if self._closed else max(0.0, self._next - self._clock())

    def probe(self, test: Callable[[], None]) -> bool:
        """Run the test if it is due, and close if it raises nothing. Return whether it is closed now. Called only from
        a background thread."""
        if self.wait() > 0:
            return False
        try:
            test()
        except Exception:
            self.failed()
            return False
        with self._lock:
            self._closed = True
        return True
