"""What requests ask of the disk tier: which blocks are there, and their KV. Every answer comes in bounded time."""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

import numpy as np

from keepwarm.core.blocks import Block, TokenIds, lead
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.errors import CorruptRun, StoreLocked, StoreStalled, StoreTooNew
from keepwarm.store.catalog.index import Index, RunRow
from keepwarm.store.catalog.ranking import depart
from keepwarm.store.catalog.reservations import doom, family
from keepwarm.store.disk.mmap import map_run
from keepwarm.store.disk.prefetch import Fetch
from keepwarm.store.disk.recovery import NO_FAULT_OF_THE_FILE, quarantine_file, run_file, unlink_rows
from keepwarm.store.disk.timeouts import BoundedCalls
from keepwarm.store.health import Health
from keepwarm.store.retention import CORRUPT
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import KnownHeaders, RunHeader
from keepwarm.store.runfile.layout import Run, StoredBlock, check_geometry
from keepwarm.store.runfile.reader import RunReader, as_corrupt

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_HEADERS = 8 << 20  # bytes of memory for headers that were read before
_REFUSED_SECONDS = 2.0  # after an error that is no fault of the file


class DiskReads:
    """The reading half of `store.disk.tier.DiskTier`. Safe for use from several threads."""

    def __init__(
        self,
        folder: Path,
        index: Index,
        health: Health,
        key: StoreKey | None,
        bounded: BoundedCalls,
        coding: Coding | None = None,
        map_files: bool = False,
    ) -> None:
        self.folder = folder
        self.index = index
        self.health = health
        self.key = key  # of an encrypted store
        self.bounded = bounded
        self.coding = coding
        self.map_files = map_files
        self._merged: dict[str, str] = {}  # runs that became part of another one here, which RAM may hold still
        self._headers = KnownHeaders(_HEADERS)
        self._refused: dict[str, float] = {}  # runs that failed here, should their rows outlive them; until when

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """The stored ones of some blocks; none when the catalogue fails."""
        nothing: dict[bytes, BlockRef] = {}
        found = self._asked(lambda: self.index.find(ids), nothing)
        return {key: ref for key, ref in found.items() if not self._is_refused(ref.run_id)}

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """The longest leading part of a chain that is stored; nothing when the catalogue fails."""
        nothing: list[BlockRef] = []
        found = self._asked(lambda: self.index.chain(ids), nothing)
        if self._refused:
            found = list(takewhile(lambda ref: not self._is_refused(ref.run_id), found))
        return tuple(found)

    def children(self, prefix: bytes, most: int | None = None) -> tuple[BlockRef, ...]:
        """Stored blocks whose left context has this prefix name, no more than `most`; none when the catalogue fails."""
        nothing: tuple[BlockRef, ...] = ()
        found = self._asked(lambda: self.index.children(prefix, most), nothing)
        return tuple(ref for ref in found if not self._is_refused(ref.run_id))

    def beside(self, block: Block) -> list[tuple[bytes, BlockRef]]:
        """See `RamTier.beside`; none when the catalogue fails."""
        nothing: list[tuple[bytes, BlockRef]] = []
        wanted = lead(block.tokens, block.salts)
        if self.key is None:
            found = self._asked(lambda: self.index.beside(block.parent_exact, wanted), nothing)
        else:  # the catalogue of an encrypted store tells no token ids: a few headers are opened
            refs: list[BlockRef] = []
            refs = self._asked(lambda: self.index.unsorted(block.parent_exact), refs)
            told = ((self.token_ids(ref), ref) for ref in refs)
            found = [(lead(tokens, block.salts), ref) for tokens, ref in told if tokens is not None]
        return [(each, ref) for each, ref in found if not self._is_refused(ref.run_id)]

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids a block was computed for; None when it is gone or unreadable."""
        try:
            header = self.header(ref.run_id)
        except StoreStalled:
            return None
        except CorruptRun as error:
            self.quarantine(ref.run_id, error)
            return None
        return header.tokens[ref.start - header.start : ref.end - header.start]

    def _is_refused(self, run_id: str) -> bool:
        return time.monotonic() < self._refused.get(run_id, 0.0)

    def sight(self, ids: Sequence[bytes], check: Callable[[], None] = lambda: None) -> set[bytes]:
        """Those of some blocks that any process saw before, and now has seen; none when the catalogue fails. Raises
        what `check` does."""
        try:
            return self.index.sight(ids, check) if ids else set()
        except sqlite3.Error as error:
            self.health.failed("noting what was seen", error)
            return set()

    def path(self, run_id: str) -> Path:
        return self.folder / run_file(run_id)

    def touch(self, run_ids: Iterable[str]) -> None:
        """Note that runs were used now, here or in RAM, one after another."""
        self.index.touch(self._now_in(run_id) for run_id in run_ids)

    def _now_in(self, run_id: str) -> str:
        while run_id in self._merged:
            run_id = self._merged[run_id]
        return run_id

    # Loading

    def load(self, run_id: str, first: int, ids: Sequence[bytes], tokens: TokenIds, end: int, sink: KVSink) -> None:
        """Bring the blocks `ids`, from ordinal `first` on and up to position `end`, straight into the sink: now, or, if
        the sink defers it, each layer when it is used.

        `tokens` are the expected ids from the first block's start to `end`. Every layer is committed, in order and in
        the sink's thread, after its bytes are verified. Raises CorruptRun, after the run was taken out of use, for
        anything amiss: wrong bytes, token ids or blocks, a short or missing file; and StoreStalled.
        """

        try:
            reader = self.bounded.call(lambda: self._reading(run_id))
            try:
                blocks = _taken(reader.header, first, ids, tokens, end)
                if self.coding is not None:  # blocks are decoded as a whole
                    sink = self.coding.sink(sink, reader.header.geometry, blocks, end)
                    end = blocks[-1].end
                check_geometry(reader.header.geometry, sink.geometry)
                if self._in_place(reader, blocks, end, sink):
                    return
                fetch = Fetch(reader, blocks, end, sink, self.bounded, lambda error: self._refuse(run_id, error))
            except CorruptRun as error:
                reader.close()
                raise reader.corrupt(error) from error
        except CorruptRun as error:
            self._refuse(run_id, error)
            raise
        if not sink.defer(fetch):
            for layer in range(fetch.layers):
                fetch.ready(layer)

    def _in_place(self, reader: RunReader, blocks: Sequence[StoredBlock], end: int, sink: KVSink) -> bool:
        """Have the sink attend to the file itself, if that is wanted and possible."""
        if not self.map_files or self.coding is not None or reader.header.cipher is not None:
            return False
        run = map_run(reader, blocks, end, sink, lambda error: self._refuse(reader.header.run_id, error))
        if run is None:
            return False
        reader.close()
        run.fill()
        if not sink.defer(run):
            run.ready(len(reader.header.geometry.layers) - 1)
        return True

    def forget_headers(self) -> None:
        """Forget the headers of files that were read, and the token ids in them."""
        self._headers.clear()

    def header(self, run_id: str) -> RunHeader:
        """A run's verified header. Raises CorruptRun, also for a missing file, and StoreStalled."""

        def read() -> RunHeader:
            with self._reading(run_id) as reader:
                return reader.header

        return self.bounded.call(read)

    def headers(self, run_ids: Sequence[str]) -> dict[str, RunHeader]:
        """Verified headers of some runs, in one bounded wait; without those that are damaged, whose runs are taken out
        of use."""
        found: dict[str, RunHeader] = {}
        damaged: dict[str, CorruptRun] = {}

        def read() -> None:
            for run_id in run_ids:
                try:
                    with self._reading(run_id) as reader:
                        found[run_id] = reader.header
                except CorruptRun as error:
                    damaged[run_id] = error

        try:
            self.bounded.call(read)
        except StoreStalled:
            return {}
        for run_id, error in damaged.items():
            self.quarantine(run_id, error)
        return found

    def read_run(self, run_id: str) -> Run:
        """A whole run, verified. Raises CorruptRun, also for a missing file. Waits as long as it takes."""
        with self._reading(run_id) as reader:
            try:
                return reader.read_run()
            except (CorruptRun, OSError) as error:
                raise reader.corrupt(error) from error

    def _reading(self, run_id: str) -> RunReader:
        try:
            return RunReader.open(self.path(run_id), run_id, self.key, self._headers)
        except (CorruptRun, StoreTooNew, StoreLocked, OSError) as error:
            raise as_corrupt(run_id, error) from error

    def _refuse(self, run_id: str, error: CorruptRun) -> None:
        if isinstance(error, StoreStalled):
            self.health.failed("reading a run", error)
        else:
            self.quarantine(run_id, error)

    def _asked(self, ask: Callable[[], _Result], otherwise: _Result) -> _Result:
        """What the catalogue answers, in bounded time; `otherwise` when it fails."""
        try:
            found = self.bounded.call(ask)
        except (sqlite3.Error, StoreStalled) as error:
            self.health.failed("looking up blocks on disk", error)
            return otherwise
        self.health.worked("looking up blocks on disk")
        return found

    def quarantine(self, run_id: str, error: CorruptRun) -> bool:
        """Take a run that failed verification out of use: its file is moved aside (and given up first when space is
        needed), its rows are deleted, and what continues it, which nobody can reach now, is given up. Never raises.

        False when the run had only been evicted meanwhile, or when the failure was not the file's.
        """
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in NO_FAULT_OF_THE_FILE:
            # For a while, or a request could ask for ever; not for good, or it would be written again and again.
            self._refused[run_id] = max(self._refused.get(run_id, 0.0), time.monotonic() + _REFUSED_SECONDS)
            self.health.failed("reading a run", cause)
            return False
        self._refused[run_id] = math.inf
        try:
            with self.index.transaction() as db:
                if db.execute("SELECT 1 FROM runs WHERE id = ? AND state = 'live'", [run_id]).fetchone() is None:
                    return False
                depart(db, family(db, [run_id]), CORRUPT)
                orphans = doom(db, [each for each in family(db, [run_id]) if each != run_id])
                db.execute("DELETE FROM blocks WHERE run = ?", [run_id])
                db.execute("DELETE FROM layouts WHERE run = ?", [run_id])
                db.execute("DELETE FROM edges WHERE child = ?", [run_id])
                try:
                    self.path(run_id).rename(self.folder / quarantine_file(run_id))
                    db.execute(
                        "UPDATE runs SET state = 'quarantined', queue = 0, file = ? WHERE id = ?",
                        [quarantine_file(run_id), run_id],
                    )
                except FileNotFoundError:
                    db.execute("DELETE FROM runs WHERE id = ?", [run_id])
            self._unlink_rows(orphans)
        except (OSError, sqlite3.Error) as failure:
            self.health.failed("quarantining a run", failure)
        self.health.count("corrupt")
        log.warning("%s; quarantined, its blocks will be computed again", error)
        return True

    def _unlink_rows(self, rows: Sequence[RunRow]) -> None:
        if rows:
            unlink_rows(self.folder, rows)
            self.index.unlinked(row.id for row in rows)


def _taken(header: RunHeader, first: int, ids: Sequence[bytes], tokens: TokenIds, end: int) -> tuple[StoredBlock, ...]:
    """The blocks that a load takes. Raises CorruptRun when the file has others, or other token ids."""
    blocks = header.blocks[first : first + len(ids)]
    if not blocks or [block.id for block in blocks] != list(ids):
        raise CorruptRun("the file holds other blocks")
    start = blocks[0].start
    if not blocks[-1].start < end <= blocks[-1].end:
        raise CorruptRun(f"position {end} is not in the block [{blocks[-1].start}, {blocks[-1].end})")
    if not np.array_equal(header.tokens[start - header.start : end - header.start], tokens):
        raise CorruptRun("token ids differ from the prompt's")
    return blocks
