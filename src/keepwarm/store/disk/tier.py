"""The disk tier: one immutable file per run, shared by all processes that use the folder."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from keepwarm.core.blocks import Block, TokenIds, lead
from keepwarm.core.ports import BlockRef, Bytes, KVSink
from keepwarm.errors import CorruptRun, PurgedMeanwhile, StoreError, StoreFull, StoreStalled
from keepwarm.store.admin.purge_epochs import Epochs
from keepwarm.store.catalog import ranking
from keepwarm.store.catalog.index import Index
from keepwarm.store.catalog.reservations import doom, family
from keepwarm.store.catalog.rows import BudgetSpent, Orphan, RunRow
from keepwarm.store.disk.recovery import NO_FAULT_OF_THE_FILE, SWEPT_AT_OPENING, open_folder, sweep
from keepwarm.store.disk.run_files import RunFiles
from keepwarm.store.disk.space import Space
from keepwarm.store.disk.timeouts import BoundedCalls
from keepwarm.store.health import Health
from keepwarm.store.retention import CORRUPT, Rules
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import RunHeader, file_bytes
from keepwarm.store.runfile.layout import Outline, Run

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_HEAL_SECONDS = 5.0
_MERGED_NOTED = 1 << 14
_REFUSED_SECONDS = 2.0  # after an error that is not the file's fault


class DiskTier:
    """Run files and their catalogue. Safe for use from several threads and processes."""

    name = "disk"

    def __init__(
        self,
        folder: Path,
        cap: int,
        index: Index,
        *,
        health: Health | None = None,
        key: StoreKey | None = None,
        rules: Rules | None = None,
        bounded: BoundedCalls | None = None,
        coding: Coding | None = None,
        map_files: bool = False,
    ) -> None:
        self.folder = folder
        self.index = index
        self.health = health or Health()
        self.rules = rules or Rules()
        self.epochs = Epochs(folder)
        self.files = RunFiles(folder, self.health, key, bounded or BoundedCalls(), coding, map_files)
        self.space = Space(folder, cap, index, self.rules, self.health, self.epochs)
        self._merged: dict[str, str] = {}  # runs that were merged into another one; RAM may still hold them
        self._refused: dict[str, float] = {}  # runs that failed here, and until when to refuse them if rows remain
        self._healing = threading.Lock()
        self._tried_healing = -_HEAL_SECONDS

    @classmethod
    def open(
        cls,
        folder: Path,
        cap: int,
        *,
        health: Health | None = None,
        clock: Callable[[], float] = time.time,
        key: StoreKey | None = None,
        rules: Rules | None = None,
        bounded: BoundedCalls | None = None,
        coding: Coding | None = None,
        map_files: bool = False,
    ) -> DiskTier:
        """Open or create a store. `cap` bounds all bytes in the folder, including the catalogue and quarantine; it is
        applied when something is stored, not here. `key` is the key of an encrypted store, and makes a new store
        encrypted. Calls that a request waits for go through `bounded`. With `map_files`, a request uses files in place
        if the page cache holds them (see `store.disk.mmap`).

        `rules`, if given, apply to the store from now on (see `ranking.choose_policy`). Raises StoreNotWritable,
        StoreUnusable, StoreTooNew, StoreLocked and StoreFull.
        """
        index = open_folder(folder, clock, key)
        if rules is not None and index.setting(ranking.POLICY) != rules.disk_policy:
            with index.database.transaction() as db:
                ranking.choose_policy(db, rules.disk_policy)
        return cls(
            folder, cap, index, health=health, key=key, rules=rules, bounded=bounded, coding=coding, map_files=map_files
        )

    def close(self) -> None:
        """Merge access times and counters, and close the catalogue."""
        try:
            self.index.database.merge()
        except sqlite3.Error as error:
            self.health.failed("closing the store", error)
        finally:
            self.index.database.close()
            self.epochs.close()

    # What is stored

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """Return the blocks that are stored; none when the catalogue fails."""
        nothing: dict[bytes, BlockRef] = {}
        found = self._asked(lambda: self.index.find(ids), nothing)
        return {key: ref for key, ref in found.items() if not self._is_refused(ref.run_id)}

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """Return the longest leading part of a chain that is stored; nothing when the catalogue fails."""
        nothing: list[BlockRef] = []
        found = self._asked(lambda: self.index.chain(ids), nothing)
        if self._refused:
            found = list(takewhile(lambda ref: not self._is_refused(ref.run_id), found))
        return tuple(found)

    def children(self, prefix: bytes, most: int | None = None) -> tuple[BlockRef, ...]:
        """Stored blocks whose left context has this prefix name, at most `most`; none when the catalogue fails."""
        nothing: tuple[BlockRef, ...] = ()
        found = self._asked(lambda: self.index.children(prefix, most), nothing)
        return tuple(ref for ref in found if not self._is_refused(ref.run_id))

    def beside(self, block: Block) -> list[tuple[bytes, BlockRef]]:
        """See `RamTier.beside`; none when the catalogue fails."""
        nothing: list[tuple[bytes, BlockRef]] = []
        wanted = lead(block.tokens, block.salts)
        if self.files.key is None:
            found = self._asked(lambda: self.index.beside(block.parent_exact, wanted), nothing)
        else:  # an encrypted store's catalogue holds no leads: open a few headers
            refs: list[BlockRef] = []
            refs = self._asked(lambda: self.index.unsorted(block.parent_exact), refs)
            told = ((self.token_ids(ref), ref) for ref in refs)
            found = [(lead(tokens, block.salts), ref) for tokens, ref in told if tokens is not None]
        return [(each, ref) for each, ref in found if not self._is_refused(ref.run_id)]

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids that a block was computed for; None when it is gone or unreadable."""
        try:
            header = self.files.header(ref.run_id)
        except StoreStalled:
            return None
        except CorruptRun as error:
            self.quarantine(ref.run_id, error)
            return None
        return header.tokens[ref.start - header.start : ref.end - header.start]

    def _is_refused(self, run_id: str) -> bool:
        return time.monotonic() < self._refused.get(run_id, 0.0)

    def sight(self, ids: Sequence[bytes], check: Callable[[], None] = lambda: None) -> set[bytes]:
        """Return the blocks that any process saw before, and note all of them as seen; none when the catalogue fails.
        Raises what `check` does."""
        try:
            return self.index.sight(ids, check) if ids else set()
        except sqlite3.Error as error:
            self.health.failed("noting what was seen", error)
            return set()

    def touch(self, run_ids: Iterable[str]) -> None:
        """Note that runs were used now, here or in RAM, in this order."""
        self.index.database.touch(self._now_in(run_id) for run_id in run_ids)

    def _now_in(self, run_id: str) -> str:
        while run_id in self._merged:
            run_id = self._merged[run_id]
        return run_id

    def _asked(self, ask: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Ask the catalogue, in bounded time. Return its answer, or `otherwise` when it fails."""
        try:
            found = self.files.bounded.call(ask)
        except (sqlite3.Error, StoreStalled) as error:
            self.health.failed("looking up blocks on disk", error)
            return otherwise
        self.health.worked("looking up blocks on disk")
        return found

    # Loading

    def load(self, run_id: str, first: int, ids: Sequence[bytes], tokens: TokenIds, end: int, sink: KVSink) -> None:
        """See `RunFiles.load`. A run that raises CorruptRun is taken out of use, except when it only stalled."""
        self.files.load(run_id, first, ids, tokens, end, sink, partial(self._refuse, run_id))

    def headers(self, run_ids: Sequence[str]) -> dict[str, RunHeader]:
        """Read the headers of some runs in one bounded wait. Return those that are verified. Damaged runs are taken out
        of use."""
        try:
            found, damaged = self.files.headers(run_ids)
        except StoreStalled:
            return {}
        for run_id, error in damaged.items():
            self.quarantine(run_id, error)
        return found

    def _refuse(self, run_id: str, error: CorruptRun) -> None:
        if isinstance(error, StoreStalled):
            self.health.failed("reading a run", error)
        else:
            self.quarantine(run_id, error)

    def quarantine(self, run_id: str, error: CorruptRun) -> bool:
        """Take a run that failed verification out of use. Its file is moved aside (and is evicted first when space is
        needed), its rows are deleted, and the runs that continue it, which cannot be reached now, are dropped. Never
        raises.

        Return False when the run had only been evicted meanwhile, or when the failure was not the file's fault.
        """
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in NO_FAULT_OF_THE_FILE:
            # Refuse it for a while, or a request could try forever. But not permanently: it would be stored repeatedly.
            self._refused[run_id] = max(self._refused.get(run_id, 0.0), time.monotonic() + _REFUSED_SECONDS)
            self.health.failed("reading a run", cause)
            return False
        self._refused[run_id] = math.inf
        try:
            with self.index.database.transaction() as db:
                if db.execute("SELECT 1 FROM runs WHERE id = ? AND state = 'live'", [run_id]).fetchone() is None:
                    return False
                ranking.note_eviction(db, family(db, [run_id]), CORRUPT)
                orphans = doom(db, [each for each in family(db, [run_id]) if each != run_id])
                db.execute("DELETE FROM blocks WHERE run = ?", [run_id])
                db.execute("DELETE FROM layouts WHERE run = ?", [run_id])
                db.execute("DELETE FROM edges WHERE child = ?", [run_id])
                try:
                    file = self.files.quarantine(run_id)
                    db.execute(
                        "UPDATE runs SET state = 'quarantined', queue = 0, file = ? WHERE id = ?", [file, run_id]
                    )
                except FileNotFoundError:
                    db.execute("DELETE FROM runs WHERE id = ?", [run_id])
            self.space.unlink(orphans)
        except (OSError, sqlite3.Error) as failure:
            self.health.failed("quarantining a run", failure)
        self.health.count("corrupt")
        log.warning("%s; quarantined, its blocks will be computed again", error)
        return True

    # Healing

    def heal(self) -> None:
        """Reopen the catalogue if it turned out to be damaged, or is not the file that was opened. Tried at most every
        few seconds; never raises."""
        with self._healing:
            if not self.index.database.is_sound() and time.monotonic() - self._tried_healing >= _HEAL_SECONDS:
                self._heal()
                self._tried_healing = time.monotonic()

    def _heal(self) -> None:
        old = self.index.database
        try:
            new = open_folder(self.folder, old.clock, self.files.key, damage=old.damage).database
            new.take_over(*old.hand_over())
            self.index.database = new
            old.close()
        except (StoreError, sqlite3.Error) as error:
            self.health.failed("healing the store", error)
            return
        self.health.worked("healing the store")
        log.warning("the catalogue in %s was opened anew, with %d runs", self.folder, self.index.run_count())

    def look_through(self) -> None:
        """Do what opening skips for a large store: check the catalogue's pages, and look for files that no row names
        and rows without a file. Raises sqlite3.Error and OSError."""
        if self.index.run_count() > SWEPT_AT_OPENING:
            sweep(self.folder, self.index)
        self.index.database.check()

    # Storing

    def put(self, run: Run, epoch: int | None = None) -> bool:
        """Store a run durably: reserve, write, sync, rename, publish. Never raises. Return False when it is not stored.

        A run that does not fit, whose parent block is not stored, or whose salt was purged since `epoch` (None: now),
        counts as dropped; anything else as an error.
        """
        try:
            added = self.store(run, run.layers(), epoch)
        except StoreFull as error:
            self.health.dropped("storing a run under the cap", error)
            return False
        except BudgetSpent as error:
            self.health.dropped("writing to disk today", error)
            self.health.count("over_budget")
            return False
        except (Orphan, PurgedMeanwhile) as error:
            purged = isinstance(error, PurgedMeanwhile)
            self.health.dropped("storing a run", error if purged else "the block it continues is not stored")
            return False
        except (OSError, sqlite3.Error) as error:
            self.health.failed("storing a run on disk", error)
            return False
        for what in ("storing a run on disk", "storing a run under the cap", "writing to disk today"):
            self.health.worked(what)
        return added is not None

    def store(self, run: Outline, layers: Iterable[tuple[Bytes, Bytes]], epoch: int | None = None) -> int | None:
        """Store a run whose KV comes layer by layer, and whose request began at `epoch` (None: now). Return how many of
        its blocks are new, or None when its reservation was lost meanwhile.

        Raises StoreFull, Orphan, BudgetSpent, PurgedMeanwhile, OSError, sqlite3.Error and what `layers` raises; nothing
        of the run is left then.
        """
        need = file_bytes(run, sealed=self.files.key is not None)
        self.space.reserve(run, need, self.epochs.now() if epoch is None else epoch)
        try:
            self._write(run, layers)
            added = self.index.publish(run.id, run, self.rules.ttl)
        except BaseException:
            self._abandon(run.id)
            raise
        if not added:
            self.files.remove(run.id)
            self.index.unlinked([run.id])
        return added

    def put_merged(self, run: Outline, layers: Iterable[tuple[Bytes, Bytes]], members: Sequence[RunRow]) -> bool:
        """Write one run that replaces others, in free space. Return False when they changed meanwhile.

        Raises StoreFull, Orphan, BudgetSpent, OSError, sqlite3.Error and what `layers` raises; nothing is changed then.
        """
        need = file_bytes(run, sealed=self.files.key is not None)
        self.space.reserve_spare(run, need)
        try:
            self._write(run, layers)
            done = self.index.replace(run.id, members, run)
        except BaseException:
            self._abandon(run.id)
            raise
        if done:
            self.health.count("compacted", len(members))
            self._merged.update((row.id, run.id) for row in members)
            while len(self._merged) > _MERGED_NOTED:
                self._merged.pop(next(iter(self._merged)))
            self.space.unlink(members)
        else:
            self._abandon(run.id)
        return done

    def remove(self, run_ids: Iterable[str]) -> list[RunRow]:
        """Forget runs and unlink their files. Return those that were there. Raises sqlite3.Error and OSError."""
        gone = self.index.forget(run_ids)
        self.space.unlink(gone)
        self.files.forget_headers()
        return gone

    def size_on_disk(self) -> int:
        """Bytes of all files in the folder, each with its length as `ls` shows it."""
        total = 0
        for root, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += os.stat(os.path.join(root, name)).st_size
                except OSError:
                    continue  # unlinked meanwhile
        return total

    def _write(self, run: Outline, layers: Iterable[tuple[Bytes, Bytes]]) -> None:
        if not self.files.write(run, layers, self.index.is_reserved):
            raise Orphan(run.id)

    def _abandon(self, run_id: str) -> None:
        """Undo an interrupted write. If the catalogue fails too, the reservation ends with its lease."""
        self.files.remove(run_id)  # first: on a full device the catalogue needs the space
        try:
            self.index.unlinked(row.id for row in self.index.forget([run_id]))
        except sqlite3.Error as error:
            self.health.failed("releasing a reservation", error)
