"""Admission to a batch: which waiting request is admitted, when, and with which memory."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Condition

from keepwarm.batching.request import Prefilling, Running, Waiting, let_in
from keepwarm.batching.turns import TOGETHER, Turns, overdue
from keepwarm.core.blocks import Block
from keepwarm.core.shares import may_hold
from keepwarm.core.spans import Reuse
from keepwarm.core.uncached import Why
from keepwarm.errors import Overloaded
from keepwarm.pipeline.linked import Linked
from keepwarm.pipeline.pipeline import Pipeline
from keepwarm.pipeline.prepared import Opened
from keepwarm.runtime.pages import KVPages, page_names, pages_for
from keepwarm.store.page_pool import PagePool

_PREFILLS = 2  # prompts computed in turn, so that a short one does not wait for a long one; each takes an arena
_MOST_PREFILLS = 4  # the limit if each owner has only one, or if one pass has room for the rest of all of them
_SMALL = 16  # a request needing at most 1/16 of all pages does not wait until another owner's request has room
_AGE = 8  # this many later admissions equal one step of priority: low priority waits, but does not starve
_STORING = 0.5  # seconds that a request waits at most until a block that it shares is stored


@dataclass
class UnderWay:
    """The admitted requests."""

    prefilling: deque[Prefilling] = field(default_factory=deque)
    storing: deque[Running] = field(default_factory=deque)  # just prefilled; their blocks are being stored
    running: list[Running] = field(default_factory=list)

    @property
    def all(self) -> list[Prefilling]:
        return [*self.prefilling, *self.running]


class Admission:
    """The waiting requests, and what each needs to be admitted."""

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
        """At most `most` requests run at once; a prompt of more than `long` tokens counts as long."""
        self.memory = memory
        self.waiting: list[Waiting] = []  # in the order in which they are admitted
        self._pipeline, self._pool, self._changed = pipeline, pool, changed
        self._turns, self._under_way = turns, under_way
        self._most, self._long = most, long
        self._submitted = self._admitted = 0
        self._refused_at = inf  # number of arenas that were lent when there was no room for one more

    # ---- under `changed`, from any thread ----

    def put(self, job: Waiting, priority: int) -> None:
        """Add a waiting request."""
        self._submitted += 1
        job.order = (self._admitted / _AGE - priority, self._submitted)
        insort(self.waiting, job, key=lambda waiting: waiting.order)

    def count(self, owner: str | None = None) -> int:
        """Return how many requests wait, of this owner (None: of all)."""
        return sum(owner in (None, job.owner) for job in self.waiting)

    # ---- in the batch's thread ----

    def is_awaited(self, job: Running) -> bool:
        """Return whether a waiting request shares blocks with one that was just prefilled."""
        with self._changed:
            waiting = [*self.waiting]
        return any(other.shares(job) for other in waiting)

    def next(self, held_up: set[str]) -> Waiting | None:
        """Return the request to admit next: of the owner who had least time and is within his share. Owners who are
        `held_up` have a request that found no room; only others' small requests may overtake it, for a limited time."""
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
        """Return whether one more prompt of the only owner could run in one pass with those being prefilled."""
        prefilling, pool = self._under_way.prefilling, self._pipeline.pool
        if not prefilling:
            self._refused_at = inf
        return (
            self._pipeline.model.runner.lean is not None
            and all(job.is_in_place for job in prefilling)
            and sum(job.rows_left for job in prefilling) < min(TOGETHER, self._turns.rows)
            and len({job.owner for job in (*waiting, *prefilling)}) == 1  # else the place is for owners without one
            and pool.lent < self._refused_at
        )

    def let_in(self, request: Waiting) -> Prefilling | None:
        """Reserve a request's memory and load its stored KV. Return None when there is no room now."""
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
        """Whether the limits of the batch and of the owner's share admit a request; memory is checked later."""
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
        """Whether another prompt is computing or storing a block that this one could soon reuse."""
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
        """Reserve all pages that a request may need and does not share. Return False when they are not free now."""
        # Only the lean decoder reads pages. It may be gone by now: an adapter was put in place, say.
        if self.memory is not None and self._pipeline.model.runner.lean is not None and linked is not None:
            shares = (
                request.prepared.reuse is Reuse.EXACT
            )  # weaker reuse may still be exact, but only the final plan tells
            names = page_names(linked.blocks, len(request.tokens)) if shares else []
            request.room.sequence = self.memory.admit(request.positions, names, linked.prompt.lora)
            return request.room.sequence is not None
        pages = pages_for(request.positions) if self._pool.capacity else 0
        if self._pool.reserve(pages) is None:
            return False
        request.room.promised = pages
        return True

    def _open(self, request: Waiting, linked: Linked | None, uncached: Why) -> Opened | None:
        """Load a request's stored KV into an arena. Return None when other requests hold all arenas."""
        times, room = request.prepared.times, request.room
        times.queue_ms = (time.perf_counter() - times.compiled) * 1e3
        capacity = len(request.tokens) if room.sequence is not None else request.positions + 1
        held = self._pipeline.pool.lent
        try:
            return room.stack.enter_context(self._pipeline.open(request.prepared, linked, capacity, uncached))
        except Overloaded:
            if not held:  # no arena is lent, so none will be given back
                raise
            self._refused_at = held
            if room.sequence is not None:
                room.sequence.release()
                room.sequence = None
            self._pool.unreserve(room.promised)
            room.promised = 0
            return None
