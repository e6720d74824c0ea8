"""Replacement policies: pure bookkeeping over keys, no I/O. The disk tier applies the same order in SQL, because its
state is shared among processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class LRU:
    """Least recently used first. Implements `core.ports.Policy`; every call but `victims` is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, int] = OrderedDict()

    def add(self, key: Hashable, size: int) -> None:
        """Enter `key` (of `size` bytes) as the most recently used."""
        self._order[key] = size
        self._order.move_to_end(key)

    def touch(self, key: Hashable) -> None:
        """Note a use of `key`; unknown keys are ignored, since a key may be removed while it is in use."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        """Forget `key`; unknown keys are ignored."""
        self._order.pop(key, None)

    def victims(self) -> Iterable[Hashable]:
        """Keys from the least to the most recently used, as of this call."""
        return tuple(self._order)
