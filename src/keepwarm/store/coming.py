"""Blocks that were handed over to be stored but cannot be found yet. A request with the same beginning waits briefly
for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keepwarm.core.blocks import Block, lead, leading
from keepwarm.core.unclosed import nothing

TIMEOUT = 0.5  # seconds; usually copying one request's blocks takes a few milliseconds


@dataclass(frozen=True, eq=False)
class Expected:
    """Blocks that will be stored, identified by the first of them."""

    first: Block
    there: threading.Event = field(default_factory=threading.Event)


class Coming:
    """Puts that are under way. Safe for use from several threads."""

    def __init__(self, hurry: Callable[[], None] = nothing) -> None:
        """`hurry` is called when a request waits."""
        self._hurry = hurry
        self._lock = threading.Lock()
        self.arrivals = 0  # of all blocks
        self._by_parent: dict[bytes, list[Expected]] = {}

    def expect(self, blocks: Sequence[Block]) -> Expected:
        """Note consecutive blocks that are being handed over."""
        expected = Expected(blocks[0])
        with self._lock:
            self._by_parent.setdefault(expected.first.parent_exact, []).append(expected)
        return expected

    def arrived(self, expected: Expected) -> None:
        """Note that the blocks can be found now, or are no longer worth waiting for. A second call does nothing."""
        with self._lock:
            if not expected.there.is_set():
                beside = self._by_parent[expected.first.parent_exact]
                beside.remove(expected)
                self.arrivals += 1
                if not beside:
                    del self._by_parent[expected.first.parent_exact]
        expected.there.set()

    def wait(self, block: Block, common: int, since: int | None = None) -> bool:
        """Wait for blocks that share more than `common` first tokens with `block`. Return whether some arrived, or any
        did `since` a count of `arrivals`. Blocks under other salts are not waited for, so that timing does not reveal
        them."""
        with self._lock:
            beside = [*self._by_parent.get(block.parent_exact, ())]
            meanwhile = since is not None and self.arrivals != since
        wanted = lead(block.tokens, block.salts)
        until = time.monotonic() + TIMEOUT
        awaited = [each for each in beside if _in_common(wanted, each.first, block.salts) > common]
        if awaited:
            self._hurry()
        arrived = [each.there.wait(max(0.0, until - time.monotonic())) for each in awaited]
        for each in awaited:  # if the store hangs, only one request waits for it
            self.arrived(each)
        return any(arrived) or meanwhile


def _in_common(wanted: bytes, first: Block, salts: Sequence[bytes]) -> int:
    return leading(wanted, lead(first.tokens, first.salts), salts) if first.salts == tuple(salts) else 0
