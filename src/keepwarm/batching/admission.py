"""Which of a batch's waiting requests is let in, when, and with what room."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Condition

from keepwarm.batching.request import Job
from keepwarm.batching.turns import TOGETHER, Turns, may_hold, overdue
from keepwarm.core.blocks import Block
from keepwarm.core.spans import Reuse
from keepwarm.errors import Overloaded
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.runtime.pages import KVPages, page_names, pages_for
from keepwarm.store.page_pool import PagePool

_PREFILLS = 2  # prompts computed in turn, so that a short one does not wait for a long one; each takes an arena
_MOST_PREFILLS = 4  # where their owners have no other, or one pass has room for all that is left of them
_SMALL = 16  # a request that takes no more than this part of all pages need not wait until another owner's has room
_AGE = 8  # admissions of others that weigh as much as one step of priority: low priority waits, and is not starved
_STORING = 0.5  # seconds that a request waits at most for a block which it shares to be stored


@dataclass
class UnderWay:
    """The requests that were let in."""

    prefilling: deque[Job] = field(default_factory=deque)
    storing: deque[Job] = field(default_factory=deque)  # prefilled a moment ago
    running: list[Job] = field(default_factory=list)

    @property
    def all(self) -> list[Job]:
        return [*self.prefilling, *self.running]


class Admission:
    """The requests that wait, and what each needs to be let in."""

    def __init__(
        self,
        pipeline: Pipeline,
        memory: KVPages | None,
        pool: PagePool,
        changed: Condition,
        turns: Turns,
        under_way: UnderWay,
        most: int,
        long: int,
    ) -> None:
        """`most` requests run at once; a prompt of more than `long` tokens counts as a long one."""
        self.memory = memory
        self.waiting: list[Job] = []  # in the order in which they are admitted
        self._pipeline, self._pool, self._changed = pipeline, pool, changed
        self._turns, self._under_way = turns, under_way
        self._most, self._long = most, long
        self._submitted = self._admitted = 0

    # ---- under `changed`, from any thread ----

    def put(self, job: Job, priority: int) -> None:
        """One more request waits."""
        self._submitted += 1
        job.order = (self._admitted / _AGE - priority, self._submitted)
        insort(self.waiting, job, key=lambda waiting: waiting.order)

    def count(self, owner: str | None = None) -> int:
        """How many wait, of this owner."""
        return sum(owner in (None, job.owner) for job in self.waiting)

    # ---- in the batch's thread ----

    def next(self, held_up: set[str]) -> Job | None:
        """Who is to be let in: of the owner who had least, and holds no more than his share. Owners who are `held_up`
        have a request that found no room; small requests of others alone overtake it, and not for ever."""
        if len(self._under_way.all) >= self._most:
            return None
        with self._changed:
            first = overdue(self.waiting, self._admitted, self._under_way.all)
            waiting = [job for job in first or self.waiting if job.owner not in held_up]
        prefilling = self._under_way.prefilling
        fit = self._pipeline.model.runner.lean is not None and sum(job.rows_left for job in prefilling) < TOGETHER
        most = _MOST_PREFILLS if fit else _PREFILLS
        for owner in self._turns.in_order({job.owner for job in waiting}):
            if len(prefilling) >= most and any(job.owner == owner for job in prefilling):
                continue
            job = next((job for job in waiting if job.owner == owner and not self._awaits(job)), None)
            if job is not None and self._may_enter(job, overtaking=bool(held_up)):
                return job
        return None

    def let_in(self, job: Job) -> bool:
        """Give a request room, and bring what is stored of it; False: there is none now."""
        if not self._make_room(job) or not self._open(job):
            job.held_at = min(job.held_at, self._admitted)
            return False
        with self._changed:
            self.waiting.remove(job)
            self._admitted += 1
            self._under_way.prefilling.append(job)
        return True

    def _may_enter(self, job: Job, *, overtaking: bool) -> bool:
        """Whether a request's share of the batch is free, if there is room for it at all."""
        if len(self._under_way.prefilling) >= _MOST_PREFILLS and len(job.tokens) > self._long:
            return False
        pages, capacity = pages_for(job.positions), self._pool.capacity
        if overtaking and pages * _SMALL > capacity:
            return False
        if not job.owner:
            return True
        under_way = self._under_way.all
        own = [other for other in under_way if other.owner == job.owner]
        held = sum(pages_for(other.positions) for other in own)
        return may_hold(job.owner, len(own), 1, self._most - len(under_way)) and (
            not capacity or may_hold(job.owner, held, pages, self._pool.counts.available)
        )

    def _awaits(self, job: Job) -> bool:
        """Whether another prompt computes, or stores, a block that this one would find a little later."""
        now, storing = time.perf_counter(), self._under_way.storing
        while storing and storing[0].prepared.times.first + _STORING < now:
            storing.popleft()
        for others, stored in ((self._under_way.prefilling, False), (storing, True)):
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
        if self.memory is not None and self._pipeline.model.runner.lean is not None and job.linked is not None:
            shares = job.prepared.reuse is Reuse.EXACT  # weaker reuse is known to be exact only once it is placed
            names = page_names(job.linked.blocks, len(job.tokens)) if shares else []
            job.sequence = self.memory.admit(job.positions, names)
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
            if job.sequence is not None:
                job.sequence.release()
                job.sequence = None
            self._pool.unreserve(job.promised)
            job.promised = 0
            return False
        return True
