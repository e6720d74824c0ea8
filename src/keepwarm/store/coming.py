"""What was handed over to be stored and cannot be found yet: a request that begins like it waits for it a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keepwarm.core.blocks import Block, lead, leading
from keepwarm.core.unclosed import nothing

TIMEOUT = 0.5  # seconds, at most: copying what one request left takes a few milliseconds


@dataclass(frozen=True, eq=False)
class Expected:
    """Blocks on their way, by the first of them."""

    first: Block
    there: threading.Event = field(default_factory=threading.Event)


class Coming:
    """Puts that are under way. Safe for use from several threads."""

    def __init__(self, hurry: Callable[[], None] = nothing) -> None:
        """`hurry` is called when somebody waits."""
        self._hurry = hurry
        self._lock = threading.Lock()
        self._by_parent: dict[bytes, list[Expected]] = {}

    def expect(self, blocks: Sequence[Block]) -> Expected:
        """Note consecutive blocks that are handed over now."""
        expected = Expected(blocks[0])
        with self._lock:
            self._by_parent.setdefault(expected.first.parent_exact, []).append(expected)
        return expected

    def arrived(self, expected: Expected) -> None:
        """They can be found now, or are waited for no longer. A second call does nothing."""
        with self._lock:
            if not expected.there.is_set():
                beside = self._by_parent[expected.first.parent_exact]
                beside.remove(expected)
                if not beside:
                    del self._by_parent[expected.first.parent_exact]
        expected.there.set()

    def wait(self, block: Block, common: int) -> bool:
        """Wait for what will begin like `block`, for more than `common` tokens; True when some of it arrived. What is
        under another salt is not waited for, so that nobody's clock tells of it."""
        if not self._by_parent:
            return False
        with self._lock:
            beside = [*self._by_parent.get(block.parent_exact, ())]
        wanted = lead(block.tokens, block.salts)
        until = time.monotonic() + TIMEOUT
        awaited = [each for each in beside if _in_common(wanted, each.first, block.salts) > common]
        if awaited:
            self._hurry()
        arrived = [each.there.wait(max(0.0, until - time.monotonic())) for each in awaited]
        for each in awaited:  # where the store hangs, one request has waited for it, and no more do
            self.arrived(each)
        return any(arrived)


def _in_common(wanted: bytes, first: Block, salts: Sequence[bytes]) -> int:
    return leading(wanted, lead(first.tokens, first.salts), salts) if first.salts == tuple(salts) else 0
