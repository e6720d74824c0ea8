"""Write to a remote service: runs, and the records for its cap, its tenants and its names.

A run's mark is entered in the set of marks before its bytes are written, and removed after they are deleted. A writer
first enters its mark, then reads all marks and evicts other runs until the sum fits. So the cap holds among replicas
without a lock, if the service is consistent (Redis is; S3, GCS and Azure have been since 2020).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from keepwarm.core.identity import digest
from keepwarm.errors import CorruptRun, PurgedMeanwhile, RemoteUnavailable, StoreFull, StoreLocked, StoreTooNew
from keepwarm.store.admin.purge_epochs import EVERYTHING
from keepwarm.store.catalog.rows import Orphan
from keepwarm.store.remote import keys
from keepwarm.store.remote.backend import remaining
from keepwarm.store.remote.heads import Head, Mark, Whereabouts
from keepwarm.store.remote.layout import LAYOUT_KEY, ROOT, layout_of
from keepwarm.store.remote.tier import RemoteTier
from keepwarm.store.runfile.layout import UNKNOWN_SALT, Run, StoredBlock
from keepwarm.store.runfile.writer import encode_run

_UNKNOWN = "unknown"
_PURGED = "its salt was purged meanwhile"
_ABOVE = 255  # most runs that a block's whereabouts name
_RUN_OVERHEAD, _BLOCK_OVERHEAD = 1024, 768  # bytes of their records, a generous estimate
_TOUCH_SECONDS = 600.0  # least time between writes of a run's last use; at most a quarter of its time to live
_FORGOTTEN = 30 * 86400.0  # seconds after which a replica's counters are no longer summed

Fetch = Callable[[bytes], Run | None]


class Books:
    """Writes to one service. Its methods run in one thread at a time; they raise RemoteUnavailable."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier
        self._blobs = tier.blobs
        self._until: float | None = None  # when the writing of a run must have ended, while one is written
        self._touched: dict[str, float] = {}
        self._laid_out = False

    @property
    def _seconds(self) -> float:
        """Seconds that the next request may take. Raises RemoteUnavailable when no time is left."""
        return self._tier.limits.write_timeout if self._until is None else remaining(self._until, self._tier.name)

    def store(self, run: Run, fetch: Fetch, allowed: Callable[[], bool] = lambda: True) -> int:
        """Store a run's missing blocks, after the runs that it stands on, which `fetch` finds by a block's id.

        Return how many blocks were new. Raises StoreFull, Orphan when a run that it stands on is not found, and
        PurgedMeanwhile when it is not `allowed`. That is also asked after all is written; nothing is left then.
        """
        if not allowed():
            raise PurgedMeanwhile(_PURGED)
        self._lay_out()
        chain = [run]
        while chain[-1].start and not self._tier.find_now([chain[-1].parent]):
            held = fetch(chain[-1].parent)
            if held is None or held.id in {member.id for member in chain}:
                raise Orphan
            chain.append(held)
        new = 0
        for member in reversed(chain):
            self._until = time.monotonic() + self._tier.limits.write_timeout
            try:
                new += self._store(member, allowed)
            finally:
                self._until = None
        return new

    def _store(self, run: Run, allowed: Callable[[], bool]) -> int:
        stored = self._tier.find_now([block.id for block in run.blocks])
        missing = [block.ordinal for block in run.blocks if block.id not in stored]
        if not missing:
            return 0
        first, last = missing[0], missing[-1] + 1
        part = run if last - first == len(run.blocks) else run.part(first, last)
        above: tuple[str, ...] = ()
        if part.start:
            place = self._tier.where_now([part.parent]).get(part.parent)
            if place is None:
                raise Orphan
            above = (place.run_id, *place.above)[:_ABOVE]
        head, body = encode_run(part, part.layers(), self._tier.key)
        size = len(head) + len(body) + _RUN_OVERHEAD + _BLOCK_OVERHEAD * len(part.blocks) + 16 * len(above)
        mark = Mark(part.id, above[0] if above else "", size, time.time())
        try:
            self._reserve(mark, above)
            self._write(part, mark, above, head, body)
            if not allowed():  # a purge that begins from now on finds the run
                raise PurgedMeanwhile(_PURGED)
        except BaseException:
            with suppress(RemoteUnavailable):
                self._erase(part.id, part.blocks, len(body), {keys.RUNS: {str(mark)}})
            raise
        return len(missing)

    def _write(self, run: Run, mark: Mark, above: tuple[str, ...], head: bytes, body: memoryview) -> None:
        tags = [tag.hex() or _UNKNOWN for tag in run.salts]
        if tags:
            self._blobs.add({keys.tagged(tag): [run.id] for tag in tags}, self._seconds)
        self._blobs.put_body(keys.body(run.id), body, self._seconds)
        line = f"{mark} {len(head) + len(body)}\n".encode()
        self._blobs.put({keys.head(run.id): line + head}, self._seconds)
        groups: dict[str, list[str]] = {}
        for block in run.blocks:
            groups.setdefault(keys.children(block.parent_prefix), []).append(f"{run.id}.{block.ordinal}")
        self._blobs.add(groups, self._seconds)
        # Last of all, so that a reader that finds a block also finds the rest.
        places = {keys.block(b.id): Whereabouts(run.id, b.ordinal, above).encode() for b in run.blocks}
        self._blobs.put(places, self._seconds)
        entries = [(keys.RUNS, str(mark)), *((keys.tagged(tag), run.id) for tag in tags)]
        if not all(self._blobs.is_member(group, member, self._seconds) for group, member in entries):
            raise StoreFull("it was removed while it was written")  # or purged: nothing of it may stay

    # The cap

    def _reserve(self, mark: Mark, above: Iterable[str]) -> None:
        cap, now = self._tier.limits.cap, time.time()
        if cap is None:
            self._blobs.add({keys.RUNS: [str(mark)]}, self._seconds)
            return
        if mark.nbytes > cap:
            raise StoreFull(f"a run of {mark.nbytes} bytes does not fit under max_remote, {cap}")
        self._blobs.add({keys.RUNS: [str(mark)]}, self._seconds)
        marks = self.marks()
        kept = {mark.run_id, *above}
        if sum(each.nbytes for each in marks if each.run_id in kept) > cap:
            self._blobs.discard({keys.RUNS: [str(mark)]}, self._seconds)
            raise StoreFull(f"a run of {mark.nbytes} bytes and what it stands on do not fit under max_remote, {cap}")
        total = sum(each.nbytes for each in marks)
        continued = Counter(each.parent for each in marks)
        order = sorted(marks, key=lambda each: marks[each])
        while total > cap:
            victim = next((e for e in order if not continued[e.run_id] and e.run_id not in kept), None)
            if victim is None:
                self._blobs.discard({keys.RUNS: [str(mark)]}, self._seconds)
                raise StoreFull(f"{self._tier.name} is full of runs that are being written ({now:.0f})")
            order.remove(victim)
            continued[victim.parent] -= 1
            total -= victim.nbytes
            self.evict(victim)

    def marks(self) -> dict[Mark, float]:
        """All runs, each with the time of its last use."""
        found: dict[Mark, float] = {}
        for text, when in self._blobs.members(keys.RUNS, self._seconds).items():
            with suppress(ValueError):
                mark = Mark.parse(text)
                # Object stores report whole seconds; this replica may know a later, more precise time.
                found[mark] = max(when, mark.created, self._touched.get(mark.run_id, 0.0))
        return found

    def evict(self, mark: Mark, tag: str = "") -> None:
        """Remove a run; `tag` names a set of runs that it is in, whatever its head says.

        Another replica may be writing the run. The writer checks mark and tags after everything else is written
        (`_write`). Either they are gone and it removes the run itself, or its head was there before they were removed.
        So if the head is missing at first, it is read again, and what it describes is removed, too.
        """
        (raw,) = self._blobs.get([keys.head(mark.run_id)], self._seconds)
        head = self._parsed(mark.run_id, raw)
        groups = {keys.RUNS: {str(mark if head is None else head.mark)}}
        if tag:
            groups[keys.tagged(tag)] = {mark.run_id}
        blocks = () if head is None else head.header.blocks
        # Without a readable head, the mark's size bounds the size of the body.
        size = mark.nbytes if head is None else head.body_bytes
        self._erase(mark.run_id, blocks, size, groups, keep_head=raw is None)
        if raw is None:
            if (head := self._head_now(mark.run_id)) is not None:
                self._erase(mark.run_id, head.header.blocks, head.body_bytes, groups | {keys.RUNS: {str(head.mark)}})
        elif self._places(mark.run_id, blocks):
            self._erase(mark.run_id, blocks, size, groups)
        self._tier.health.count("evicted_remote")

    def _erase(
        self,
        run_id: str,
        blocks: Iterable[StoredBlock],
        size: int,
        groups: Mapping[str, Iterable[str]],
        *,
        keep_head: bool = False,
    ) -> None:
        """Remove a run's bytes, and then its memberships in sets: `groups`, and the sets that its blocks are in."""
        blocks = tuple(blocks)
        if mine := self._places(run_id, blocks):
            self._blobs.delete(mine, {}, self._seconds)
        sets = {group: set(members) for group, members in groups.items()}
        for block in blocks:
            sets.setdefault(keys.children(block.parent_prefix), set()).add(f"{run_id}.{block.ordinal}")
            for salt in block.salts:
                sets.setdefault(keys.tagged(salt.hex() or _UNKNOWN), set()).add(run_id)
        self._blobs.delete([] if keep_head else [keys.head(run_id)], {keys.body(run_id): size}, self._seconds)
        self._blobs.discard({group: list(members) for group, members in sets.items()}, self._seconds)
        self._tier.forget(run_id)

    def _places(self, run_id: str, blocks: Iterable[StoredBlock]) -> list[str]:
        """Keys of those blocks whose whereabouts name this run."""
        where = self._tier.where_now([block.id for block in blocks])
        return [keys.block(block_id) for block_id, place in where.items() if place.run_id == run_id]

    def _head_now(self, run_id: str) -> Head | None:
        """Read a run's head; None when it is gone, or unreadable with this version and key."""
        (raw,) = self._blobs.get([keys.head(run_id)], self._seconds)
        return self._parsed(run_id, raw)

    def _parsed(self, run_id: str, raw: bytes | None) -> Head | None:
        try:
            return None if raw is None else Head.parse(run_id, raw, self._tier.key)
        except (CorruptRun, StoreTooNew, StoreLocked):
            return None

    def expire(self) -> int:
        """Remove runs that were not used for the time to live. Return how many."""
        ttl = self._tier.limits.ttl
        if ttl is None:
            return 0
        old = [mark for mark, when in self.marks().items() if when < time.time() - ttl]
        for mark in old:
            self.evict(mark)
        return len(old)

    def merge(self, *, now: bool = False) -> None:
        """Write when runs were last used here, for each run at most every ten minutes, unless `now`."""
        ttl = self._tier.limits.ttl
        pause = _TOUCH_SECONDS if ttl is None else min(_TOUCH_SECONDS, ttl / 4)
        used: list[Head] = []
        for run_id, when in self._tier.used().items():
            head = self._tier.known(run_id)
            if head is None or (not now and when - self._touched.get(run_id, 0.0) < pause):
                continue
            self._touched[run_id] = when
            used.append(head)
        # A new mark of a run that another replica removed would count bytes that are not there.
        used, _ = self._there(used)
        if not used:
            return
        self._blobs.add(_memberships(used), self._seconds)
        # A run leaves the sets after its head is deleted. A run removed just now may have been added to them again.
        used, gone = self._there(used)
        if gone:
            self._blobs.discard(_memberships(gone), self._seconds)
        for head in used:
            blocks = head.header.blocks
            children = {keys.children(block.parent_prefix) for block in blocks}
            renewed = [keys.head(head.mark.run_id), *(keys.block(block.id) for block in blocks), *children]
            self._blobs.renew(renewed, {keys.body(head.mark.run_id): head.body_bytes}, self._seconds)

    def _there(self, heads: Sequence[Head]) -> tuple[list[Head], list[Head]]:
        """Split heads into those that are still stored and those that are gone."""
        found = self._blobs.get([keys.head(head.mark.run_id) for head in heads], self._seconds)
        kept = [head for head, raw in zip(heads, found, strict=True) if raw is not None]
        return kept, [head for head, raw in zip(heads, found, strict=True) if raw is None]

    def tidy(self, run_id: str) -> None:
        """Read a run again that seemed damaged or incomplete, and remove it if it still is."""
        head = self._head_now(run_id)
        if head is not None and self._tier.is_sound(head):
            return
        for mark in self.marks():
            if mark.run_id == run_id:
                self.evict(mark)

    # Tenants, names, counters

    def purge(self, tag: bytes) -> tuple[set[str], int]:
        """Remove every run with a block under a salt, or under an unknown salt. Return their ids and bytes.

        The beginning of the purge is noted first, for concurrent writers. Its end is noted last: then other replicas
        follow it, for everything that they may have read until then.
        """
        self._blobs.add({keys.PURGES: [began_of(tag).hex()]}, self._seconds)
        marks = {mark.run_id: mark for mark in self.marks()}
        gone: set[str] = set()
        size = 0
        if tag == EVERYTHING:
            for mark in marks.values():
                self.evict(mark)
                gone.add(mark.run_id)
                size += mark.nbytes
        for name in (tag.hex(), UNKNOWN_SALT.hex() or _UNKNOWN):
            members = list(self._blobs.members(keys.tagged(name), self._seconds))
            for run_id in members:
                mark = marks.get(run_id, Mark(run_id, "", 0, 0.0))
                self.evict(mark, name)
                gone.add(run_id)
                size += mark.nbytes
        names = self.names()
        stored = self._tier.where_now(list(names.values()))
        lost = [name for name, leaf in names.items() if leaf not in stored]
        if lost:
            self._forget_names(lost)
        self._blobs.add({keys.PURGES: [tag.hex()]}, self._seconds)
        return gone, size

    def purges(self) -> dict[bytes, float]:
        """Tags of all salts ever purged, with the time of the last purge; also `began_of` each, with its beginning."""
        return {bytes.fromhex(tag): when for tag, when in self._blobs.members(keys.PURGES, self._seconds).items()}

    def name(self, name: str, leaf: bytes, allowed: Callable[[], bool] = lambda: True) -> None:
        """Name the prompt that ends with a block, if that is allowed before and after writing the name."""
        if not allowed():
            return
        self._lay_out()
        self._blobs.put({keys.named(name): leaf.hex().encode()}, self._seconds)
        self._blobs.add({keys.NAMES: [keys.safe(name)]}, self._seconds)
        if not allowed():
            self._forget_names([name])

    def _forget_names(self, names: Sequence[str]) -> None:
        self._blobs.delete([keys.named(name) for name in names], {}, self._seconds)
        self._blobs.discard({keys.NAMES: [keys.safe(name) for name in names]}, self._seconds)

    def names(self) -> dict[str, bytes]:
        """Leaf block ids by name."""
        names = [keys.unsafe(each) for each in self._blobs.members(keys.NAMES, self._seconds)]
        found = self._blobs.get([keys.named(name) for name in names], self._seconds)
        return {name: bytes.fromhex(leaf.decode()) for name, leaf in zip(names, found, strict=True) if leaf}

    def report(self, replica: str, record: Mapping[str, Any]) -> None:
        """Store a replica's counters, in place of its earlier ones."""
        self._blobs.put({f"{ROOT}s/{replica}": json.dumps(dict(record)).encode()}, self._seconds)
        self._blobs.add({keys.REPLICAS: [replica]}, self._seconds)

    def reports(self) -> dict[str, dict[str, Any]]:
        """The counters that replicas stored in the last 30 days, by replica."""
        recent = {
            replica: when
            for replica, when in self._blobs.members(keys.REPLICAS, self._seconds).items()
            if when > time.time() - _FORGOTTEN
        }
        found = self._blobs.get([f"{ROOT}s/{replica}" for replica in recent], self._seconds)
        return {
            replica: json.loads(raw) | {"reported": when}
            for (replica, when), raw in zip(recent.items(), found, strict=True)
            if raw is not None
        }

    def _lay_out(self) -> None:
        """Check the service's layout, and write it, once."""
        if not self._laid_out:
            self._tier.check()
            self._blobs.put({LAYOUT_KEY: layout_of(self._tier.key)}, self._seconds)
            self._laid_out = True


def began_of(tag: bytes) -> bytes:
    """Return the tag that notes the beginning of a purge of a salt. To earlier versions it is the tag of an unused
    salt."""
    return digest("keepwarm purge began 1", tag)


def _memberships(heads: Iterable[Head]) -> dict[str, list[str]]:
    """Return the members of these runs in the sets of marks and tags, by set."""
    groups: dict[str, list[str]] = {}
    for head in heads:
        groups.setdefault(keys.RUNS, []).append(str(head.mark))
        for salt in {salt for block in head.header.blocks for salt in block.salts}:
            groups.setdefault(keys.tagged(salt.hex() or _UNKNOWN), []).append(head.mark.run_id)
    return groups
