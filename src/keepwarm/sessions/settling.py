"""Settling: generated tokens are replayed through the schedule while nobody waits, so that the next turn is `exact`."""

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

_ROWS = 32  # of the lean decoder, between two looks for a request: some ten milliseconds
_POLL = 0.02  # seconds
GoOn = Callable[[], bool]


def replay(pipeline: Pipeline, compiled: CompiledPrompt, epoch: int, go_on: GoOn = lambda: True) -> bool:
    """Compute and store what of a prompt is not stored yet, step by step, for what began at `epoch`; False if `go_on`
    said no before the end.

    Whole steps that were computed until then are kept. Rows of the lean decoder never meet (record 14), so there a
    step may be broken off between any two rows; elsewhere only between steps.
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
    """A thread that settles one session after another when nothing was asked for `after` seconds. It is there while
    sessions wait, and holds the engine as long.

    `settle` is given what was added, and a question to ask between two steps: may it go on? It returns False when it
    was told not to, and is then called again.
    """

    def __init__(self, pipeline: Pipeline, settle: Callable[[bytes, GoOn], bool], after: float | None) -> None:
        """`after` None: nothing happens until `settle_all`."""
        self._pipeline = pipeline
        self._settle = settle
        self._after = after
        self._waiting: dict[bytes, object] = {}  # to what tells one adding of a session from its next
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, key: bytes) -> None:
        """Settle a session later; one that waits already goes to the end."""
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
        """Settle what waits, now; returns how many sessions that were."""
        count = 0
        while (key := next(iter(self.waiting()), None)) is not None:
            count += self._one(key, lambda: True)
        return count

    def close(self, until: float = math.inf) -> bool:
        """End the thread; what waits is settled first, unless nothing settles by itself. False when that is not done
        `until` then (`time.monotonic`)."""
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
        """Settle a session unless another thread just did; whether it is done."""
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
                if done and self._waiting[key] is added:  # a turn that was added meanwhile waits on
                    del self._waiting[key]
            return done
