"""Which of a batch's waiting requests is let in, when, and with what room."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Condition

from keepwarm.batching.request import Prefilling, Running, Waiting, let_in
from keepwarm.batching.turns import TOGETHER, Turns, may_hold, overdue
from keepwarm.core.blocks import Block
from keepwarm.core.spans import Reuse
from keepwarm.errors import Overloaded
from keepwarm.pipeline.linked import Linked
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.pipeline.prepared import Opened
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

    prefilling: deque[Prefilling] = field(default_factory=deque)
    storing: deque[Running] = field(default_factory=deque)  # prefilled a moment ago
    running: list[Running] = field(default_factory=list)

    @property
    def all(self) -> list[Prefilling]:
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
        self.waiting: list[Waiting] = []  # in the order in which they are admitted
        self._pipeline, self._pool, self._changed = pipeline, pool, changed
        self._turns, self._under_way = turns, under_way
        self._most, self._long = most, long
        self._submitted = self._admitted = 0
        self._refused_at = inf  # how many arenas were lent when there was no room for one more

    # ---- under `changed`, from any thread ----

    def put(self, job: Waiting, priority: int) -> None:
        """One more request waits."""
        self._submitted += 1
        job.order = (self._admitted / _AGE - priority, self._submitted)
        insort(self.waiting, job, key=lambda waiting: waiting.order)

    def count(self, owner: str | None = None) -> int:
        """How many wait, of this owner."""
        return sum(owner in (None, job.owner) for job in self.waiting)

    # ---- in the batch's thread ----

    def next(self, held_up: set[str]) -> Waiting | None:
        """Who is to be let in: of the owner who had least, and holds no more than his share. Owners who are `held_up`
        have a request that found no room; small requests of others alone overtake it, and not for ever."""
        if len(self._under_way.all) >= self._most:
            return None
        with self._changed:
            first = overdue(self.waiting, self._admitted, self._under_way.all)
            waiting = [job for job in first or self.waiting if job.owner not in held_up]
        prefilling = self._under_way.prefilling
        most = _MOST_PREFILLS if self._may_join(waiting) else _PREFILLS
        for owner in self._turns.in_order({job.owner for job in waiting}):
            if len(prefilling) >= most and any(job.owner == owner for job in prefilling):
                continue
            job = next((job for job in waiting if job.owner == owner and not self._awaits(job)), None)
            if job is not None and self._may_enter(job, overtaking=bool(held_up)):
                return job
        return None

    def _may_join(self, waiting: Sequence[Waiting]) -> bool:
        """Whether one more prompt of those that have their owner's two would run in one pass with them."""
        prefilling, pool = self._under_way.prefilling, self._pipeline.pool
        if not prefilling:
            self._refused_at = inf
        return (
            self._pipeline.model.runner.lean is not None
            and all(job.is_in_place for job in prefilling)
            and sum(job.rows_left for job in prefilling) < min(TOGETHER, self._turns.rows)
            and len({job.owner for job in (*waiting, *prefilling)}) == 1  # else the place is for who has none
            and pool.lent < self._refused_at
        )

    def let_in(self, request: Waiting) -> Prefilling | None:
        """Give a request room, and bring what is stored of it; None: there is no room now."""
        uncached = self._pipeline.uncached_reason(request.positions + 1)
        linked = None if uncached else self._pipeline.linked_for(request.prepared)
        opened = self._open(request, linked, uncached) if self._make_room(request, linked) else None
        if opened is None:
            request.held_at = min(request.held_at, self._admitted)
            return None
        job = let_in(request, opened)
        with self._changed:
            self.waiting.remove(request)
            self._admitted += 1
            self._under_way.prefilling.append(job)
        return job

    def _may_enter(self, job: Waiting, *, overtaking: bool) -> bool:
        """Whether a request's share of the batch is free, if there is room for it at all."""
        if self._pipeline.model.alone is not None and self._under_way.all:
            return False
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

    def _awaits(self, job: Waiting) -> bool:
        """Whether another prompt computes, or stores, a block that this one would find a little later."""
        now, storing = time.perf_counter(), self._under_way.storing
        while storing and storing[0].prepared.times.first + _STORING < now:
            storing.popleft()
        others: tuple[tuple[Iterable[Prefilling], bool], ...] = ((self._under_way.prefilling, False), (storing, True))
        for each, stored in others:
            for other in each:
                shared = job.shares(other)
                if shared and not (stored and self._is_stored(other, shared)):
                    return True
        return False

    def _is_stored(self, other: Prefilling, shared: Sequence[Block]) -> bool:
        placed, end = other.opened.placed, shared[-1].end
        if placed is not None and self._pipeline.pool.peek(placed.linked.held_of(other.tokens[:end])) == end:
            return True
        names = [block.exact for block in shared]
        if len(self._pipeline.archive.lookup(names)) == len(names):
            return True
        self._pipeline.archive.hurry()
        return False

    def _make_room(self, request: Waiting, linked: Linked | None) -> bool:
        """Set aside all the pages that a request may need, beside those there are already; False: not now."""
        # without the lean decoder, which may go while requests come (an adapter in place), nobody reads the pages
        if self.memory is not None and self._pipeline.model.runner.lean is not None and linked is not None:
            shares = request.prepared.reuse is Reuse.EXACT  # weaker reuse is known to be exact only once it is placed
            names = page_names(linked.blocks, len(request.tokens)) if shares else []
            request.room.sequence = self.memory.admit(request.positions, names)
            return request.room.sequence is not None
        pages = pages_for(request.positions) if self._pool.capacity else 0
        if self._pool.reserve(pages) is None:
            return False
        request.room.promised = pages
        return True

    def _open(self, request: Waiting, linked: Linked | None, uncached: str) -> Opened | None:
        """Bring a request's stored KV into an arena; None: there is none while others hold what room there is."""
        times, room = request.prepared.times, request.room
        times.queue_ms = (time.perf_counter() - times.compiled) * 1e3
        capacity = len(request.tokens) if room.sequence is not None else request.positions + 1
        held = self._pipeline.pool.lent
        try:
            return room.stack.enter_context(self._pipeline.open(request.prepared, linked, capacity, uncached))
        except Overloaded:
            if not held:  # nobody would give any back
                raise
            self._refused_at = held
            if room.sequence is not None:
                room.sequence.release()
                room.sequence = None
            self._pool.unreserve(room.promised)
            room.promised = 0
            return None
