"""Memory of the host that a device copies from where it lies."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable

from keepwarm.core.memory import OWN_PAGES
from keepwarm.core.ports import Bytes


class Registered:
    """The registered memory of one device. Threads may share it."""

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], bool]) -> None:
        """`register` is called with an address and a number of bytes, and says whether the device can copy from there
        now; `unregister` with the address, when nothing refers to the memory any more, and says whether that is so."""
        self._register, self._unregister = register, unregister
        self._process = os.getpid()  # a forked one has the memory, and no device
        self._stuck: list[object] = []  # memory that could not be unregistered: the device may still copy from there
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}  # by start
        self._lock = threading.RLock()  # the collector may remove some while a thread adds others

    def add(self, data: Bytes) -> None:
        """Register bytes that are in pages of their own (`core.memory.own_bytes`), until `data` is collected. Views of
        them keep it. Other memory, and what the device does not take, stays as it is."""
        start = _address(data)
        is_own = data.nbytes >= OWN_PAGES and start % mmap.PAGESIZE == 0 and data.flags.c_contiguous
        if not is_own or start in self._ends or os.getpid() != self._process:
            return
        if self._register(start, data.nbytes):
            with self._lock:
                self._ends[start] = start + data.nbytes
                insort(self._starts, start)
            weakref.finalize(data, self._remove, start, data.base).atexit = False

    def holds(self, rows: Bytes) -> bool:
        """Whether rows `[heads, n, head_bytes]`, each head's one after another, are in registered memory."""
        heads, count, width = rows.shape
        if not rows.size or rows.strides[1:] != (width, 1) or rows.strides[0] < 0 or os.getpid() != self._process:
            return False
        first = _address(rows)
        last = first + (heads - 1) * rows.strides[0] + count * width
        with self._lock:
            starts = tuple(self._starts)  # the collector may remove some in this very thread
            at = bisect_right(starts, first) - 1
            return at >= 0 and last <= self._ends.get(starts[at], 0)

    def _remove(self, start: int, memory: object) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            self._starts.remove(start)
            del self._ends[start]
        if not self._unregister(start):
            self._stuck.append(memory)


def _address(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])
