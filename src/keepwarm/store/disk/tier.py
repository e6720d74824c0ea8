"""The disk tier: one immutable file per run, shared by all processes that use the folder."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from keepwarm.core.ports import Bytes
from keepwarm.errors import PurgedMeanwhile, StoreError, StoreFull
from keepwarm.store.admin.purge_epochs import Epochs
from keepwarm.store.catalog import ranking
from keepwarm.store.catalog.index import Index, Orphan, RunRow
from keepwarm.store.catalog.reservations import BudgetSpent
from keepwarm.store.catalog.schema import WAL_BYTES
from keepwarm.store.disk.lookup import DiskReads
from keepwarm.store.disk.recovery import RUNS, SWEPT_AT_OPENING, TEMPORARY, open_folder, run_file, sweep, unlink_rows
from keepwarm.store.disk.room import REWRITING, size_of
from keepwarm.store.disk.timeouts import BoundedCalls
from keepwarm.store.health import Health
from keepwarm.store.retention import Rules
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import file_bytes
from keepwarm.store.runfile.layout import Outline, Run, new_run_id
from keepwarm.store.runfile.writer import write_run

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_HEAL_SECONDS = 5.0
_MERGED_NOTED = 1 << 14
_TRIES = 16  # at taking space that other processes also want
_MOST_GIVEN_UP = 4096  # runs, for room that is no run's


class DiskTier(DiskReads):
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
        super().__init__(folder, index, health or Health(), key, bounded or BoundedCalls(), coding, map_files)
        self.cap = cap
        self.rules = rules or Rules()
        self.epochs = Epochs(folder)
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
        """Open or create a store. `cap` bounds all bytes in the folder, the catalogue and quarantine included; it is
        applied when something is stored, not here. `key` is an encrypted store's; a new store is made encrypted by it;
        what a request waits for goes through `bounded`; with `map_files` it attends to files in place where
        the page cache holds them (see `store.disk.mmap`).

        `rules`, when given, are the store's from now on (see `ranking.choose_policy`). Raises StoreNotWritable,
        StoreUnusable, StoreTooNew, StoreLocked and StoreFull.
        """
        index = open_folder(folder, clock, key)
        if rules is not None and index.setting(ranking.POLICY) != rules.disk_policy:
            with index.transaction() as db:
                ranking.choose_policy(db, rules.disk_policy)
        return cls(
            folder, cap, index, health=health, key=key, rules=rules, bounded=bounded, coding=coding, map_files=map_files
        )

    def close(self) -> None:
        """Merge access times and counters, and close the catalogue."""
        try:
            self.index.merge()
        except sqlite3.Error as error:
            self.health.failed("closing the store", error)
        finally:
            self.index.close()
            self.epochs.close()

    # Storing

    def fits(self, nbytes: int) -> bool:
        """Whether a run of about so many bytes could be stored today, under the cap and the budget."""
        if nbytes + WAL_BYTES >= self.cap:
            return False
        budget = self.rules.writes_per_day
        try:
            if budget is None or self.index.written_today() + nbytes <= budget:
                return True
        except sqlite3.Error as error:
            self.health.failed("asking for today's writes", error)
            return False
        self.health.count("over_budget")
        self.health.once("writing to disk today", f"the {budget} bytes of max_disk_writes_per_day are written")
        return False

    # Healing

    def heal(self) -> None:
        """Open the catalogue anew where that helps: it turned out damaged, or is not the file that was opened. Tried
        at most every few seconds; never raises."""
        with self._healing:
            if not self.index.is_sound() and time.monotonic() - self._tried_healing >= _HEAL_SECONDS:
                self._heal()
                self._tried_healing = time.monotonic()

    def _heal(self) -> None:
        old = self.index
        try:
            new = open_folder(self.folder, old.clock, self.key, damage=old.damage)
            new.take_over(*old.hand_over())
            self.index = new
            old.close()
        except (StoreError, sqlite3.Error) as error:
            self.health.failed("healing the store", error)
            return
        self.health.worked("healing the store")
        log.warning("the catalogue in %s was opened anew, with %d runs", self.folder, new.run_count())

    def look_through(self) -> None:
        """What opening leaves undone where a store is large: check the catalogue's pages, and look for files that no
        row names and rows without a file. Raises sqlite3.Error and OSError."""
        if self.index.run_count() > SWEPT_AT_OPENING:
            sweep(self.folder, self.index)
        self.index.check()

    def put(self, run: Run, epoch: int | None = None) -> bool:
        """Store a run durably: reserve, write, sync, rename, publish. Never raises; False when it is not stored.

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
        """Store a run whose KV comes layer by layer, and which began at `epoch` (None: now); returns how many of its
        blocks nobody had stored, None when its reservation was taken away meanwhile.

        Raises StoreFull, Orphan, BudgetSpent, PurgedMeanwhile, OSError, sqlite3.Error and what `layers` raises; nothing
        of the run is then left.
        """
        need = file_bytes(run, sealed=self.key is not None)
        self._reserve(run, need, self.epochs.now() if epoch is None else epoch)
        try:
            self._write(run, layers)
            added = self.index.publish(run.id, run, self.rules.ttl)
        except BaseException:
            self._abandon(run.id)
            raise
        if not added:
            self._unlink(self.path(run.id))
            self.index.unlinked([run.id])
        return added

    def _reserve(self, run: Outline, need: int, epoch: int) -> None:
        """Take space. What is given up for it is unlinked before the space counts as free, so that the cap holds at
        every moment."""
        check = partial(self.epochs.check, epoch, run.salts)
        gone: list[RunRow] = []
        for _ in range(_TRIES):
            freed = [row.id for row in gone]
            gone = self.index.reserve(run.id, run_file(run.id), need, self.cap, run, self.rules, freed, check)
            if not gone:
                return
            self.health.count("evicted_disk", sum(row.state == "live" for row in gone))
            unlink_rows(self.folder, gone)
        raise StoreFull(f"other processes take the space as fast as {need} bytes are freed")

    @contextmanager
    def room(self, part: str, need: int) -> Iterator[None]:
        """Have room under the cap for a part of the folder to grow by `need` bytes in the body (see `store.disk.room`).
        A catalogue that fails is no trouble of the body's."""
        name = ""
        try:
            if not part or size_of(self.folder / part) + need > self.index.granted(part):
                name = self._take_room(need)
        except (OSError, sqlite3.Error) as error:
            self.health.failed("making room on disk", error)
        try:
            yield
        finally:
            try:
                if name:
                    self.index.release_room(name, self.cap)
            except sqlite3.Error as error:  # it ends with its lease
                self.health.failed("making room on disk", error)

    def _take_room(self, need: int) -> str:
        name = f"room {new_run_id()}"
        gone: list[RunRow] = []
        for _ in range(_MOST_GIVEN_UP):
            gone = self.index.take_room(name, need, self.cap, self.rules, [row.id for row in gone])
            if not gone:
                return name
            self.health.count("evicted_disk", sum(row.state == "live" for row in gone))
            unlink_rows(self.folder, gone)
        return ""

    def rewrite(self) -> None:
        """Write the catalogue anew: see `Index.rewrite`. Its log is as large as itself meanwhile."""
        with self.room(REWRITING, self.index.nbytes()):
            self.index.rewrite()

    def put_merged(self, run: Outline, layers: Iterable[tuple[Bytes, Bytes]], members: Sequence[RunRow]) -> bool:
        """Write one run that takes the place of others, out of spare space; False when they changed meanwhile.

        Raises StoreFull, Orphan, BudgetSpent, OSError, sqlite3.Error and what `layers` raises; all is then as before.
        """
        need = file_bytes(run, sealed=self.key is not None)
        for _ in range(_TRIES):
            gone = self.index.reserve_spare(run.id, run_file(run.id), need, self.cap, run, self.rules)
            if not gone:
                break
            self._unlink_rows(gone)
        else:
            raise StoreFull("files that nobody needs cannot be unlinked")
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
            self._unlink_rows(members)
        else:
            self._abandon(run.id)
        return done

    def remove(self, run_ids: Iterable[str]) -> list[RunRow]:
        """Forget runs and unlink their files; returns those that were there. Raises sqlite3.Error and OSError."""
        gone = self.index.forget(run_ids)
        self._unlink_rows(gone)
        self.forget_headers()
        return gone

    def size_on_disk(self) -> int:
        """Bytes of every file in the folder, in bytes as `ls` shows them."""
        total = 0
        for root, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += os.stat(os.path.join(root, name)).st_size
                except OSError:
                    continue  # unlinked meanwhile
        return total

    def _write(self, run: Outline, layers: Iterable[tuple[Bytes, Bytes]]) -> None:
        final = self.path(run.id)
        temporary = final.with_name(final.name + TEMPORARY)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Who gives the run up from now on, or purges it, finds the file: not a byte goes where nobody looks.
            if not self.index.is_reserved(run.id):
                raise Orphan(run.id)
            write_run(fd, run, layers, self.key)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.rename(temporary, final)
        except FileNotFoundError:
            if final.parent.exists():  # another process gave up the parent, and with it this reservation
                raise Orphan(run.id) from None
            raise
        folder = os.open(self.folder / RUNS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _abandon(self, run_id: str) -> None:
        """Undo a write that broke off. Should the catalogue fail too, the reservation ends with its lease."""
        path = self.path(run_id)
        self._unlink(path.with_name(path.name + TEMPORARY))  # first: on a full device the catalogue needs the space
        self._unlink(path)
        try:
            self.index.unlinked(row.id for row in self.index.forget([run_id]))
        except sqlite3.Error as error:
            self.health.failed("releasing a reservation", error)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.health.failed("unlinking a file", error)
