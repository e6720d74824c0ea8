"""A cache of values by key; the least recently used ones are evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_ENTRY = 256  # weight of an entry besides its value


class Recent(Generic[_Key, _Value]):
    """At most `capacity` in weight (characters or bytes). Threads may share it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._weight = 0
        self._lock = threading.Lock()
        self._items: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self._weight = 0

    def put(self, key: _Key, value: _Value, weight: int) -> None:
        weight += _ENTRY
        with self._lock:
            earlier = self._items.pop(key, None)
            self._items[key] = (value, weight)
            self._weight += weight - (earlier[1] if earlier else 0)
            while self._weight > self._capacity:
                self._weight -= self._items.popitem(last=False)[1][1]


_Sliced = TypeVar("_Sliced", str, bytes)


def common_length(a: _Sliced, b: _Sliced) -> int:
    """Length of the common beginning of two texts."""
    agreed, size = 0, min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    while size - agreed > 1:  # they agree up to `agreed`, but not up to `size`
        middle = (agreed + size) // 2
        if a[agreed:middle] == b[agreed:middle]:
            agreed = middle
        else:
            size = middle
    return agreed
