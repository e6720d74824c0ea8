"""A lock that is handed over in order: a thread that asks again at once comes after those that wait."""

from __future__ import annotations

import threading
from types import TracebackType


class TurnLock:
    """Threads get it in the order in which they asked, preferred threads before the others. The thread that holds it
    may take it again."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: list[tuple[int, threading.Lock]] = []
        self._preferred: set[int] = set()
        self._owner: int | None = None
        self._depth = 0

    def prefer(self) -> None:
        """Prefer this thread to others, because answers wait for it."""
        with self._mutex:
            self._preferred.add(threading.get_ident())

    def prefer_no_longer(self) -> None:
        with self._mutex:
            self._preferred.discard(threading.get_ident())

    @property
    def is_preferred(self) -> bool:
        """Whether this thread is preferred."""
        return threading.get_ident() in self._preferred

    def acquire(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()
        except BaseException:  # an interrupt; this thread may have the lock already
            with self._mutex:
                had = (me, turn) not in self._waiting
                if not had:
                    self._waiting.remove((me, turn))
            if had:
                self.release()
            raise

    def release(self) -> None:
        with self._mutex:
            if self._owner != threading.get_ident():
                raise RuntimeError("this thread does not have the lock")
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                first = next((one for one in self._waiting if one[0] in self._preferred), self._waiting[0])
                self._waiting.remove(first)
                self._owner, self._depth = first[0], 1
                first[1].release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
