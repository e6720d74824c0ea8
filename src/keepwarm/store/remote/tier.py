"""A remote tier: runs in a service that many replicas share, found, loaded and verified like those on disk.
`store.remote.keys` describes the keys.

A lookup costs two round trips, whatever the number of blocks: one for where the blocks are, one for the heads of their
runs, which are small and cached. If a service can read only few keys at a time, the end of the chain is searched for. A
child is never stored without its parent, except when the service itself evicted the parent; so the found chain is then
checked from its beginning. No found data is trusted: heads carry checksums, names and token ids, and KV is verified as
it arrives. See docs/decisions/0042-remote-tiers.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.errors import CorruptRun, RemoteUnavailable, StoreLocked, StoreTooNew
from keepwarm.store.health import Health
from keepwarm.store.remote.backend import Blobs, remaining
from keepwarm.store.remote.circuit_breaker import Breaker
from keepwarm.store.remote.heads import Head, Whereabouts, places_in, probes
from keepwarm.store.remote.layout import ROOT, check_layout
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.reader import RemoteReader, load_blocks, try_body
from keepwarm.store.runfile.attended import takes_all
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import RunHeader
from keepwarm.store.runfile.layout import Run
from keepwarm.store.runfile.source import Gone
from keepwarm.store.threads import Threads

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_HEADS = 1024  # that are cached
_LIES = 3  # runs that fail verification in a row before the service counts as broken
_REFUSED = 1 << 16


class RemoteTier:
    """Finds and loads runs in one service; `store.remote.write_behind` writes them. Safe for use from several threads.

    A failure of the service costs one bounded wait. Then the breaker opens, every lookup answers "not there" at once,
    and a background thread tests the service until it works again.
    """

    def __init__(
        self,
        blobs: Blobs,
        *,
        limits: Limits | None = None,
        health: Health | None = None,
        key: StoreKey | None = None,
        coding: Coding | None = None,
    ) -> None:
        self.blobs = blobs
        self.name = blobs.name
        self.limits = limits or Limits()
        self.health = health or Health()
        self.key = key
        self.coding = coding
        self.breaker = Breaker()
        self.refused = ""  # why this store cannot be used at all
        self.on_failure: Callable[[], None] = lambda: None  # called after each failure
        self.on_doubt: Callable[[str], None] = lambda run_id: None  # called for a run that is damaged or incomplete
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self._by_prefix: dict[bytes, set[tuple[str, int]]] = {}  # blocks of the cached heads
        self._bad: set[str] = set()
        self._lock = threading.RLock()  # for the cached heads
        self._used: dict[str, float] = {}
        self._lies = 0
        self._stalled: tuple[str, int] | None = None  # the body whose reading timed out last
        self._asking = Threads(4, thread_name_prefix=f"keepwarm-{self.name}")
        self._loading = Threads(blobs.threads, thread_name_prefix=f"keepwarm-{self.name}-load")
        self.seconds_per_byte: float | None = None  # of the last loads, as a moving mean

    @property
    def working(self) -> bool:
        """Whether the service may be asked."""
        return self.breaker.closed and not self.refused

    def close(self) -> None:
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._loading.shutdown(wait=False, cancel_futures=True)
        self.blobs.close()

    # Finding

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """Return the blocks that are stored; none when the service fails."""

        return self._answering(lambda deadline: self._find(ids, deadline), {}) if ids else {}

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """Return the longest leading part of a chain that is stored; nothing when the service fails."""
        return self._answering(lambda deadline: self._chain(ids, deadline), ()) if ids else ()

    def children(self, prefix: bytes) -> tuple[BlockRef, ...]:
        """Stored blocks whose left context has this prefix name; none when the service fails.

        Inside a run whose head is cached, its blocks are the answer, without a round trip. So a walk along a prompt
        costs one round trip per run, not one per block.
        """
        with self._lock:
            known = sorted(self._by_prefix.get(prefix, ()))
            found = [self._heads[run_id].ref(ordinal, self.name) for run_id, ordinal in known]
        if found:
            return tuple({ref.id: ref for ref in found}.values())

        def ask(deadline: float) -> tuple[BlockRef, ...]:
            members = self.blobs.members(f"{ROOT}p/{prefix.hex()}", remaining(deadline, self.name))
            places = [(run_id, int(ordinal)) for run_id, _, ordinal in (each.partition(".") for each in members)]
            heads = self._heads_of([run_id for run_id, _ in places], deadline)
            found = [
                head.ref(ordinal, self.name)
                for run_id, ordinal in places
                if (head := heads.get(run_id)) and head.header.blocks[ordinal].parent_prefix == prefix
            ]
            return tuple({ref.id: ref for ref in found}.values())

        return self._answering(ask, ())

    def find_now(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """Find as `find` does, but within the time limit of a write. Raises RemoteUnavailable."""
        return self._find(ids, time.monotonic() + self.limits.write_timeout) if ids else {}

    def where_now(self, ids: Sequence[bytes]) -> dict[bytes, Whereabouts]:
        """Return the stored whereabouts of blocks, even of runs that are not usable. Raises RemoteUnavailable."""
        return self._where(ids, time.monotonic() + self.limits.write_timeout, usable=False)

    def header(self, run_id: str) -> RunHeader:
        """A run's verified header. Raises CorruptRun, also when it is gone or the service fails."""
        if (head := self._heads.get(run_id)) is None:
            try:
                head = self.bounded(lambda deadline: self._heads_of([run_id], deadline).get(run_id))
            except Exception as error:
                failure = self.broke(error)
                raise CorruptRun(f"run {run_id}: {failure}") from failure
        if head is None:
            raise CorruptRun(f"run {run_id}: it is gone from {self.name}") from Gone()
        return head.header

    def _chain(self, ids: Sequence[bytes], deadline: float) -> tuple[BlockRef, ...]:
        where: dict[bytes, Whereabouts] = {}
        known, limit = 0, len(ids)
        while known < limit:
            places = probes(known, limit, self.blobs.fanout)
            found = self._where([ids[at] for at in places], deadline)
            where |= found
            reached = [at for at in places if ids[at] in found]
            known = max([known, *(at + 1 for at in reached)])
            limit = min([limit, *(at for at in places if at >= known)])
        if not where:
            return ()
        heads = self._heads_of([*(place.run_id for place in where.values()), *where[ids[known - 1]].above], deadline)
        held = places_in(heads)
        refs: list[BlockRef] = []
        for block_id in ids[:known]:
            if block_id not in held and block_id not in where:  # its run is not among those above: a run was replaced
                found = self._where([block_id], deadline)
                where |= found
                held |= places_in(self._heads_of([place.run_id for place in found.values()], deadline))
            if block_id not in held:
                break
            head, ordinal = held[block_id]
            refs.append(head.ref(ordinal, self.name))
        return tuple(refs)

    def _find(self, ids: Sequence[bytes], deadline: float) -> dict[bytes, BlockRef]:
        places = places_in(self._heads_of([place.run_id for place in self._where(ids, deadline).values()], deadline))
        found = {block_id: places[block_id] for block_id in ids if block_id in places}
        return {block_id: head.ref(ordinal, self.name) for block_id, (head, ordinal) in found.items()}

    def _where(self, ids: Sequence[bytes], deadline: float, *, usable: bool = True) -> dict[bytes, Whereabouts]:
        keys = [f"{ROOT}b/{block_id.hex()}" for block_id in ids]
        values = self.blobs.get(keys, remaining(deadline, self.name))
        found = {block_id: Whereabouts.decode(value) for block_id, value in zip(ids, values, strict=True)}
        return {
            block_id: place
            for block_id, place in found.items()
            if place is not None and not (usable and place.run_id in self._bad)
        }

    def _heads_of(self, run_ids: Iterable[str], deadline: float) -> dict[str, Head]:
        """Return heads by run id, without those that are gone, damaged or of another version."""
        wanted = [run_id for run_id in dict.fromkeys(run_ids) if run_id not in self._bad]
        missing = [run_id for run_id in wanted if run_id not in self._heads]
        if missing:
            raw = self.blobs.get([f"{ROOT}r/{run_id}/head" for run_id in missing], remaining(deadline, self.name))
            for run_id, value in zip(missing, raw, strict=True):
                if value is not None and (head := self._parse(run_id, value)) is not None:
                    self._remember(head)
        found: dict[str, Head] = {}
        with self._lock:
            for run_id in wanted:
                if (head := self._heads.get(run_id)) is not None:
                    self._heads.move_to_end(run_id)
                    found[run_id] = head
        return found

    def _parse(self, run_id: str, raw: bytes) -> Head | None:
        """Parse a head. If it cannot be used, return None, and count and log that."""
        try:
            return Head.parse(run_id, raw, self.key)
        except (StoreTooNew, StoreLocked) as error:
            self.health.count("foreign_runs")
            self.health.once(f"reading runs of {self.name}", f"{error}; they count as not stored")
            self._refuse(run_id)
        except CorruptRun as error:
            self.quarantine(run_id, CorruptRun(f"run {run_id}: its head: {error}"))
        return None

    def _remember(self, head: Head) -> None:
        with self._lock:
            self._heads[head.mark.run_id] = head
            for block in head.header.blocks:
                self._by_prefix.setdefault(block.parent_prefix, set()).add((head.mark.run_id, block.ordinal))
            while len(self._heads) > _HEADS:
                self.forget(next(iter(self._heads)))

    def forget(self, run_id: str) -> None:
        """Drop a run's cached head."""
        with self._lock:
            head = self._heads.pop(run_id, None)
            for block in () if head is None else head.header.blocks:
                group = self._by_prefix.get(block.parent_prefix, set())
                group.discard((run_id, block.ordinal))
                if not group:
                    self._by_prefix.pop(block.parent_prefix, None)

    # Loading

    def load(self, run_id: str, first: int, ids: Sequence[bytes], tokens: TokenIds, end: int, sink: KVSink) -> None:
        """Load as `DiskTier.load` does. Raises CorruptRun for any error, including a failure of the service."""
        whole = len(ids) == len(self.header(run_id).blocks) and takes_all(sink)
        self._reading(
            run_id, whole, lambda reader: load_blocks(reader, first, ids, tokens, end, sink, self._loading, self.coding)
        )

    def read_run(self, run_id: str) -> Run:
        """Read a whole run, verified. Raises CorruptRun as `load`."""
        return self._reading(run_id, True, RemoteReader.read_run)

    def is_sound(self, head: Head) -> bool:
        """Whether every byte of a run verifies now. Raises RemoteUnavailable."""
        header = head.header
        size, key = head.body_bytes, f"{ROOT}r/{head.mark.run_id}/body"
        body = self.blobs.body(key, size, self.limits.write_timeout, whole=True)
        try:
            RemoteReader(body, header).verify()
        except CorruptRun:
            return False
        return True

    def known(self, run_id: str) -> Head | None:
        """A run's head, if it is cached."""
        return self._heads.get(run_id)

    def _reading(self, run_id: str, whole: bool, read: Callable[[RemoteReader], _Result]) -> _Result:
        header = self.header(run_id)
        size = header.file_bytes - header.data_offset
        started = time.perf_counter()
        try:
            if not self.working:
                raise RemoteUnavailable(f"{self.name} does not work now")
            body = self.blobs.body(f"{ROOT}r/{run_id}/body", size, self.limits.load_timeout, whole=whole)
            reader = RemoteReader(body, header)
            result = read(reader)
        except RemoteUnavailable as error:
            self._stalled = (run_id, size)
            self.failed(error)
            raise CorruptRun(f"run {run_id}: {error}") from error
        except CorruptRun as error:
            raise CorruptRun(f"run {run_id}: {error}") from error
        self._lies = 0
        self.breaker.worked()
        if reader.read_bytes:
            rate = (time.perf_counter() - started) / reader.read_bytes
            self.seconds_per_byte = rate if self.seconds_per_byte is None else 0.7 * self.seconds_per_byte + 0.3 * rate
        self._used[run_id] = time.time()
        return result

    def quarantine(self, run_id: str, error: CorruptRun) -> bool:
        """Take a run that failed verification out of use here. It is removed for all replicas only if it fails again
        when it is read again (`on_doubt`). Return False when the run was gone or the service failed. Never raises."""
        if isinstance(error.__cause__, RemoteUnavailable):
            return False
        self._refuse(run_id)
        if isinstance(error.__cause__, Gone):
            self.on_doubt(run_id)
            return False
        self.health.count("corrupt")
        log.warning("%s (%s); not used any more, its blocks will be computed again", error, self.name)
        self._lies += 1
        if self._lies >= _LIES:
            self._lies = 0
            self.failed(RemoteUnavailable(f"{self.name} gave {_LIES} damaged runs one after another"))
        self.on_doubt(run_id)
        return True

    def _refuse(self, run_id: str) -> None:
        if len(self._bad) >= _REFUSED:
            self._bad.clear()
        self._bad.add(run_id)
        self.forget(run_id)

    def touch(self, run_ids: Iterable[str]) -> None:
        """Note that runs were used now; the next `Books.merge` writes that."""
        now = time.time()
        self._used.update((run_id, now) for run_id in run_ids)

    def used(self) -> dict[str, float]:
        """Return the runs used since the last call, with the times of their last use."""
        used, self._used = self._used, {}
        return used

    # The service

    def bounded(self, ask: Callable[[float], _Result], what: str = "asking") -> _Result:
        """Call `ask` with its deadline, and wait at most the time-out for its answer. Raises RemoteUnavailable."""
        seconds = self.limits.timeout
        try:
            future = self._asking.submit(ask, time.monotonic() + seconds)
        except RuntimeError as error:
            raise RemoteUnavailable(f"{self.name}: it was closed") from error
        try:
            return future.result(seconds)
        except FutureTimeout:
            future.cancel()
            raise RemoteUnavailable(f"{self.name} did not answer within {seconds} s ({what})") from None

    def _answering(self, ask: Callable[[float], _Result], otherwise: _Result) -> _Result:
        if not self.working:
            return otherwise
        try:
            answer = self.bounded(ask)
        except (CorruptRun, ValueError, IndexError) as error:
            self.health.failed(f"asking {self.name}", error)
            return otherwise
        except Exception as error:
            self.broke(error)
            return otherwise
        self.breaker.worked()
        return answer

    def broke(self, error: Exception) -> RemoteUnavailable:
        """Note any error of the service's client as a failure of the service."""
        if not isinstance(error, RemoteUnavailable):
            error = RemoteUnavailable(f"{self.name}: {type(error).__name__}: {error}")
        self.failed(error)
        return error

    def failed(self, error: RemoteUnavailable) -> None:
        """Note a failure: the service is not asked again until a test shows that it works."""
        if self.breaker.failed():
            self.health.count("remote_failures")
            self.health.count("store_errors")
            log.warning("%s (%s); requests go on without it until it works again", error, self.blobs.label)
        self.on_failure()

    def probe(self) -> bool:
        """Test a service that failed, if a test is due. Return whether it works again. Called in the background."""
        if self.refused or self.breaker.closed or not self.breaker.probe(self._test):
            return False
        self._stalled = None
        log.warning("%s works again (%s)", self.name, self.blobs.label)
        return True

    def _test(self) -> None:
        self.blobs.ping(self.limits.timeout)
        self.check()
        if self._stalled is not None:  # a ping is not enough: the kind of request that failed must work
            try_body(self.blobs, *self._stalled, self.limits)

    def check(self) -> None:
        """Compare what the service holds with what this version and key can use. Sets `refused` when they differ.

        Raises RemoteUnavailable, StoreTooNew and StoreLocked.
        """
        try:
            check_layout(self.blobs, self.key, self.limits.timeout)
        except (StoreTooNew, StoreLocked) as error:
            self.refused = str(error)
            self.health.once(f"using {self.name}", str(error))
            raise

    def stats(self) -> dict[str, Any]:
        """State and measurements, JSON-ready."""
        return {
            "where": self.blobs.label,
            "state": "refused" if self.refused else "working" if self.breaker.closed else "failing",
            "failures": self.breaker.opened,
            "bytes_per_second": None if self.seconds_per_byte is None else round(1 / self.seconds_per_byte),
        }
