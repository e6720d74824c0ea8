"""Counters of one archive, and a log that reports a failure once, not at every request."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


class Health:
    """Counts events of this process. `also` is called for each, to merge them into the shared counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failing: set[str] = set()
        self.also: Callable[[str, int], None] | None = None

    def count(self, name: str, delta: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += delta
        if self.also is not None and delta:
            self.also(name, delta)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def failed(self, what: str, error: BaseException) -> None:
        """Count a store error. Log it unless the last attempt of this kind failed, too."""
        self.count("store_errors")
        self._log_once(what, error)

    def asking(self, ask: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Return what `ask` does. When the catalogue fails, count that and return `otherwise`."""
        try:
            return ask()
        except sqlite3.Error as error:
            self.failed("asking the catalogue", error)
            return otherwise

    def dropped(self, what: str, error: BaseException | str) -> None:
        """Count a write that was dropped although nothing is broken. It is logged like a failure."""
        self.count("dropped_writes")
        self._log_once(what, error)

    def once(self, what: str, why: str) -> None:
        """Log that something is not done although nothing is broken, once until it works again."""
        self._log_once(what, why)

    def worked(self, what: str) -> None:
        """Note a success: the next failure of this kind is logged again."""
        with self._lock:
            self._failing.discard(what)

    def _log_once(self, what: str, error: BaseException | str) -> None:
        with self._lock:
            if what in self._failing:
                return
            self._failing.add(what)
        kind = "" if isinstance(error, str) else f"{type(error).__name__}: "
        log.warning("%s failed, requests go on without it: %s%s", what, kind, error)
