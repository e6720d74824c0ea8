"""One request at a time, for a model that keeps part of a sequence's state in its modules (RecurrentGemma): a
concurrent request would change its answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keepwarm.errors import Overloaded


class Alone:
    """A lock, held from a request's beginning to its end. Threads wait for each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @classmethod
    def of(cls, model: Any) -> Alone:
        """Return the lock of a model object. Engines that share the model share the lock."""
        found: Alone = model.__dict__.setdefault("_keepwarm_alone", cls())
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. Raises Overloaded in a thread that has a request under way: it would wait for itself."""
        me = threading.get_ident()
        if self._owner == me:
            raise Overloaded(
                "this model keeps part of its state in its modules, so it answers one request at a time: finish or "
                "close the one that is under way"
            )
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None
