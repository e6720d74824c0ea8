"""Continuous batching: many requests on one engine at once, which join and leave at every token.

One worker thread goes in rounds: requests are admitted, up to `chunk` rows of prompts are computed, and every running
answer grows by a token. With the lean decoder that is one pass for all of them: they decode from shared pages, and what
they have in common is read once. An answer is the same, to the bit, as `Engine.generate` alone gives.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Unpack

from keepwarm.core.blocks import Block, token_ids
from keepwarm.core.request import GenerateArgs
from keepwarm.core.results import Piece
from keepwarm.core.spans import Exactness, Reuse
from keepwarm.core.unclosed import closing
from keepwarm.engine import Engine
from keepwarm.errors import ConfigError, CorruptRun, Overloaded, PromptTooLong
from keepwarm.jobs import Job, Listener, Ticket
from keepwarm.runtime.native.places import PAGE, Region
from keepwarm.runtime.pages import KVPages, PagedSequence, page_bytes, page_names, pages_for
from keepwarm.store.pages import PageCounts, PagePool

log = logging.getLogger("keepwarm.batching")

_PREFILLS = 2  # prompts computed in turn, so that a short one does not wait for a long one; each takes an arena
_LEAST_ROWS = 32  # that a step counts for: it reads all weights, however few its rows are
_AGE = 8  # admissions of others that weigh as much as one step of priority: low priority waits, and is not starved
_RETRY = 0.005  # seconds until what is waited for (pages that others hold, blocks being stored) is looked for again
_LOOK = 5.0  # seconds until a thread without work sees that nobody holds its batcher any more
_STORING = 0.5  # seconds that a request waits at most for a block which it shares to be stored


@dataclass(frozen=True)
class BatchStats:
    """What a Batcher is doing."""

    waiting: int
    prefilling: int
    running: int
    pages: PageCounts
    peak_pages: int  # the most that were in use in a round
    slots_used: float  # share of the token slots of pages in use that held tokens, over all rounds; 1.0 before any


class Batcher:
    """Runs many requests on one engine at once. Threads may share it; close it before the engine."""

    def __init__(self, engine: Engine, *, max_batch: int = 32, max_queue: int = 256, chunk: int = 256) -> None:
        """At most `max_batch` requests run and `max_queue` wait; `chunk` rows of prompts are computed per round.

        KV pages take up to the engine's `max_pages` bytes, allocated here. Raises ConfigError.
        """
        for name, value in (("max_batch", max_batch), ("max_queue", max_queue), ("chunk", chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.engine = engine
        self.max_batch, self.max_queue, self.chunk = max_batch, max_queue, chunk
        self._runner = engine.model.runner
        count = self._count_pages()
        lean = self._runner.lean is not None
        self._memory = KVPages(engine.model.geometry, count, self._copy_rows) if lean else None
        self.pool = self._memory.pool if self._memory else PagePool(count)
        engine.on_purge.append(self.pool.forget_all)
        self._waiting: list[Job] = []  # in the order in which they are admitted
        self._prefilling: deque[Job] = deque()
        self._storing: deque[Job] = deque()  # prefilled a moment ago
        self._running: list[Job] = []
        self._submitted = self._admitted = 0
        self._slots = self._held = self._peak = 0
        self._closing = self._cancelling = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=_work, args=(weakref.ref(self), self._changed), name="keepwarm-batch", daemon=True
        )
        self._thread.start()
        self._unclosed = closing(self, Batcher._cancel)

    # ---- for callers ----

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        priority: int = 0,
        listener: Listener | None = None,
        epoch: int | None = None,
        **arguments: Unpack[GenerateArgs],
    ) -> Ticket:
        """Queue a request; arguments are those of `Engine.generate`. Its clock starts now.

        A higher `priority` goes first, among equals who came first; who waits rises in time. A `listener` is called
        with each piece from the worker's thread, and with None once the outcome is known: it must be quick and not
        raise. `epoch` is as for `Engine.prepare`. Raises what `Engine.generate` raises for a bad request, PromptTooLong
        for one that the pages can never hold, Overloaded when the queue is full.
        """
        self._check_queue()
        prepared = self.engine.prepare(prompt, arguments, epoch)
        job = Job(Ticket(self.wake, listener), prepared, (0.0, 0))
        job.ticket.compiled = prepared.compiled
        self._check_fits(job)
        with self._changed:
            self._check_queue()
            self._submitted += 1
            job.order = (self._admitted / _AGE - priority, self._submitted)
            insort(self._waiting, job, key=lambda waiting: waiting.order)
            self._changed.notify_all()
        return job.ticket

    def stats(self) -> BatchStats:
        with self._changed:
            used = self._held / self._slots if self._slots else 1.0
            return BatchStats(
                len(self._waiting), len(self._prefilling), len(self._running), self.pool.counts, self._peak, used
            )

    def wake(self) -> None:
        """Let the worker look again: something was cancelled, or pages were given back."""
        with self._changed:
            self._changed.notify_all()

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests; finish or `cancel` those there are; free the pages. Safe to call twice. What runs in a
        batcher that nobody closes is cancelled when the program ends."""
        self._close(cancel, None)

    def _cancel(self, seconds: float) -> bool:
        return self._close(True, seconds)

    def _close(self, cancel: bool, timeout: float | None) -> bool:
        with self._changed:
            self._closing = True
            self._cancelling = self._cancelling or cancel
            self._changed.notify_all()
        self._unclosed.detach()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._memory = None
        with suppress(ValueError):  # closed before
            self.engine.on_purge.remove(self.pool.forget_all)
        return True

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=error is not None)

    def _check_queue(self) -> None:
        if self._closing:
            raise ConfigError("this batcher is closed; make a new one")
        if len(self._waiting) >= self.max_queue:
            raise Overloaded(
                f"{len(self._waiting)} requests wait and max_queue is {self.max_queue}: ask again later, or raise it"
            )

    def _check_fits(self, job: Job) -> None:
        size = page_bytes(self.engine.model.geometry)
        need, there = pages_for(job.positions), self.pool.capacity
        if size and need > there:
            raise PromptTooLong(
                f"the prompt has {len(job.tokens)} tokens and {job.prepared.decoding.max_new_tokens} new ones are asked"
                f" for, which takes {need} pages of {PAGE} tokens, and there are {there} ({there * size} bytes): "
                "shorten the prompt, lower max_new_tokens, or raise max_pages"
            )

    def _count_pages(self) -> int:
        size, window = page_bytes(self.engine.model.geometry), self.engine.model.context_window
        if not size:
            return 0
        count = self.engine.config.max_pages // size
        if not count:
            raise ConfigError(f"max_pages is {self.engine.config.max_pages} bytes, and one page takes {size}")
        return count if window is None else min(count, self.max_batch * pages_for(window))

    def _copy_rows(self, source: Region, row: int, target: Region, at: int, rows: int) -> None:
        assert self._runner.lean is not None
        self._runner.lean.copy_rows(source, row, target, at, rows)

    # ---- the worker ----

    def _take_turn(self) -> bool:
        """A round of what there is to do, if anything; False when there will be nothing any more."""
        try:
            with self._changed:
                if not self._jobs():
                    return not self._closing
            if not self._round():
                with self._changed:
                    self._changed.wait(_RETRY)
            return True
        except BaseException as error:  # a fault of our own: nobody may wait for ever
            log.exception("the batch worker stopped")
            with self._changed:
                self._closing = True
            for job in self._jobs():
                job.ticket.end(error)
            return False

    @property
    def _rests(self) -> bool:
        """Whether there is nothing to do, under the lock."""
        return not self._jobs() and not self._closing

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *self._prefilling, *self._running]

    def _round(self) -> bool:
        """Whether anything could be done."""
        for job in self._jobs():
            if job.ticket.cancelled or self._cancelling:
                self._end(job, CancelledError("the request was cancelled"))
        budget = self.chunk
        while budget > 0:
            self._admit()
            if not self._prefilling:
                break
            budget -= max(self._prefill(self._prefilling[0]), _LEAST_ROWS)
        ran = budget < self.chunk or bool(self._running)
        self._decode()
        return ran

    def _admit(self) -> None:
        """Open waiting requests, in order, while there is room. Whoever has no room yet is not overtaken."""
        while len(self._prefilling) < _PREFILLS and len(self._prefilling) + len(self._running) < self.max_batch:
            with self._changed:
                job = next((job for job in self._waiting if not self._awaits(job)), None)
            if job is None:
                return
            with self._guarding(job):
                if not self._make_room(job) or not self._open(job):
                    return
                with self._changed:
                    self._waiting.remove(job)
                    self._admitted += 1
                    self._prefilling.append(job)
                self._plan_steps(job)

    def _awaits(self, job: Job) -> bool:
        """Whether another prompt computes, or stores, a block that this one would find a little later."""
        now = time.perf_counter()
        while self._storing and self._storing[0].prepared.times.first + _STORING < now:
            self._storing.popleft()
        for others, stored in ((self._prefilling, False), (self._storing, True)):
            for other in others:
                shared = job.shares(other)
                if shared and not (stored and self._is_stored(other, shared)):
                    return True
        return False

    def _is_stored(self, other: Job, shared: Sequence[Block]) -> bool:
        assert other.linked is not None
        end = shared[-1].end
        if self.engine.pool.peek(other.linked.held_of(other.tokens[:end])) == end:
            return True
        names = [block.exact for block in shared]
        return len(self.engine.archive.lookup(names)) == len(names)

    def _make_room(self, job: Job) -> bool:
        """Set aside all the pages that a request may need, beside those there are already; False: not now."""
        job.uncached = self.engine.uncached_reason(job.positions + 1)
        job.linked = None if job.uncached else self.engine.linked_for(job.prepared)
        # without the lean decoder, which may go while requests come (an adapter in place), nobody reads the pages
        if self._memory is not None and self._runner.lean is not None and job.linked is not None:
            shares = job.prepared.reuse is Reuse.EXACT  # weaker reuse is known to be exact only once it is placed
            names = page_names(job.linked.blocks, len(job.tokens)) if shares else []
            job.sequence = self._memory.admit(job.positions, names)
            return job.sequence is not None
        pages = pages_for(job.positions) if self.pool.capacity else 0
        if self.pool.reserve(pages) is None:
            return False
        job.promised = pages
        return True

    def _open(self, job: Job) -> bool:
        """Bring a request's stored KV into an arena; False: there is none while others hold what room there is."""
        times = job.prepared.times
        times.queue_ms = (time.perf_counter() - times.compiled) * 1e3
        capacity = len(job.tokens) if job.sequence is not None else job.positions + 1
        held = self.engine.pool.lent
        try:
            job.opened = job.stack.enter_context(self.engine.open(job.prepared, job.linked, capacity, job.uncached))
        except Overloaded:
            if not held:  # nobody would give any back
                raise
            self._give_back(job)
            return False
        return True

    def _plan_steps(self, job: Job) -> None:
        """What of the prompt is to be computed, in rounds."""
        assert job.opened is not None
        job.ticket.plan, job.ticket.by_tier = job.opened.plan, job.opened.by_tier
        job.steps.clear()
        if job.opened.plan.relocates:  # repaired chunks and what stands between them are one pass
            job.steps.append((job.opened.plan.prefix_end, len(job.tokens)))
            return
        cuts = self._runner.lean is not None and job.opened.placed is not None  # rows stand alone
        for span in job.opened.plan.computes:
            for start in range(span.start, span.end, self.chunk if cuts else span.end - span.start):
                job.steps.append((start, min(start + self.chunk, span.end) if cuts else span.end))

    def _prefill(self, job: Job) -> int:
        """Run a prompt's next step; the other prompt has the next turn. Returns the rows run."""
        start, end = job.steps.popleft()
        with self._guarding(job):
            try:
                self._run_step(job, start, end)
            except CorruptRun as error:
                assert job.opened is not None
                assert job.opened.placed is not None
                self.engine.placing.relink(job.opened.placed, error)
                self._plan_steps(job)
        return end - start

    def _run_step(self, job: Job, start: int, end: int) -> None:
        assert job.opened is not None
        if job.steps:
            self._runner.extend(job.tokens[start:end], job.opened.cache, start)
            if job.opened.placed:
                job.opened.placed.computed_to = end
            self._prefilling.rotate(-1)
        else:
            if job.opened.plan.relocates:
                logits = self.engine.first_logits(job.prepared, job.opened)
                job.ticket.plan = job.opened.plan  # another, where chunks diverged too far
            else:
                logits = self._runner.step(job.tokens[start:end], job.opened.cache, start)
            job.answer = self.engine.prefilled(job.prepared, job.opened)
            if not self._grow(job, job.answer.take(logits)):
                self._settle(job)
                with self._changed:
                    self._prefilling.remove(job)
                    self._running.append(job)

    def _settle(self, job: Job) -> None:
        """Move a computed prompt into pages; its arena is free for the next one."""
        if job.sequence is None:
            return
        assert job.opened is not None
        placed = job.opened.placed
        assert placed is not None
        named = job.prepared.reuse is not Reuse.OFF and placed.plan.exactness is Exactness.EXACT
        names = page_names(placed.linked.blocks, len(job.tokens)) if named else []
        job.sequence.fill(placed.arena.sequenced(), len(job.tokens), names)
        if not self.engine.archive.allows(placed.linked.epoch, placed.linked.tags):
            for name in names:  # a purge came meanwhile, which may have taken all names away before these were given
                self.pool.forget(name)
        self.engine.chunks.keep(placed)
        placed.goes_on = named and job.sequence.is_plain and placed.linked.prompt.keep is None
        job.stack.close()
        self._storing.append(job)

    def _decode(self) -> None:
        """One token for every running request."""
        together: list[tuple[Job, PagedSequence]] = []
        for job in list(self._running):
            with self._guarding(job):
                token, position = job.last
                if job.sequence is not None:
                    job.sequence.grow(position + 1)
                    together.append((job, job.sequence))
                else:
                    assert job.opened is not None
                    assert job.answer is not None
                    logits = self._runner.step(token_ids([token]), job.opened.cache, position)
                    self._grow(job, job.answer.take(logits))
        if not together:
            return
        tokens, positions = zip(*(job.last for job, _ in together), strict=True)
        try:
            rows = self._runner.step_together(tokens, positions, [sequence.sequenced for _, sequence in together])
        except Exception as error:
            log.exception("a step of %d requests failed", len(together))
            for job, _ in together:
                self._end(job, error)
            return
        for (job, sequence), position, logits in zip(together, positions, rows, strict=True):
            with self._guarding(job):
                assert job.answer is not None
                sequence.length = position + 1
                self._grow(job, job.answer.take(logits))
        self._measure()

    def _grow(self, job: Job, piece: Piece) -> bool:
        """Hand out a piece; ends the request with its last one, and then returns True."""
        assert job.answer is not None
        job.ticket.put(piece)
        if len(job.answer.token_ids) == 1 and job.opened is not None and job.opened.placed is not None:
            self.engine.placing.explain(job.opened.placed)
        if job.answer.done:
            self._end(job)
        return job.answer.done

    def _measure(self) -> None:
        pages = self.pool.counts.referenced
        paged = [job.sequence for job in self._running if job.sequence is not None]
        with self._changed:
            self._peak = max(self._peak, pages)
            self._slots += pages * PAGE
            self._held += pages * PAGE - sum(sequence.unused for sequence in paged)

    @contextmanager
    def _guarding(self, job: Job) -> Iterator[None]:
        """What goes wrong with one request ends that one."""
        try:
            yield
        except Exception as error:
            log.warning("a request failed: %s", error)
            self._end(job, error)

    def _release(self, job: Job, sequence: PagedSequence) -> None:
        """Give back a sequence's pages, once what it holds of an answer is stored."""
        placed = job.opened.placed if job.opened is not None else None
        if placed is None or not placed.goes_on or job.answer is None:
            sequence.release()
            return
        placed.generated = job.answer.token_ids

        def copied() -> None:
            sequence.release()
            self.wake()

        self.engine.placing.answered(placed, sequence, sequence.length, copied)

    def _give_back(self, job: Job) -> None:
        """Give back the pages that a request holds or was promised."""
        if job.sequence is not None:
            self._release(job, job.sequence)
            job.sequence = None
        self.pool.unreserve(job.promised)
        job.promised = 0

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """Give back all that a request holds, then tell who waits for it."""
        with self._changed:
            for group in (self._waiting, self._prefilling, self._running):
                if job in group:
                    group.remove(job)
        try:
            job.stack.close()
        except Exception as closing:
            error = error or closing
        self._give_back(job)
        if error is not None:
            job.ticket.end(error)
            return
        assert job.answer is not None
        assert job.opened is not None
        placed = job.opened.placed
        if placed is not None:
            self.engine.chunks.answered(placed.linked, placed, job.answer.token_ids)
        blended = placed.blended if placed else None
        last = job.answer.result(job.opened.plan, job.opened.all_by_tier, job.opened.miss, blended)
        assert last.result is not None
        job.ticket.put(last)
        job.ticket.end(last.result)


def _work(batcher: weakref.ref[Batcher], changed: threading.Condition) -> None:
    """The worker's thread. While nothing is to be done it holds neither the batcher nor its engine."""
    while (there := batcher()) is not None and there._take_turn():
        del there
        with changed:
            there = batcher()
            rests = there is not None and there._rests
            del there
            if rests:
                changed.wait(_LOOK)
