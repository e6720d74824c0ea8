"""The archive: the RAM tier over the disk tier. Finds, loads and stores blocks; no failure of it reaches a request."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from keepwarm.core.blocks import Block, TokenIds
from keepwarm.core.identity import Namespace
from keepwarm.core.ports import BlockRef, KVSink, KVSource
from keepwarm.core.results import Entry
from keepwarm.errors import CorruptRun, StoreError
from keepwarm.store import listing
from keepwarm.store.disk import DiskTier
from keepwarm.store.format import Run, StoredBlock
from keepwarm.store.health import Health, logger
from keepwarm.store.index import namespace_digest
from keepwarm.store.memory import RamTier
from keepwarm.store.storing import Storing
from keepwarm.store.writer import Writer

_Result = TypeVar("_Result")
LOAD_THREADS = 2  # more gain nothing: two already saturate memory, and decoding needs the other cores
MAX_PENDING = 8  # jobs; each may hold a sequence's pages until it is copied


@dataclass
class _Piece:
    """Consecutive blocks of one run that a load takes. `run` is set when it comes from RAM."""

    run_id: str
    run: Run | None
    first: int  # ordinal
    refs: list[BlockRef]


class Archive:
    """KV blocks in RAM and, if a folder is given, on disk. Implements `core.ports.BlockIndex`.

    Safe for use from several threads. One background thread writes; open an archive after forking, not before.
    """

    def __init__(self, ram: RamTier, disk: DiskTier | None, health: Health, executor: ThreadPoolExecutor) -> None:
        self._ram = ram
        self._disk = disk
        self._health = health
        self._executor = executor
        self._storing = Storing(ram, disk, health)
        self._names: dict[str, bytes] = {}  # of an archive without a disk tier
        self._writer = Writer(MAX_PENDING, self._merge)
        self._closed = False

    @classmethod
    def open(cls, path: Path | None, *, max_ram: int, max_disk: int) -> Archive:
        """Open or create. Caps are bytes; `path` None keeps KV in this process only.

        Raises StoreNotWritable, StoreUnusable, StoreTooNew and StoreFull.
        """
        health = Health()
        executor = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="keepwarm-load")
        try:
            disk = None if path is None else DiskTier.open(path, max_disk, executor=executor, health=health)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        if disk is not None:
            health.also = disk.index.count
        return cls(RamTier(max_ram), disk, health, executor)

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # core.ports.BlockIndex

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """The longest leading part of `ids` that is stored, each block in its fastest tier. Writes nothing."""
        found = {block_id: ref for block_id in ids if (ref := self._ram.ref(block_id)) is not None}
        missing = [block_id for block_id in ids if block_id not in found]
        if missing and self._disk is not None:
            found.update(self._disk.find(missing))
        refs: list[BlockRef] = []
        for block_id in ids:
            if block_id not in found:
                break
            refs.append(found[block_id])
        return tuple(refs)

    def children(self, prefix: bytes) -> tuple[BlockRef, ...]:
        """Stored blocks whose left context has this prefix name, each in its fastest tier. Writes nothing."""
        found = {ref.id: ref for ref in self._ram.children(prefix)}
        if self._disk is not None:
            for ref in self._disk.children(prefix):
                found.setdefault(ref.id, ref)
        return tuple(found.values())

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids a block was computed for; None when it is gone or unreadable."""
        held = self._ram.find(ref.id)
        if held is not None:
            run, block = held
            return run.tokens[block.start - run.start : block.end - run.start]
        if self._disk is None or ref.tier != DiskTier.name:
            return None
        try:
            header = self._disk.header(ref.run_id)
        except CorruptRun as error:
            self._disk.quarantine(ref.run_id, error)
            return None
        return header.tokens[ref.start - header.start : ref.end - header.start]

    # Loading

    def load(self, refs: Sequence[BlockRef], tokens: TokenIds, end: int, sink: KVSink) -> dict[str, int]:
        """Bring positions `[refs[0].start, end)` into the sink, verified; returns tokens by tier.

        `refs` are consecutive and `end` lies in the last one; `tokens` are the expected ids of exactly that range. The
        sink's methods are called from this thread only. Raises CorruptRun, after the damaged run was taken out of use,
        also when a run was evicted since it was looked up: look up again, and what is left is found. The sink may
        then hold unverified bytes. Raises ValueError when the arguments do not fit each other.
        """
        _check_range(refs, tokens, end)
        start = refs[0].start
        taken: Counter[str] = Counter()
        pieces = self._pieces(refs)
        for piece in pieces:
            first, last = piece.refs[0].start, min(piece.refs[-1].end, end)
            expected = tokens[first - start : last - start]
            if piece.run is not None:
                self._load_ram(piece, expected, last, sink)
            else:
                self._load_disk(piece, expected, last, sink)
            taken[RamTier.name if piece.run is not None else DiskTier.name] += last - first
        if self._disk is not None:
            self._disk.index.touch(piece.run_id for piece in pieces)
        return dict(taken)

    def promote(self, run_ids: Iterable[str]) -> None:
        """Read runs from disk into RAM, verified, in the background. Dropped when the writer is busy."""
        wanted = [run_id for run_id in dict.fromkeys(run_ids) if self._ram.get(run_id) is None]
        if wanted and self._disk is not None and self._ram.cap > 0:
            self._writer.submit(lambda: self._promote(wanted))

    def clear_ram(self) -> None:
        """Give up everything in RAM; what is on disk stays. For measuring, and to hand memory back."""
        for run in self._ram.runs():
            self._ram.remove(run.id)

    def _pieces(self, refs: Sequence[BlockRef]) -> list[_Piece]:
        """Group refs by run, from where each block is now: it may have entered or left RAM since it was looked up."""
        lost = [ref.id for ref in refs if ref.tier != DiskTier.name and self._ram.find(ref.id) is None]
        moved = self._disk.find(lost) if lost and self._disk is not None else {}
        pieces: list[_Piece] = []
        for ref in refs:
            held = self._ram.find(ref.id)
            run: Run | None = None
            if held is not None:
                run, run_id, ordinal = held[0], held[0].id, held[1].ordinal
            elif ref.tier == DiskTier.name:
                run_id, ordinal = ref.run_id, ref.ordinal
            elif ref.id in moved:
                run_id, ordinal = moved[ref.id].run_id, moved[ref.id].ordinal
            else:
                raise CorruptRun(f"run {ref.run_id}: evicted since it was looked up")
            last = pieces[-1] if pieces else None
            if last is not None and (last.run_id, last.run, last.first + len(last.refs)) == (run_id, run, ordinal):
                last.refs.append(ref)
            else:
                pieces.append(_Piece(run_id, run, ordinal, [ref]))
        return pieces

    def _load_ram(self, piece: _Piece, tokens: TokenIds, end: int, sink: KVSink) -> None:
        assert piece.run is not None
        try:
            self._ram.load(piece.run, piece.first, piece.first + len(piece.refs) - 1, tokens, end, sink)
        except CorruptRun as error:
            self._ram.remove(piece.run_id)
            self._health.count("corrupt")
            logger.warning("%s; dropped from RAM", error)
            raise

    def _load_disk(self, piece: _Piece, tokens: TokenIds, end: int, sink: KVSink) -> None:
        assert self._disk is not None
        try:
            self._disk.load(piece.run_id, piece.first, [ref.id for ref in piece.refs], tokens, end, sink)
        except CorruptRun as error:
            self._disk.quarantine(piece.run_id, error)
            raise

    def _promote(self, run_ids: Sequence[str]) -> None:
        assert self._disk is not None
        for run_id in run_ids:
            if self._ram.get(run_id) is not None:
                continue
            try:
                row = self._disk.index.run(run_id)
                # Room first, so that the cap holds while the bytes arrive.
                if row is not None and self._ram.make_room(row.nbytes, row.parent):
                    self._ram.put(self._disk.read_run(run_id))
            except CorruptRun as error:
                self._disk.quarantine(run_id, error)
            except sqlite3.Error as error:
                self._health.failed("promoting a run", error)

    # Storing

    def put(
        self,
        source: KVSource,
        blocks: Sequence[Block],
        namespace: Namespace,
        ids: Sequence[bytes] | None = None,
        on_copied: Callable[[], None] | None = None,
        *,
        parent: bytes | None = None,
    ) -> None:
        """Store consecutive blocks in the background; returns at once and never raises for a store's failure.

        `ids` are the blocks' names where they are not the exact ones (derived blocks); `parent` is then the id of the
        block before the first, if that is not its exact parent. `source` must stay readable until `on_copied` is
        called: always once, from the writer's thread, or from this one when the write is dropped because 8 are
        pending. Blocks that are stored already are skipped.
        """

        taken = tuple(blocks)
        names = None if ids is None else tuple(ids)

        def job() -> None:
            self._storing.store(source, taken, namespace, names, parent, on_copied)

        if not taken:
            self._storing.notify(on_copied)
        elif not self._writer.submit(job):
            self._health.dropped("queueing a write", "too many are pending, or the archive is closed")
            self._storing.notify(on_copied)

    def _merge(self) -> None:
        if self._disk is not None:
            try:
                self._disk.index.merge()
            except sqlite3.Error as error:
                self._health.failed("merging access times", error)

    def flush(self) -> None:
        """Wait until everything put so far is durable (or given up, see `stats`); merge access times and counters."""
        self._writer.flush()
        self._merge()

    def close(self) -> None:
        """Flush and stop. Later puts are dropped; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        if self._disk is not None:
            self._disk.close()
        self._executor.shutdown()

    # Asking

    def name(self, name: str, leaf_id: bytes) -> None:
        """Name the prompt that ends with a block; a name in use is moved. Failures are counted, not raised."""
        self._names[name] = leaf_id
        if self._disk is not None:
            try:
                self._disk.index.set_name(name, leaf_id)
            except sqlite3.Error as error:
                self._health.failed("naming a run", error)

    def names(self) -> dict[str, bytes]:
        """Leaf block ids by name."""
        if self._disk is None:
            return dict(self._names)
        return self._asking(self._disk.index.names, self._names)

    def entries(self) -> list[Entry]:
        """One entry per stored run, the most recently used first. Empty when the catalogue fails."""
        return self._asking(lambda: listing.entries(self._ram, self._disk, self.names()), [])

    def show(self, wanted: str) -> dict[str, Any]:
        """One run in full, JSON-ready. `wanted`: a name, or at least 4 digits of a run or block id.

        Raises StoreError when nothing or more than one run fits, or the catalogue fails.
        """
        try:
            return listing.show(self._ram, self._disk, self.names(), wanted)
        except sqlite3.Error as error:
            raise StoreError(f"the catalogue cannot be read: {error}") from error

    def namespaces(self) -> dict[str, dict[str, Any]]:
        """Descriptions of every namespace that was stored, by hex digest."""
        found = {namespace_digest(run.namespace): dict(run.namespace) for run in self._ram.runs()}
        if self._disk is not None:
            nothing: dict[str, dict[str, Any]] = {}
            found |= self._asking(self._disk.index.namespaces, nothing)
        return found

    def find_content(self, content_id: bytes) -> list[dict[str, Any]]:
        """Stored blocks with these tokens, whatever came before them: `namespace` (description), `id`, `prefix`,
        `run_id`, `start`, `length`, `parent_exact`, `parent_prefix` (ids as bytes)."""
        found: list[dict[str, Any]] = []
        if (disk := self._disk) is not None:
            found = self._asking(lambda: disk.index.content(content_id), found)
        seen = {row["id"] for row in found}
        for run in self._ram.runs():
            for block in run.blocks:
                if block.content == content_id and block.id not in seen:
                    found.append(_content_row(run, block))
        return found

    def remove(self, run_id: str) -> int:
        """Remove a run and every run that continues it, from both tiers; returns how many there were.

        Raises StoreError when the disk tier refuses.
        """
        try:
            family = listing.descendants(self._ram, self._disk, run_id)
            gone = {row.id for row in self._disk.remove(family)} if self._disk is not None else set()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"run {run_id} cannot be removed: {error}") from error
        return len(gone | {member for member in family if self._ram.remove(member)})

    def size_on_disk(self) -> int:
        """Bytes of every file in the store's folder; 0 without one."""
        return 0 if self._disk is None else self._disk.size_on_disk()

    def counters(self) -> dict[str, int]:
        """Counters of all processes that ever used the store, as merged so far; of this one without a folder."""
        return {} if self._disk is None else self._asking(self._disk.index.counters, {})

    def count(self, name: str, delta: int = 1) -> None:
        """Add to a counter that is merged into the store's at the next flush."""
        if self._disk is not None:
            self._disk.index.count(name, delta)

    def stats(self) -> dict[str, Any]:
        """Sizes of the tiers now, and what happened in this process."""
        blocks, size = {RamTier.name: self._ram.block_count}, {RamTier.name: self._ram.nbytes}
        evictions = {RamTier.name: self._ram.evictions}
        if self._disk is not None:
            blocks[DiskTier.name], size[DiskTier.name] = self._asking(self._disk.index.totals, (0, 0))
            evictions[DiskTier.name] = self._health["evicted_disk"]
        return {
            "blocks": blocks,
            "bytes": size,
            "evictions": evictions,
            "corrupt": self._health["corrupt"],
            "dropped_writes": self._health["dropped_writes"],
            "store_errors": self._health["store_errors"],
        }

    def _asking(self, ask: Callable[[], _Result], otherwise: _Result) -> _Result:
        try:
            return ask()
        except sqlite3.Error as error:
            self._health.failed("asking the catalogue", error)
            return otherwise


def _check_range(refs: Sequence[BlockRef], tokens: TokenIds, end: int) -> None:
    if not refs or any(a.end != b.start for a, b in pairwise(refs)):
        raise ValueError("a load needs consecutive blocks")
    if not refs[-1].start < end <= refs[-1].end:
        raise ValueError(f"position {end} is not in the last block, [{refs[-1].start}, {refs[-1].end})")
    if len(tokens) != end - refs[0].start:
        raise ValueError(f"{len(tokens)} token ids for positions [{refs[0].start}, {end})")


def _content_row(run: Run, block: StoredBlock) -> dict[str, Any]:
    return {
        "id": block.id,
        "prefix": block.prefix,
        "run_id": run.id,
        "start": block.start,
        "length": block.length,
        "parent_exact": block.parent,
        "parent_prefix": block.parent_prefix,
        "namespace": dict(run.namespace),
    }
