"""How much of the devices' memory arenas may take, and the line of requests that wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from keepwarm.core.geometry import KVGeometry
from keepwarm.runtime.device import DevicePort

KEPT, KEPT_THERE = 2, 32  # idle arenas that are kept for reuse on the host, and on a device
ROUND = 512  # tokens; arenas have multiples of this, so that requests of similar length can use the same one
SHARE = 0.75  # of what is free on a device; the rest is for what steps compute
PAGES = 2 / 3  # of that share: what the pages of a batch have of it by default
_LEAST_CAP = 4 << 30  # bytes, where nothing says what is free


def rounded(capacity: int) -> int:
    """Return how many positions an arena has where so many are wanted."""
    return -(-capacity // ROUND) * ROUND


@dataclass
class Cap:
    """A byte cap of arenas. `default` is what it is by default, in words for errors; empty: it was asked for. Is it a
    `share` of what a device has free? The pages of a batch may be `given` a part."""

    whole: int
    default: str = ""
    share: bool = False
    given: int = 0
    returned: deque[int] = field(default_factory=deque)  # bytes that are no longer given; the collector may add some
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        with self._lock:
            while self.returned:
                self.given -= self.returned.popleft()
            return self.whole - self.given

    @property
    def meaning(self) -> str:
        """What it is, in words."""
        nbytes = self.nbytes
        without = f", and a batch has {self.given} of it" if self.given else ""
        return f"max_device is {nbytes}{self.default}{without}"

    def part(self, window: int) -> int:
        """Return the bytes that the pages of a batch may have: two thirds, but prompts of a whole context window, whose
        KV takes `window` bytes, fit into the rest, unless that is less than half."""
        if not self.share:
            return 0
        nbytes = self.nbytes
        return max(min(int(nbytes * PAGES), nbytes - window), nbytes // 2)

    def give(self, nbytes: int) -> int:
        """Give bytes to the pages of a batch, and return them."""
        with self._lock:
            self.given += nbytes
        return nbytes

    @classmethod
    def of(cls, asked: int | None, geometry: KVGeometry, ports: Sequence[DevicePort], window: int) -> Cap:
        """Return the cap that was `asked` for. By default it is a share of what is free on the devices of the layers,
        which have these ports; on the host there is room for `window` bytes, and at least 4 GiB."""
        if asked is not None:
            return cls(asked)
        found = _from_free_memory(geometry, ports)
        if found is None:
            nbytes = max(_LEAST_CAP, window)
            return cls(nbytes, " by default")
        nbytes, where = found
        return cls(nbytes, f", by default {SHARE:.0%} of what was free on {where} when the engine was made", share=True)


def _from_free_memory(geometry: KVGeometry, ports: Sequence[DevicePort]) -> tuple[int, str] | None:
    """Return the bytes of all layers together, and the device that allows no more; None if no device says."""
    sizes = [layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in geometry.layers]
    found = []
    for port in dict.fromkeys(ports):
        part = sum(size for size, each in zip(sizes, ports, strict=True) if each is port)
        port.reclaim()  # what loading took and freed is free for arenas
        free = port.free_memory()
        if free is not None and part:
            found.append((int(free * SHARE) * sum(sizes) // part, str(port.device)))
    return min(found, default=None)


class Line:
    """Requests that wait for memory, in the order in which they came."""

    def __init__(self, changed: threading.Condition) -> None:
        """`changed` is notified whenever somebody leaves."""
        self._changed = changed
        self._waiting: deque[object] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def place(self, until: float) -> Iterator[None]:
        """Have a place in the line while the `with` block runs. It begins when those before have left, or at a time
        (of `time.monotonic`)."""
        mine = object()
        with self._changed:
            self._waiting.append(mine)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting[0] is mine, max(0.0, until - time.monotonic()))
            yield
        finally:
            with self._changed:
                self._waiting.remove(mine)
                self._changed.notify_all()
