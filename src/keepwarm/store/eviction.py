"""Replacement policies: pure bookkeeping over keys, no I/O. `store.catalog.ranking` keeps the same orders in the
catalogue, where processes share the disk tier's state.

A key that must stay for now (another run continues it, it is pinned, a new run stands on it) is *held*: it keeps its
place in the order, but is skipped. So a policy needs no knowledge of chains, and evicting leaves first costs no search.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Literal

from keepwarm.core.ports import Policy

PolicyName = Literal["lru", "lfu", "s3fifo"]
DEFAULT_POLICY: PolicyName = "s3fifo"

SMALL_PART = 2  # S3-FIFO: the small queue's share of the cap is 1 / SMALL_PART (docs/decisions/0010-eviction.md)
MOST_USES = 3  # S3-FIFO: uses are counted up to here
PROMOTED_FROM = 2  # S3-FIFO: uses since it entered that move a key from the small queue to the main one
_SLACK = 64


class _Ranked:
    """Keys by rank, the lowest first, some of them held. Every call is O(log n), amortised."""

    def __init__(self) -> None:
        self._ranks: dict[Hashable, tuple[int, int]] = {}
        self._held: dict[Hashable, int] = {}
        self._heap: list[tuple[tuple[int, int], Hashable]] = []  # outdated entries are dropped at the top

    def __contains__(self, key: Hashable) -> bool:
        return key in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def rank(self, key: Hashable, rank: tuple[int, int]) -> None:
        """Enter a key, or move it. Ranks are unique."""
        self._ranks[key] = rank
        if key not in self._held:
            self._push(key, rank)

    def drop(self, key: Hashable) -> None:
        del self._ranks[key]
        self._held.pop(key, None)

    def hold(self, key: Hashable) -> None:
        self._held[key] = self._held.get(key, 0) + 1

    def release(self, key: Hashable) -> None:
        left = self._held.pop(key, 0) - 1
        if left > 0:
            self._held[key] = left
        elif left == 0:
            self._push(key, self._ranks[key])

    def first(self) -> Hashable | None:
        """The lowest key that is not held."""
        while self._heap:
            rank, key = self._heap[0]
            if self._ranks.get(key) == rank and key not in self._held:
                return key
            heappop(self._heap)
        return None

    def _push(self, key: Hashable, rank: tuple[int, int]) -> None:
        heappush(self._heap, (rank, key))
        if len(self._heap) > 4 * len(self._ranks) + _SLACK:
            self._heap = [(rank, key) for key, rank in self._ranks.items() if key not in self._held]
            heapify(self._heap)


class LRU:
    """Least recently used first. Implements `core.ports.Policy`."""

    def __init__(self) -> None:
        self._keys = _Ranked()
        self._now = 0

    def add(self, key: Hashable, size: int, content: Hashable = None) -> None:
        self._now += 1
        self._keys.rank(key, (0, self._now))

    def touch(self, key: Hashable) -> None:
        if key in self._keys:
            self._now += 1
            self._keys.rank(key, (0, self._now))

    def remove(self, key: Hashable) -> None:
        if key in self._keys:
            self._keys.drop(key)

    def hold(self, key: Hashable) -> None:
        if key in self._keys:
            self._keys.hold(key)

    def release(self, key: Hashable) -> None:
        if key in self._keys:
            self._keys.release(key)

    def evict(self) -> Hashable | None:
        key = self._keys.first()
        if key is not None:
            self._keys.drop(key)
        return key


class LFU:
    """Least frequently used first, with dynamic ageing (LFU-DA): a key's weight is its uses plus the weight that the
    last evicted key had when this key was last used. So old favourites fall behind. Ties: least recently used first.
    """

    def __init__(self) -> None:
        self._keys = _Ranked()
        self._uses: dict[Hashable, int] = {}
        self._weights: dict[Hashable, int] = {}
        self._age = 0
        self._now = 0

    def add(self, key: Hashable, size: int, content: Hashable = None) -> None:
        self._uses[key] = 0
        self._use(key)

    def touch(self, key: Hashable) -> None:
        if key in self._keys:
            self._use(key)

    def _use(self, key: Hashable) -> None:
        self._now += 1
        self._uses[key] += 1
        self._weights[key] = self._age + self._uses[key]
        self._keys.rank(key, (self._weights[key], self._now))

    def remove(self, key: Hashable) -> None:
        if key in self._keys:
            self._keys.drop(key)
            del self._uses[key], self._weights[key]

    def hold(self, key: Hashable) -> None:
        if key in self._keys:
            self._keys.hold(key)

    def release(self, key: Hashable) -> None:
        if key in self._keys:
            self._keys.release(key)

    def evict(self) -> Hashable | None:
        key = self._keys.first()
        if key is not None:
            self._age = max(self._age, self._weights[key])
            self.remove(key)
        return key


class S3FIFO:
    """Three first-in-first-out queues (SOSP '23). New keys enter a small queue. They reach the main one when they are
    used there, or come back soon after they left it (a queue of ghosts remembers the names of their contents, not their
    bytes). So a scan of prompts that are seen once evicts nothing that is in use. `cap` is the tier's, in bytes.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._small, self._main = _Ranked(), _Ranked()
        self._main_bytes = 0
        self._keys: dict[Hashable, tuple[int, Hashable]] = {}  # size, content
        self._uses: dict[Hashable, int] = {}
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._now = 0

    def add(self, key: Hashable, size: int, content: Hashable = None) -> None:
        self._now += 1
        self._keys[key] = (size, key if content is None else content)
        self._uses[key] = 0
        if self._keys[key][1] in self._ghosts:
            del self._ghosts[self._keys[key][1]]
            self._main.rank(key, (0, self._now))
            self._main_bytes += size
        else:
            self._small.rank(key, (0, self._now))

    def touch(self, key: Hashable) -> None:
        if key in self._uses:
            self._uses[key] = min(MOST_USES, self._uses[key] + 1)

    def remove(self, key: Hashable) -> None:
        if key not in self._keys:
            return
        size, _ = self._keys.pop(key)
        del self._uses[key]
        if key in self._small:
            self._small.drop(key)
        else:
            self._main.drop(key)
            self._main_bytes -= size

    def hold(self, key: Hashable) -> None:
        if key in self._keys:
            self._queue(key).hold(key)

    def release(self, key: Hashable) -> None:
        if key in self._keys:
            self._queue(key).release(key)

    def evict(self) -> Hashable | None:
        while True:
            small, main = self._small.first(), self._main.first()
            if small is not None and (main is None or self._main_bytes <= self._cap - self._cap // SMALL_PART):
                if self._uses[small] < PROMOTED_FROM:
                    self._remember(small)
                    self.remove(small)
                    return small
                self._now += 1
                self._small.drop(small)
                self._main_bytes += self._keys[small][0]
                self._main.rank(small, (0, self._now))
                self._uses[small] = 0
            elif main is None:
                return None
            elif self._uses[main] == 0:
                self.remove(main)
                return main
            else:
                self._now += 1
                self._uses[main] -= 1
                self._main.rank(main, (0, self._now))

    def _queue(self, key: Hashable) -> _Ranked:
        return self._small if key in self._small else self._main

    def _remember(self, key: Hashable) -> None:
        content = self._keys[key][1]
        self._ghosts.pop(content, None)
        self._ghosts[content] = None
        while len(self._ghosts) > len(self._keys):  # at most as many ghosts as runs
            self._ghosts.popitem(last=False)


def policy(name: PolicyName, cap: int) -> Policy:
    """Return a policy for a tier of `cap` bytes. Raises ValueError for an unknown name."""
    if name == "lru":
        return LRU()
    if name == "lfu":
        return LFU()
    if name == "s3fifo":
        return S3FIFO(cap)
    raise ValueError(f"a policy is 'lru', 'lfu' or 's3fifo', got {name!r}")
