"""Settling: recompute generated tokens by the schedule while the engine is idle, so that the next turn is `exact`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.core.spans import Reuse
from keepwarm.core.unclosed import remaining
from keepwarm.pipeline.pipeline import Pipeline

log = logging.getLogger(__name__)

_ROWS = 32  # rows of the lean decoder between two checks for new requests: some ten milliseconds
_POLL = 0.02  # seconds
GoOn = Callable[[], bool]


def replay(pipeline: Pipeline, compiled: CompiledPrompt, epoch: int, go_on: GoOn = lambda: True) -> bool:
    """Compute and store the parts of a prompt that are not stored yet, step by step, for work that began at `epoch`.
    Return False if `go_on` stopped it before the end.

    The whole steps computed until then are kept. Rows of the lean decoder are independent (record 14), so with it work
    may stop between any two rows; otherwise only between steps.
    """
    linked = pipeline.linked(compiled, epoch)
    if len(pipeline.archive.lookup(linked.blocks.exact)) == len(linked.blocks):
        return True
    runner, length = pipeline.model.runner, len(compiled.tokens)
    with pipeline.lease(linked, Reuse.EXACT, length, warming=True) as placed:
        for span in placed.plan.computes:
            rows = _ROWS if runner.lean is not None else span.end - span.start
            for start in range(span.start, span.end, rows):
                if not go_on():
                    return False
                runner.extend(compiled.tokens[start : min(start + rows, span.end)], placed.arena.cache, start)
            placed.computed_to = span.end
    return True


class Settler:
    """A thread that settles one session after another when no request came for `after` seconds. It runs while
    sessions wait, and keeps the engine alive until then.

    `settle` gets the key that was added, and a function to call between two steps, which tells whether to go on. It
    returns False when it was stopped, and is then called again.
    """

    def __init__(self, pipeline: Pipeline, settle: Callable[[bytes, GoOn], bool], after: float | None) -> None:
        """`after` None: nothing is settled until `settle_all`."""
        self._pipeline = pipeline
        self._settle = settle
        self._after = after
        self._waiting: dict[bytes, object] = {}  # key -> a new object for each `add`, to tell one call from the next
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, key: bytes) -> None:
        """Queue a session; one that waits already moves to the end."""
        with self._lock:
            self._waiting.pop(key, None)
            self._waiting[key] = object()
            if self._after is not None and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="keepwarm-settle", daemon=True)
                self._thread.start()

    def waiting(self) -> tuple[bytes, ...]:
        with self._lock:
            return tuple(self._waiting)

    def settle_all(self) -> int:
        """Settle all waiting sessions now. Return how many there were."""
        count = 0
        while (key := next(iter(self.waiting()), None)) is not None:
            count += self._one(key, lambda: True)
        return count

    def close(self, until: float = math.inf) -> bool:
        """End the thread, then settle waiting sessions unless `after` is None. Return False when this is not done by
        the time `until` (`time.monotonic`)."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(remaining(until))

        def in_time() -> bool:
            return time.monotonic() < until

        while self._after is not None and in_time() and (key := next(iter(self.waiting()), None)) is not None:
            self._one(key, in_time)
        return in_time()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._waiting:
                    self._thread = None
                    return
                key = next(iter(self._waiting))
            if self._idle():
                self._one(key, self._idle)
            else:
                time.sleep(_POLL)

    def _idle(self) -> bool:
        return not self._closed and self._pipeline.activity.idle_seconds() >= (self._after or 0.0)

    def _one(self, key: bytes, go_on: GoOn) -> bool:
        """Settle a session unless another thread just did. Return whether it is done."""
        with self._working:
            with self._lock:
                added = self._waiting.get(key)
            if added is None:
                return False
            try:
                done = self._settle(key, go_on)
            except Exception as error:
                log.warning("a session could not be settled, its next turn computes the last answer again: %s", error)
                done = True
            with self._lock:
                if done and self._waiting[key] is added:  # else a turn was added meanwhile; the session keeps waiting
                    del self._waiting[key]
            return done
