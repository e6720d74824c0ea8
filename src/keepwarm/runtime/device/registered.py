"""Memory of the host that a device copies from where it lies."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable

from keepwarm.core.memory import OWN_PAGES
from keepwarm.core.ports import Bytes


class Registered:
    """The registered memory of one device. Threads may share it."""

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], object]) -> None:
        """`register` is called with an address and a number of bytes, and says whether the device can copy from there
        now; `unregister` with the address, when nothing refers to the memory any more."""
        self._register, self._unregister = register, unregister
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}  # by start
        self._lock = threading.RLock()  # the collector may remove some while a thread adds others

    def add(self, data: Bytes) -> None:
        """Register bytes that are in pages of their own (`core.memory.own_bytes`), until `data` is collected. Views of
        them keep it. Less memory, and what the device does not take, stays as it is."""
        start = _address(data)
        if data.nbytes < OWN_PAGES or not data.flags.c_contiguous or start in self._ends:
            return
        if self._register(start, data.nbytes):
            with self._lock:
                self._ends[start] = start + data.nbytes
                insort(self._starts, start)
            weakref.finalize(data, self._remove, start).atexit = False

    def holds(self, rows: Bytes) -> bool:
        """Whether rows `[heads, n, head_bytes]`, each head's one after another, are in registered memory."""
        heads, count, width = rows.shape
        if not rows.size or rows.strides[1:] != (width, 1) or rows.strides[0] < 0:
            return False
        first = _address(rows)
        with self._lock:
            at = bisect_right(self._starts, first) - 1
            return at >= 0 and first + (heads - 1) * rows.strides[0] + count * width <= self._ends[self._starts[at]]

    def _remove(self, start: int) -> None:
        with self._lock:
            self._starts.remove(start)
            del self._ends[start]
        self._unregister(start)


def _address(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])
