"""How much memory the bodies of all requests under way may take, together and for one tenant."""

from __future__ import annotations

import threading
from collections import Counter

from keepwarm.core.shares import may_hold
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.settings import LimitsSection

PER_VALUE = 128  # bytes that a JSON value takes as Python's object, about
_BODIES = 16  # largest bodies that there is room for


class Held:
    """The bytes of all bodies. Threads may share it."""

    def __init__(self, limits: LimitsSection) -> None:
        self._most = _BODIES * (limits.max_body + PER_VALUE * limits.max_values)
        self._used: Counter[str] = Counter()  # by owner
        self._lock = threading.Lock()

    def take(self, owner: str, nbytes: int) -> None:
        """Count bytes for an owner; "" stands for no owner, and may hold all of them. Raises ApiError if there is no
        room for them now."""
        with self._lock:
            free = self._most - self._used.total()
            if nbytes > free or not may_hold(owner, self._used[owner], nbytes, free):
                raise ApiError(
                    "overloaded",
                    f"bodies of requests under way take {self._used.total()} bytes, {self._used[owner]} of them this "
                    f"tenant's, and at most {self._most} may: ask again later",
                    retry_after=1,
                )
            self._used[owner] += nbytes

    def give(self, owner: str, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._used[owner] -= nbytes
            if not self._used[owner]:
                del self._used[owner]


class HeldBody:
    """The bytes of one request's body, until the request has ended. Threads may share it."""

    def __init__(self, held: Held, owner: str) -> None:
        self._held, self._owner, self._bytes = held, owner, 0
        self._closed = False
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Count more bytes. Raises ApiError if there is no room for them."""
        with self._lock:
            if not self._closed:  # if it is closed, the client has left and the worker is late
                self._held.take(self._owner, nbytes)
                self._bytes += nbytes

    def close(self) -> None:
        """Give all bytes back. What is taken later is not counted."""
        with self._lock:
            self._closed = True
            self._held.give(self._owner, self._bytes)
            self._bytes = 0
