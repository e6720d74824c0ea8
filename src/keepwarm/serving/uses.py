"""What needs a model to stay loaded, counted: requests, their answers, and work that threads do for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Uses:
    """Of one model. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._open = False

    @property
    def count(self) -> int:
        """How many there are now."""
        return self._count

    def open(self) -> None:
        """Let uses begin: the model is loaded."""
        with self._lock:
            self._open = True

    def close(self) -> bool:
        """Let none begin any more, unless some are under way; whether that is so now."""
        with self._lock:
            self._open = self._open and self._count > 0
            return not self._open

    def begin(self) -> bool:
        """Count one more; whether the model is loaded. If not, nothing is counted."""
        with self._lock:
            self._count += self._open
            return self._open

    def end(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Count one for the length of a block, which gets whether the model is loaded."""
        begun = self.begin()
        try:
            yield begun
        finally:
            if begun:
                self.end()


class Hold:
    """One use, until it is closed. Safe to close twice."""

    def __init__(self, uses: Uses) -> None:
        """The model must be loaded."""
        begun = uses.begin()
        assert begun
        self._uses: Uses | None = uses

    def close(self) -> None:
        uses, self._uses = self._uses, None
        if uses is not None:
            uses.end()
