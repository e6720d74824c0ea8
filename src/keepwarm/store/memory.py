"""The RAM tier: whole runs in process memory, under a byte cap that is never exceeded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef, KVSink, Policy
from keepwarm.errors import CorruptRun
from keepwarm.store.eviction import LRU
from keepwarm.store.format import Run, StoredBlock

_Value = TypeVar("_Value")


class RamTier:
    """Runs by block id. Safe for use from several threads; a run handed out stays valid after it is evicted."""

    name = "ram"

    def __init__(
        self,
        cap: int,
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.cap = cap
        self._policy: Policy = LRU() if policy is None else policy
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._where: dict[bytes, dict[str, int]] = {}  # block id -> run id -> ordinal
        self._by_parent: dict[bytes, set[str]] = {}  # id before a run's first block -> runs
        self._by_prefix: dict[bytes, set[bytes]] = {}  # parent prefix name -> block ids
        self._times: dict[str, tuple[float, float]] = {}
        self._clock = clock
        self._bytes = 0
        self.evictions = 0

    def put(self, run: Run) -> bool:
        """Insert a run, giving up others first. False when it cannot fit, or is held already."""
        with self._lock:
            if run.id in self._runs or not self.make_room(run.nbytes, run.parent):
                return False
            self._runs[run.id] = run
            self._bytes += run.nbytes
            self._times[run.id] = (self._clock(), self._clock())
            self._policy.add(run.id, run.nbytes)
            self._by_parent.setdefault(run.parent, set()).add(run.id)
            for block in run.blocks:
                self._where.setdefault(block.id, {})[run.id] = block.ordinal
                self._by_prefix.setdefault(block.parent_prefix, set()).add(block.id)
            return True

    def make_room(self, nbytes: int, parent: bytes) -> bool:
        """Evict until `nbytes` more would fit; never a run that another one continues, nor the one that holds `parent`.

        False when even that is not enough. Called before the bytes are allocated, so that the cap holds meanwhile.
        """
        with self._lock:
            if nbytes > self.cap:
                return False
            while self._bytes + nbytes > self.cap:
                victim = next((run for run in self._in_order() if self._is_leaf(run) and not _holds(run, parent)), None)
                if victim is None:
                    return False
                self.remove(victim.id)
                self.evictions += 1
            return True

    def remove(self, run_id: str) -> bool:
        """Forget a run. False when it is not here."""
        with self._lock:
            run = self._runs.pop(run_id, None)
            if run is None:
                return False
            self._bytes -= run.nbytes
            del self._times[run_id]
            self._policy.remove(run_id)
            _discard(self._by_parent, run.parent, run_id)
            for block in run.blocks:
                places = self._where[block.id]
                del places[run_id]
                if not places:
                    del self._where[block.id]
                    _discard(self._by_prefix, block.parent_prefix, block.id)
            return True

    def find(self, block_id: bytes) -> tuple[Run, StoredBlock] | None:
        """The run that holds a block, and the block in it."""
        with self._lock:
            for run_id, ordinal in self._where.get(block_id, {}).items():
                run = self._runs[run_id]
                return run, run.blocks[ordinal]
            return None

    def get(self, run_id: str) -> Run | None:
        with self._lock:
            return self._runs.get(run_id)

    def runs(self) -> tuple[Run, ...]:
        """All runs, the least recently used first."""
        with self._lock:
            return tuple(self._in_order())

    def ref(self, block_id: bytes) -> BlockRef | None:
        """A block as the index port describes it."""
        found = self.find(block_id)
        return None if found is None else ref_of(found[0], found[1])

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """The longest leading part of `ids` that is here."""
        refs: list[BlockRef] = []
        for block_id in ids:
            ref = self.ref(block_id)
            if ref is None:
                break
            refs.append(ref)
        return tuple(refs)

    def children(self, prefix: bytes) -> tuple[BlockRef, ...]:
        """Blocks whose left context has this prefix name."""
        with self._lock:
            refs = [self.ref(block_id) for block_id in self._by_prefix.get(prefix, ())]
        return tuple(ref for ref in refs if ref is not None)

    def continued_by(self, block_id: bytes) -> tuple[str, ...]:
        """Runs whose first block stands on this one."""
        with self._lock:
            return tuple(self._by_parent.get(block_id, ()))

    def touch(self, run_id: str) -> None:
        """Note a use."""
        with self._lock:
            self._policy.touch(run_id)
            if run_id in self._times:
                self._times[run_id] = (self._times[run_id][0], self._clock())

    def times(self, run_id: str) -> tuple[float, float]:
        """When a run entered and when it was last used, seconds since the epoch; zeros when it is not here."""
        with self._lock:
            return self._times.get(run_id, (0.0, 0.0))

    def load(self, run: Run, first: int, last: int, tokens: TokenIds, end: int, sink: KVSink) -> None:
        """Give blocks `first..last` up to position `end` to the sink, and commit layer by layer, in this thread.

        `tokens` are the expected ids from the first block's start to `end`. Raises CorruptRun when the run's differ.
        The bytes were verified when they entered.
        """
        start = run.blocks[first].start
        t0, t1 = start - run.start, end - run.start
        if end > run.blocks[last].end or not np.array_equal(run.tokens[t0:t1], tokens):
            raise CorruptRun(f"run {run.id}: token ids differ from the prompt's")
        self.touch(run.id)
        for layer in range(len(run.geometry.layers)):
            for kv in (0, 1):
                sink.fill(layer, kv, start, run.view(layer, kv, t0, t1))
            sink.commit(layer, start, end)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs held; at most `cap`."""
        return self._bytes

    @property
    def block_count(self) -> int:
        return len(self._where)

    def _in_order(self) -> list[Run]:
        return [self._runs[str(key)] for key in self._policy.victims()]

    def _is_leaf(self, run: Run) -> bool:
        return all(not (self._by_parent.get(block.id, set()) - {run.id}) for block in run.blocks)


def ref_of(run: Run, block: StoredBlock) -> BlockRef:
    """A block of a run in RAM as the index port describes it."""
    return BlockRef(block.id, block.prefix, run.id, block.ordinal, block.start, block.length, RamTier.name)


def _holds(run: Run, block_id: bytes) -> bool:
    return any(block.id == block_id for block in run.blocks)


def _discard(groups: dict[bytes, set[_Value]], key: bytes, value: _Value) -> None:
    group = groups.get(key)
    if group is not None:
        group.discard(value)
        if not group:
            del groups[key]
