"""The RAM tier: whole runs in process memory, under a byte cap that is never exceeded."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TypeVar

import numpy as np

from keepwarm.core.blocks import Block, TokenIds, lead
from keepwarm.core.ports import BlockRef, KVSink, Policy
from keepwarm.errors import CorruptRun
from keepwarm.store.eviction import LRU
from keepwarm.store.retention import EVICTED, EXPIRED, NOTED_EVICTIONS, Retention
from keepwarm.store.runfile.giving import give
from keepwarm.store.runfile.layout import NEIGHBOURS, Run, StoredBlock, check_sink, lead_of

_Value = TypeVar("_Value")
_ENDS = 64  # outdated entries that are allowed even if few retentions are kept


class RamTier:
    """Runs by block id. Safe for use from several threads; a run handed out stays valid after it is evicted.

    Order of eviction: first runs whose time to live has ended, then the policy's choice, then pinned runs by priority.
    A run is never evicted before the runs that continue it: the policy is told to hold it. Chains are complete from
    their beginning: a run enters only after the one it continues, and is removed with it. So no other tier or process
    can leave it orphaned.
    """

    name = "ram"

    def __init__(self, cap: int, *, policy: Policy | None = None, clock: Callable[[], float] = time.time) -> None:
        self.cap = cap
        self._policy: Policy = LRU() if policy is None else policy
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._where: dict[bytes, dict[str, int]] = {}  # block id -> run id -> ordinal
        self._by_parent: dict[bytes, set[str]] = {}  # id before a run's first block -> runs
        self._by_prefix: dict[bytes, dict[tuple[bytes, str], None]] = {}  # parent prefix name -> block ids and runs
        self._by_content: dict[bytes, set[tuple[str, int]]] = {}  # content id -> runs and ordinals
        self._leads: dict[bytes, list[tuple[bytes, bytes]]] = {}  # parent id -> sorted leads and ids of what follows it
        self._times: dict[str, tuple[float, float]] = {}
        self._continued: dict[str, int] = {}  # run id -> how many runs continue it, counted by the block they stand on
        self._kept: dict[str, Retention] = {}
        self._ends: list[tuple[float, str]] = []  # when retentions may end, the first on top
        self._ended: dict[str, None] = {}  # runs whose time to live is over, the first to end first
        self._clock = clock
        self._last = 0.0
        self._bytes = 0
        self.evictions = 0
        self._eviction_reasons: dict[bytes, str] = {}  # why blocks were evicted, the oldest note first

    def put(self, run: Run, retention: Retention | None = None, allowed: Callable[[], bool] = lambda: True) -> bool:
        """Insert a run, evicting others first. Return False when it cannot fit, is here already, continues one that is
        not here, or is not `allowed`. That is asked under the lock, so a purge that begins later finds it in `runs`."""
        with self._lock:
            if not allowed():
                return False
            orphaned = run.start and run.parent not in self._where
            if orphaned or any(block.id == run.parent for block in run.blocks):
                return False
            if run.id in self._runs or not self.make_room(run.nbytes, run.parent):
                return False
            self._runs[run.id] = run
            self._bytes += run.nbytes
            self._times[run.id] = (self._clock(), self._clock())
            self._policy.add(run.id, run.nbytes, run.blocks[0].id)
            self._by_parent.setdefault(run.parent, set()).add(run.id)
            for above in self._where.get(run.parent, ()):
                self._continue(above)
            for block in run.blocks:
                if block.id not in self._where:
                    insort(self._leads.setdefault(block.behind, []), (_lead_in(run, block), block.id))
                self._where.setdefault(block.id, {})[run.id] = block.ordinal
                self._by_prefix.setdefault(block.parent_prefix, {})[block.id, run.id] = None
                self._by_content.setdefault(block.content, set()).add((run.id, block.ordinal))
                for _ in self._by_parent.get(block.id, ()):
                    self._continue(run.id)
            if retention is not None:
                self.retain(run.id, retention)
            return True

    def make_room(self, nbytes: int, parent: bytes) -> bool:
        """Evict until `nbytes` more would fit; never a run that another one continues, nor the chain up to `parent`.

        Return False and evict nothing when that chain alone leaves too little room. Call this before the bytes are
        allocated, so that the cap always holds.
        """
        with self._lock:
            if self._bytes + nbytes <= self.cap:
                return True
            chain = self._chain(parent)
            if nbytes + sum(self._runs[run_id].nbytes for run_id in chain) > self.cap:
                return False
            with self._holding(chain):
                while self._bytes + nbytes > self.cap:
                    victim = self._victim(chain)
                    if victim is None:
                        return False
                    self._note_eviction(self._runs[victim], EXPIRED if victim in self._ended else EVICTED)
                    self.remove(victim)
                    self.evictions += 1
            return True

    def _note_eviction(self, run: Run, why: str) -> None:
        for block in run.blocks:
            self._eviction_reasons.pop(block.id, None)
            self._eviction_reasons[block.id] = why
        for block_id in list(islice(self._eviction_reasons, max(0, len(self._eviction_reasons) - NOTED_EVICTIONS))):
            del self._eviction_reasons[block_id]

    def eviction_reason(self, block_id: bytes) -> str | None:
        """Why a block is no longer here; None when it was never evicted, or long ago."""
        with self._lock:
            return self._eviction_reasons.get(block_id)

    def retain(self, run_id: str, retention: Retention) -> None:
        """Keep a run longer, or shorter, than the policy would (see `Retention`); this replaces earlier requests."""
        with self._lock:
            if run_id not in self._runs:
                return
            self._let_go(run_id)
            self._kept[run_id] = retention
            heappush(self._ends, (retention.expires, run_id))
            if len(self._ends) > 2 * len(self._kept) + _ENDS:  # each use may leave an outdated entry
                self._ends = [(kept.expires, each) for each, kept in self._kept.items()]
                heapify(self._ends)
            if retention.priority:
                self._policy.hold(run_id)

    def retention(self, run_id: str) -> Retention | None:
        """The retention that `retain` set for a run, if any."""
        with self._lock:
            return self._kept.get(run_id)

    def retain_chain(self, leaf: bytes, ttl: float, priority: int, *, public: bool = True) -> list[Run]:
        """Retain the runs here that hold a prompt up to its last block, and the snapshots up to there. Return them.
        Without `public`, runs that are under no salt stay as they are.

        Raises ValueError for a time that is not positive and finite, or a negative priority.
        """
        with self._lock:
            kept = Retention.beginning(self._clock(), ttl, priority)
            found = [*(chain := self._chain(leaf)), *self._snapshots_of(chain, leaf)]
            for run_id in found:
                if public or any(self._runs[run_id].salts):
                    self.retain(run_id, kept)
            return [self._runs[run_id] for run_id in found]

    def remove(self, run_id: str) -> bool:
        """Forget a run, and the runs here that continue only it. Return False when it is not here."""
        with self._lock:
            found = run_id in self._runs
            waiting = [run_id]
            while waiting:
                if (run := self._remove(waiting.pop())) is not None:
                    gone = (block.id for block in run.blocks if block.id not in self._where)
                    waiting += [each for block_id in gone for each in self._by_parent.get(block_id, ())]
            return found

    def _remove(self, run_id: str) -> Run | None:
        run = self._runs.pop(run_id, None)
        if run is None:
            return None
        self._bytes -= run.nbytes
        del self._times[run_id]
        self._let_go(run_id)
        self._policy.remove(run_id)
        self._continued.pop(run_id, None)
        _discard(self._by_parent, run.parent, run_id)
        for above in self._where.get(run.parent, ()):
            self._continued[above] -= 1
            self._policy.release(above)
        for block in run.blocks:
            _discard(self._by_content, block.content, (run_id, block.ordinal))
            group = self._by_prefix[block.parent_prefix]
            del group[block.id, run_id]
            if not group:
                del self._by_prefix[block.parent_prefix]
            places = self._where[block.id]
            del places[run_id]
            if not places:
                del self._where[block.id]
                leads = self._leads[block.behind]
                del leads[bisect_left(leads, (_lead_in(run, block), block.id))]
                if not leads:
                    del self._leads[block.behind]
        return run

    def _continue(self, run_id: str) -> None:
        self._continued[run_id] = self._continued.get(run_id, 0) + 1
        self._policy.hold(run_id)

    def _let_go(self, run_id: str) -> None:
        """Forget a run's retention."""
        kept = self._kept.pop(run_id, None)
        self._ended.pop(run_id, None)
        if kept is not None and kept.priority:
            self._policy.release(run_id)

    def _victim(self, chain: Sequence[str]) -> str | None:
        self._end_retentions()
        free = (run_id for run_id in self._ended if not self._continued.get(run_id) and run_id not in chain)
        if (ended := next(free, None)) is not None:
            return ended
        if (chosen := self._policy.evict()) is not None:
            return str(chosen)
        pinned = [run_id for run_id, kept in self._kept.items() if kept.priority and run_id not in chain]
        return min(
            (run_id for run_id in pinned if not self._continued.get(run_id)),
            key=lambda run_id: (self._kept[run_id].priority, self._times[run_id][1]),
            default=None,
        )

    def _end_retentions(self) -> None:
        now = self._clock()
        if now < self._last:  # the clock was set back: no retention may last longer than was asked
            for run_id, kept in list(self._kept.items()):
                self.retain(run_id, kept.clamped(now))
        self._last = now
        while self._ends and self._ends[0][0] <= now:
            expires, run_id = heappop(self._ends)
            over = self._kept.get(run_id)
            if over is None or over.expires != expires:
                continue
            if over.priority:
                self._let_go(run_id)
            else:
                self._ended[run_id] = None

    @contextmanager
    def _holding(self, run_ids: Sequence[str]) -> Iterator[None]:
        for run_id in run_ids:
            self._policy.hold(run_id)
        try:
            yield
        finally:
            for run_id in run_ids:
                self._policy.release(run_id)

    def _chain(self, block_id: bytes) -> list[str]:
        """Return all runs here that hold a block or the blocks before it in its chain."""
        chain: list[str] = []
        waiting = [block_id]
        while waiting:
            for run_id in self._where.get(waiting.pop(), ()):
                if run_id not in chain:
                    chain.append(run_id)
                    waiting.append(self._runs[run_id].parent)
        return chain

    def _snapshots_of(self, chain: Sequence[str], leaf: bytes) -> list[str]:
        """The snapshots here that stand on the runs of a chain, up to the end of the block `leaf`."""
        ends = [self._runs[run_id].blocks[ordinal].end for run_id, ordinal in self._where.get(leaf, {}).items()]
        stood_on = [block.id for run_id in chain for block in self._runs[run_id].blocks if block.end <= max(ends)]
        found = dict.fromkeys(each for block_id in stood_on for each in self._by_parent.get(block_id, ()))
        return [run_id for run_id in found if self._runs[run_id].geometry.is_state and run_id not in chain]

    def find(self, block_id: bytes, start: int | None = None) -> tuple[Run, StoredBlock] | None:
        """Return a run that holds a block, and the block in it. With `start`, it must hold the block from that position
        on: a page and its rest have the same name."""
        with self._lock:
            for run_id, ordinal in self._where.get(block_id, {}).items():
                run = self._runs[run_id]
                if start is None or run.blocks[ordinal].start == start:
                    return run, run.blocks[ordinal]
            return None

    def get(self, run_id: str) -> Run | None:
        with self._lock:
            return self._runs.get(run_id)

    def runs(self) -> tuple[Run, ...]:
        """All runs, the least recently used first."""
        with self._lock:
            return tuple(sorted(self._runs.values(), key=lambda run: self._times[run.id][1]))

    def ref(self, block_id: bytes) -> BlockRef | None:
        """Describe a block as the index port does."""
        found = self.find(block_id)
        return None if found is None else ref_of(found[0], found[1])

    def refs(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """Return the blocks that are here."""
        with self._lock:
            found = ((block_id, self.ref(block_id)) for block_id in self._where.keys() & ids)
            return {block_id: ref for block_id, ref in found if ref is not None}

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """The longest leading part of `ids` that is here."""
        refs: list[BlockRef] = []
        for block_id in ids:
            ref = self.ref(block_id)
            if ref is None:
                break
            refs.append(ref)
        return tuple(refs)

    def children(self, prefix: bytes, most: int | None = None) -> tuple[BlockRef, ...]:
        """Blocks whose left context has this prefix name, the newest first, at most `most`."""
        with self._lock:
            newest = islice(reversed(self._by_prefix.get(prefix, {})), most)
            found = {block_id: self._runs[run_id] for block_id, run_id in newest}
            return tuple(ref_of(run, run.blocks[self._where[block_id][run.id]]) for block_id, run in found.items())

    def content(self, content_id: bytes) -> list[tuple[Run, StoredBlock]]:
        """Blocks with these tokens, whatever came before, and their runs."""
        with self._lock:
            found = [(self._runs[run_id], ordinal) for run_id, ordinal in sorted(self._by_content.get(content_id, ()))]
            return [(run, run.blocks[ordinal]) for run, ordinal in found]

    def beside(self, block: Block) -> list[tuple[bytes, BlockRef]]:
        """Return the blocks stored right behind a block's parent whose leads are next to its own in order, each with
        its lead. No other block shares a longer beginning with it."""
        wanted = lead(block.tokens, block.salts)
        with self._lock:
            leads = self._leads.get(block.parent_exact, [])
            at = bisect_left(leads, (wanted, b""))
            near = leads[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]
            return [(found, ref) for found, block_id in near if (ref := self.ref(block_id)) is not None]

    def continued_by(self, block_id: bytes) -> tuple[str, ...]:
        """Runs whose first block stands on this one."""
        with self._lock:
            return tuple(self._by_parent.get(block_id, ()))

    def touch(self, run_id: str) -> None:
        """Note a use."""
        with self._lock:
            self._policy.touch(run_id)
            if run_id in self._times:
                now = self._clock()
                self._times[run_id] = (self._times[run_id][0], now)
                kept = self._kept.get(run_id)
                if kept is not None and not kept.priority:
                    self.retain(run_id, kept.renewed(now))

    def times(self, run_id: str) -> tuple[float, float]:
        """When a run entered and when it was last used, seconds since the epoch; zeros when it is not here."""
        with self._lock:
            return self._times.get(run_id, (0.0, 0.0))

    def load(self, run: Run, first: int, last: int, tokens: TokenIds, end: int, sink: KVSink) -> None:
        """Give blocks `first..last` up to position `end` to the sink, and commit layer by layer, in this thread.

        `tokens` are the expected ids from the first block's start to `end`. Raises CorruptRun when the run's ids
        differ, or its KV has another form. The bytes were verified when they entered.
        """
        start = run.blocks[first].start
        t0, t1 = start - run.start, end - run.start
        if end > run.blocks[last].end or not np.array_equal(run.tokens[t0:t1], tokens):
            raise CorruptRun(f"run {run.id}: token ids differ from the prompt's")
        check_sink(run.geometry, sink)
        self.touch(run.id)
        give(run, run.blocks[first : last + 1], end, sink)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs held; at most `cap`."""
        return self._bytes

    @property
    def block_count(self) -> int:
        return len(self._where)

    def snapshots(self) -> tuple[int, int]:
        """Number of snapshots of recurrent state here, and their bytes; `block_count` and `nbytes` include them."""
        with self._lock:
            sizes = [run.nbytes for run in self._runs.values() if run.geometry.is_state]
            return len(sizes), sum(sizes)


def _lead_in(run: Run, block: StoredBlock) -> bytes:
    return lead_of(block, run.tokens[block.start - run.start : block.end - run.start])


def ref_of(run: Run, block: StoredBlock) -> BlockRef:
    """Describe a block of a run in RAM as the index port does."""
    return BlockRef(block.id, block.prefix, run.id, block.ordinal, block.start, block.length, RamTier.name)


def _discard(groups: dict[bytes, set[_Value]], key: bytes, value: _Value) -> None:
    group = groups.get(key)
    if group is not None:
        group.discard(value)
        if not group:
            del groups[key]
