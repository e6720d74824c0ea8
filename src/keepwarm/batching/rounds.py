"""A batch's rounds: who is let in, steps of prompts, a token for those that run, and what becomes of an end."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from itertools import pairwise
from threading import Condition

from keepwarm.batching.request import Job
from keepwarm.batching.turns import LEAST_ROWS, Turns, may_hold, overdue
from keepwarm.core.blocks import Block, token_ids
from keepwarm.core.results import Piece
from keepwarm.core.spans import Exactness, Reuse
from keepwarm.errors import CorruptRun, Overloaded
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.runtime.native.places import PAGE
from keepwarm.runtime.pages import KVPages, PagedSequence, page_names, pages_for
from keepwarm.store.page_pool import PagePool

log = logging.getLogger("keepwarm.batching")

_PREFILLS = 2  # prompts computed in turn, so that a short one does not wait for a long one; each takes an arena
_MOST_PREFILLS = 4  # where their owners have no other
_SMALL = 16  # a request that takes no more than this part of all pages need not wait until another owner's has room
_AGE = 8  # admissions of others that weigh as much as one step of priority: low priority waits, and is not starved
_STORING = 0.5  # seconds that a request waits at most for a block which it shares to be stored


class Rounds:
    """What a batch's thread does. The other threads put requests in and ask what there is, under `changed`."""

    def __init__(
        self, pipeline: Pipeline, memory: KVPages | None, pool: PagePool, changed: Condition, most: int, rows: int
    ) -> None:
        """`most` requests run at once, and `rows` of prompts are computed per round."""
        self.changed = changed
        self.cancelling = False
        self.peak = 0
        self._pipeline, self._memory, self._pool = pipeline, memory, pool
        self._runner = pipeline.model.runner
        self._most, self._chunk = most, rows
        self._turns = Turns(rows)
        self._waiting: list[Job] = []  # in the order in which they are admitted
        self._prefilling: deque[Job] = deque()
        self._storing: deque[Job] = deque()  # prefilled a moment ago
        self._running: list[Job] = []
        self._submitted = self._admitted = 0
        self._slots = self._held = 0

    # ---- under `changed`, from any thread ----

    def put(self, job: Job, priority: int) -> None:
        """One more request waits."""
        self._submitted += 1
        job.order = (self._admitted / _AGE - priority, self._submitted)
        insort(self._waiting, job, key=lambda waiting: waiting.order)

    def waiting(self, owner: str | None = None) -> int:
        """How many wait, of this owner."""
        return sum(owner in (None, job.owner) for job in self._waiting)

    @property
    def under_way(self) -> tuple[int, int]:
        """How many are being prefilled, and run."""
        return len(self._prefilling), len(self._running)

    @property
    def slots_used(self) -> float:
        """Share of the token slots of pages in use that held tokens, over all rounds."""
        return self._held / self._slots if self._slots else 1.0

    def drop_memory(self) -> None:
        """Nothing will run any more: the pages' memory may go."""
        self._memory = None

    def jobs(self) -> list[Job]:
        return [*self._waiting, *self._prefilling, *self._running]

    # ---- in the batch's thread ----

    def run(self) -> bool:
        """Whether anything could be done."""
        for job in self.jobs():
            if job.ticket.cancelled or self.cancelling:
                self._end(job, CancelledError("the request was cancelled"))
        self._turns.round += 1
        ran = self._prefill_some() or bool(self._running)
        self._decode()
        return ran

    def _prefill_some(self) -> bool:
        """Steps of prompts, for as long as others may wait for them. Whether any were run."""
        left, ran = self._chunk, False
        while left > 0:
            self._admit()
            self._turns.look(self._under_way)
            job = self._turns.due(self._prefilling)
            if job is None:
                break
            left = min(left, self._turns.rows) - max(self._prefill(job), LEAST_ROWS)
            ran = True
        return ran

    def _admit(self) -> None:
        """Open waiting requests while there is room, each owner's in order. Whoever has no room yet is overtaken by
        small requests of other owners alone, and not for ever."""
        held_up: set[str] = set()
        while (job := self._next(held_up)) is not None:
            with self._guarding(job):
                if not self._make_room(job) or not self._open(job):
                    held_up.add(job.owner)
                    job.held_at = min(job.held_at, self._admitted)
                    continue
                with self.changed:
                    self._waiting.remove(job)
                    self._admitted += 1
                    self._prefilling.append(job)
                self._plan_steps(job)

    def _next(self, held_up: set[str]) -> Job | None:
        """Who is to be let in: of the owner who had least, and holds no more than his share."""
        if len(self._prefilling) + len(self._running) >= self._most:
            return None
        with self.changed:
            first = overdue(self._waiting, self._admitted, self._under_way)
            waiting = [job for job in first or self._waiting if job.owner not in held_up]
        for owner in self._turns.in_order({job.owner for job in waiting}):
            if len(self._prefilling) >= _PREFILLS and any(job.owner == owner for job in self._prefilling):
                continue
            job = next((job for job in waiting if job.owner == owner and not self._awaits(job)), None)
            if job is not None and self._may_enter(job, overtaking=bool(held_up)):
                return job
        return None

    @property
    def _under_way(self) -> list[Job]:
        return [*self._prefilling, *self._running]

    def _may_enter(self, job: Job, *, overtaking: bool) -> bool:
        """Whether a request's share of the batch is free, if there is room for it at all."""
        if len(self._prefilling) >= _MOST_PREFILLS and len(job.tokens) > self._chunk:
            return False
        pages, capacity = pages_for(job.positions), self._pool.capacity
        if overtaking and pages * _SMALL > capacity:
            return False
        if not job.owner:
            return True
        under_way = self._under_way
        own = [other for other in under_way if other.owner == job.owner]
        held = sum(pages_for(other.positions) for other in own)
        return may_hold(job.owner, len(own), 1, self._most - len(under_way)) and (
            not capacity or may_hold(job.owner, held, pages, self._pool.counts.available)
        )

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
        if self._pipeline.pool.peek(other.linked.held_of(other.tokens[:end])) == end:
            return True
        names = [block.exact for block in shared]
        return len(self._pipeline.archive.lookup(names)) == len(names)

    def _make_room(self, job: Job) -> bool:
        """Set aside all the pages that a request may need, beside those there are already; False: not now."""
        job.uncached = self._pipeline.uncached_reason(job.positions + 1)
        job.linked = None if job.uncached else self._pipeline.linked_for(job.prepared)
        # without the lean decoder, which may go while requests come (an adapter in place), nobody reads the pages
        if self._memory is not None and self._runner.lean is not None and job.linked is not None:
            shares = job.prepared.reuse is Reuse.EXACT  # weaker reuse is known to be exact only once it is placed
            names = page_names(job.linked.blocks, len(job.tokens)) if shares else []
            job.sequence = self._memory.admit(job.positions, names)
            return job.sequence is not None
        pages = pages_for(job.positions) if self._pool.capacity else 0
        if self._pool.reserve(pages) is None:
            return False
        job.promised = pages
        return True

    def _open(self, job: Job) -> bool:
        """Bring a request's stored KV into an arena; False: there is none while others hold what room there is."""
        times = job.prepared.times
        times.queue_ms = (time.perf_counter() - times.compiled) * 1e3
        capacity = len(job.tokens) if job.sequence is not None else job.positions + 1
        held = self._pipeline.pool.lent
        try:
            job.opened = job.stack.enter_context(self._pipeline.open(job.prepared, job.linked, capacity, job.uncached))
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
        for span in job.opened.plan.computes:
            job.steps.append((span.start, span.end))

    def _prefill(self, job: Job) -> int:
        """Run a prompt's next step; the other prompt has the next turn. Returns the rows run."""
        start, end = job.steps.popleft()
        assert job.opened is not None
        if self._runner.lean is not None and job.opened.placed is not None and not job.opened.plan.relocates:
            whole, end = end, min(end, start + self._turns.rows)  # rows stand alone
            if end < whole:
                job.steps.appendleft((end, whole))
        started = time.perf_counter()
        with self._guarding(job):
            try:
                self._run_step(job, start, end)
            except CorruptRun as error:
                assert job.opened is not None
                assert job.opened.placed is not None
                self._pipeline.loader.relink(job.opened.placed, error)
                self._plan_steps(job)
        self._turns.took_prefill(job, end - start, time.perf_counter() - started)
        return end - start

    def _run_step(self, job: Job, start: int, end: int) -> None:
        assert job.opened is not None
        if job.steps:
            self._runner.extend(job.tokens[start:end], job.opened.cache, start)
            if job.opened.placed:
                job.opened.placed.computed_to = end
            self._prefilling.remove(job)
            self._prefilling.append(job)
        else:
            if job.opened.plan.relocates:
                logits = self._pipeline.first_logits(job.prepared, job.opened)
                job.ticket.plan = job.opened.plan  # another, where chunks diverged too far
            else:
                logits = self._pipeline.loader.last_step(job.opened.placed, job.tokens, start, end, job.opened.cache)
            job.answer = self._pipeline.begin_answer(job.prepared, job.opened)
            if not self._grow(job, job.answer.take(logits)):
                self._settle(job)
                with self.changed:
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
        if not self._pipeline.archive.allows(placed.linked.epoch, placed.linked.tags):
            for name in names:  # a purge came meanwhile, which may have taken all names away before these were given
                self._pool.forget(name)
        self._pipeline.chunks.keep(placed)
        placed.goes_on = named and job.sequence.is_plain and placed.linked.prompt.keep is None
        job.stack.close()
        self._storing.append(job)

    def _decode(self) -> None:
        """One token for every running request, or for as many as others may wait for."""
        together: list[tuple[Job, PagedSequence]] = []
        for job in self._turns.decoded(self._running):
            with self._guarding(job):
                token, position = job.last
                if job.sequence is not None:
                    job.sequence.grow(position + 1)
                    together.append((job, job.sequence))
                else:
                    assert job.opened is not None
                    assert job.answer is not None
                    started = time.perf_counter()
                    logits = self._runner.step(token_ids([token]), job.opened.cache, position)
                    self._grow(job, job.answer.take(logits))
                    self._turns.took_decode([job], time.perf_counter() - started, [0.0])
        if not together:
            return
        tokens, positions = zip(*(job.last for job, _ in together), strict=True)
        started = time.perf_counter()
        try:
            rows = self._runner.step_together(tokens, positions, [sequence.sequenced for _, sequence in together])
        except Exception as error:
            log.exception("a step of %d requests failed", len(together))
            for job, _ in together:
                self._end(job, error)
            return
        ends = [time.perf_counter()]
        for (job, sequence), position, logits in zip(together, positions, rows, strict=True):
            with self._guarding(job):
                assert job.answer is not None
                sequence.length = position + 1
                self._grow(job, job.answer.take(logits))
            ends.append(time.perf_counter())
        choosing = [end - began for began, end in pairwise(ends)]
        self._turns.took_decode([job for job, _ in together], ends[0] - started, choosing)
        self._measure()

    def _grow(self, job: Job, piece: Piece) -> bool:
        """Hand out a piece; ends the request with its last one, and then returns True."""
        assert job.answer is not None
        job.ticket.put(piece)
        if len(job.answer.token_ids) == 1 and job.opened is not None and job.opened.placed is not None:
            self._pipeline.loader.explain(job.opened.placed)
        if job.answer.done:
            self._end(job)
        return job.answer.done

    def _measure(self) -> None:
        pages = self._pool.counts.referenced
        paged = [job.sequence for job in self._running if job.sequence is not None]
        with self.changed:
            self.peak = max(self.peak, pages)
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

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _release(self, job: Job, sequence: PagedSequence) -> None:
        """Give back a sequence's pages, once what it holds of an answer is stored."""
        placed = job.opened.placed if job.opened is not None else None
        if placed is None or not placed.goes_on or job.answer is None:
            sequence.release()
            return
        placed.generated = job.answer.token_ids

        def copied() -> None:
            sequence.release()
            self._wake()

        self._pipeline.loader.answered(placed, sequence, sequence.length, copied)

    def _give_back(self, job: Job) -> None:
        """Give back the pages that a request holds or was promised."""
        if job.sequence is not None:
            self._release(job, job.sequence)
            job.sequence = None
        self._pool.unreserve(job.promised)
        job.promised = 0

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """Give back all that a request holds, then tell who waits for it."""
        with self.changed:
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
            self._pipeline.chunks.answered(placed.linked, placed, job.answer.token_ids)
        blended = placed.blended if placed else None
        last = job.answer.result(job.opened.plan, job.opened.all_by_tier, job.opened.miss, blended)
        assert last.result is not None
        job.ticket.put(last)
        job.ticket.end(last.result)
