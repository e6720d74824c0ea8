"""Continuous batching: many requests run on one engine at once, and may join or leave at every token.

One worker thread works in rounds: it admits requests, computes up to `max_prefill_tokens` tokens of prompts, and adds
a token to every running answer. With the lean decoder one pass does this for all answers: they decode from shared
pages, and a common beginning is read once. An answer equals, to the bit, that of `Engine.generate` alone.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Unpack

from keepwarm.batching.request import Listener, Ticket, Waiting
from keepwarm.batching.rounds import Rounds
from keepwarm.core.request import GenerateArgs
from keepwarm.core.shares import may_hold
from keepwarm.core.unclosed import closing, nothing
from keepwarm.engine import Engine
from keepwarm.errors import ConfigError, Overloaded, PromptTooLong
from keepwarm.runtime.arena.for_pages import LEAST, bytes_for_pages
from keepwarm.runtime.lock import TurnLock
from keepwarm.runtime.native.places import PAGE
from keepwarm.runtime.pages import CopyRows, KVPages, page_bytes, pages_for
from keepwarm.runtime.runner import Runner
from keepwarm.store.page_pool import PageCounts, PagePool

log = logging.getLogger(__name__)

_RETRY = 0.005  # seconds between two tries while nothing can run (pages are in use, blocks are being stored)
_LOOK = 5.0  # seconds between two checks by an idle thread that its batcher still exists
# Rows that other work on the model may compute before the batch's next step has its turn. A device computes many in
# the time of one.
_PIECE, _DEVICE_PIECE = 16, 256


@dataclass(frozen=True)
class BatchStats:
    """What a Batcher is doing."""

    waiting: int
    prefilling: int
    running: int
    pages: PageCounts
    peak_pages: int  # the most pages in use in any round
    slots_used: float  # share of token slots, in pages in use, that held tokens, over all rounds; 1.0 before any round


class Batcher:
    """Runs many requests on one engine at once. Threads may share it; close it before the engine."""

    def __init__(
        self, engine: Engine, *, max_batch: int = 32, max_queue: int = 256, max_prefill_tokens: int = 256
    ) -> None:
        """At most `max_batch` requests run and `max_queue` wait; a round computes `max_prefill_tokens` of prompts.

        KV pages take up to the engine's `max_pages` bytes, allocated here. Raises ConfigError, and Overloaded where a
        device has no memory for them.
        """
        check_bounds(max_batch=max_batch, max_queue=max_queue, max_prefill_tokens=max_prefill_tokens)
        self.engine = engine
        self.max_batch, self.max_queue, self.max_prefill_tokens = max_batch, max_queue, max_prefill_tokens
        self._runner = engine.pipeline.model.runner
        self._take_back: Any = nothing  # gives arenas the memory again that they left to pages
        count = self._count_pages()
        self._memory = self._pages(count) if self._runner.lean is not None else None
        self.pool = self._memory.pool if self._memory else PagePool(count)
        pool = self.pool
        self._on_purge: Callable[[frozenset[bytes]], object] = lambda _: pool.forget_all()
        engine.pipeline.on_purge.append(self._on_purge)
        self._closing = False
        self._changed = threading.Condition()
        self._rounds = Rounds(engine.pipeline, self._memory, self.pool, self._changed, max_batch, max_prefill_tokens)
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._changed, self._runner.lock), name="keepwarm-batch", daemon=True
        )
        self._thread.start()
        self._unclosed = closing(self, Batcher._cancel)

    # ---- for callers ----

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        priority: int = 0,
        owner: str = "",
        listener: Listener | None = None,
        epoch: int | None = None,
        fit: bool = False,
        started: float | None = None,
        **arguments: Unpack[GenerateArgs],
    ) -> Ticket:
        """Queue a request; arguments are those of `Engine.generate`. Its clock starts now, or at `started`, an earlier
        time of `time.perf_counter`.

        A higher `priority` goes first, and equal ones in order of arrival; a waiting request's priority rises with
        time. Owners share the batch fairly: the one that had least of its time goes first, and none may hold all of it.
        A `listener` is called from the worker's thread with each piece, and with None once the outcome is known: it
        must be quick and must not raise. `epoch` is as for `Engine.prepare`. With `fit`, an answer that is longer than
        the prompt leaves room for is shortened to that room, and `Ticket.max_new_tokens` gives its length. Raises what
        `Engine.generate` raises for a bad request, PromptTooLong for one that the pages can never hold, Overloaded when
        the queue is full.
        """
        self._check_queue(owner)
        room = self.room() if fit else None
        prepared = self.engine.pipeline.prepare(prompt, arguments, epoch, room=room, started=started)
        job = Waiting(Ticket(self.wake, listener), prepared, owner)
        job.ticket.compiled = prepared.compiled
        job.ticket.max_new_tokens = prepared.decoding.max_new_tokens
        self._check_fits(job)
        with self._changed:
            self._check_queue(owner)
            self._rounds.admission.put(job, priority)
            self._changed.notify_all()
        return job.ticket

    def stats(self) -> BatchStats:
        with self._changed:
            there = self._rounds
            return BatchStats(there.admission.count(), *there.under_way, self.pool.counts, there.peak, there.slots_used)

    def wake(self) -> None:
        """Wake the worker: a request was cancelled, or pages were given back."""
        with self._changed:
            self._changed.notify_all()

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests, finish or `cancel` the present ones, and free the pages. It may be called twice. If a
        batcher is never closed, its requests are cancelled when the program ends."""
        self._close(cancel, None)

    def _cancel(self, seconds: float) -> bool:
        return self._close(True, seconds)

    def _close(self, cancel: bool, timeout: float | None) -> bool:
        with self._changed:
            self._closing = True
            self._rounds.cancelling = self._rounds.cancelling or cancel
            self._changed.notify_all()
        self._unclosed.detach()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._memory = self._runner.piece = None
        self._rounds.drop_memory()
        self._take_back()
        with suppress(ValueError):  # closed before
            self.engine.pipeline.on_purge.remove(self._on_purge)
        return True

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=error is not None)

    def _check_queue(self, owner: str) -> None:
        if self._closing:
            raise ConfigError("this batcher is closed; make a new one")
        with self._changed:
            waiting, own = self._rounds.admission.count(), self._rounds.admission.count(owner)
        if waiting >= self.max_queue or not may_hold(owner, own, 1, self.max_queue - waiting):
            raise Overloaded(f"{waiting} requests wait and max_queue is {self.max_queue}: ask again later, or raise it")

    def room(self) -> int:
        """Return how many tokens a prompt and its answer may have together in the memory that there is."""
        pipeline = self.engine.pipeline
        room = self.pool.capacity * PAGE if page_bytes(pipeline.model.geometry) else sys.maxsize
        return room if pipeline.model.runner.lean is not None else min(room, pipeline.pool.room)

    def _check_fits(self, job: Waiting) -> None:
        size = page_bytes(self.engine.pipeline.model.geometry)
        need, there = pages_for(job.positions), self.pool.capacity
        if size and need > there:
            raise PromptTooLong(
                f"the prompt has {len(job.tokens)} tokens and {job.prepared.decoding.max_new_tokens} new ones are asked"
                f" for, which takes {need} pages of {PAGE} tokens, and there are {there} ({there * size} bytes): "
                "shorten the prompt, lower max_new_tokens, or raise max_pages"
            )
        pipeline = self.engine.pipeline
        in_arena = self._runner.lean is not None and not self._runner.port.is_host  # as long as the prompt alone
        if size and in_arena and not pipeline.uncached_reason(job.positions + 1):
            pipeline.pool.check(len(job.tokens))

    def _count_pages(self) -> int:
        size, window = page_bytes(self.engine.pipeline.model.geometry), self.engine.pipeline.model.context_window
        if not size:
            return 0
        most = sys.maxsize if window is None else self.max_batch * pages_for(window)
        nbytes = self.engine.pipeline.config.max_pages
        if self._runner.lean is not None and not self._runner.port.is_host:
            arenas = self.engine.pipeline.pool
            nbytes, given = bytes_for_pages(arenas, nbytes, most * size, window or 0)
            self._take_back = weakref.finalize(self, arenas.caps.returned.append, given)
            self._take_back.atexit = False
        nbytes = LEAST if nbytes is None else nbytes
        if nbytes < size:
            raise ConfigError(f"max_pages is {nbytes} bytes, and one page takes {size}")
        return min(nbytes // size, most)

    def _pages(self, count: int) -> KVPages:
        runner = self._runner
        return KVPages(self.engine.pipeline.model.geometry, count, partial(_kernels, runner), runner.port)

    # ---- the worker ----

    def _take_turn(self) -> bool:
        """Run a round if there is work. Return False when there will be no more work."""
        try:
            with self._changed:
                busy, ends = bool(self._rounds.jobs()), self._closing
            piece = _PIECE if self._runner.port.is_host else _DEVICE_PIECE
            self._runner.piece = piece if busy else self.max_prefill_tokens
            if not busy:
                return not ends
            if not self._rounds.run():
                with self._changed:
                    self._changed.wait(_RETRY)
            return True
        except BaseException as error:  # our own bug: end all requests, so that no caller waits forever
            log.exception("the batch worker stopped")
            with self._changed:
                self._closing = True
            for job in self._rounds.jobs():
                job.ticket.end(error)
            return False

    @property
    def _rests(self) -> bool:
        """Whether there is nothing to do; read under the lock."""
        return not self._rounds.jobs() and not self._closing


def check_bounds(**bounds: int) -> None:
    """Raise ConfigError for a bound of a batch that is no whole number of at least 1."""
    for name, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def _kernels(runner: Runner) -> CopyRows | None:
    return None if runner.lean is None else runner.lean.copy_rows


def _work(batcher: weakref.ref[Batcher], changed: threading.Condition, lock: TurnLock) -> None:
    """Run the worker's thread. While idle it keeps no reference to the batcher or its engine."""
    lock.prefer()
    try:
        _go_round(batcher, changed)
    finally:
        lock.prefer_no_longer()


def _go_round(batcher: weakref.ref[Batcher], changed: threading.Condition) -> None:
    while (there := batcher()) is not None and there._take_turn():
        del there
        with changed:
            there = batcher()
            rests = there is not None and there._rests
            del there
            if rests:
                changed.wait(_LOOK)
