"""Remove tenants: everything under some salts, from RAM, the folder, the catalogue's free pages and remote tiers. Also
follow the purges of other processes and replicas."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from keepwarm.errors import StoreError, StoreStalled
from keepwarm.store.admin.contents import Contents
from keepwarm.store.admin.conversations import purge_conversations
from keepwarm.store.admin.purge_epochs import EVERYTHING, Epochs, is_under
from keepwarm.store.admin.set_files import purge_sets
from keepwarm.store.catalog.reservations import doom, left_behind
from keepwarm.store.disk.recovery import QUARANTINE, sweep, unlink_rows
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.health import Health
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.remote.tiers import Remotes
from keepwarm.store.remote.write_behind import Purges
from keepwarm.store.runfile.layout import UNKNOWN_SALT

Tags = Collection[bytes]
_TRY_EVERY = 5.0  # seconds between two looks for abandoned purges


@dataclass(frozen=True)
class Purged:
    """What a purge removed."""

    runs: int  # each counted once, whether in RAM, on disk, in a remote tier or in several
    nbytes: int  # of files
    names: int


class Purging:
    """Purges of one archive. Safe for use from several threads."""

    def __init__(
        self, ram: RamTier, disk: DiskTier | None, health: Health, epochs: Epochs, contents: Contents, remotes: Remotes
    ) -> None:
        self._ram = ram
        self._disk = disk
        self._health = health
        self._epochs = epochs
        self._contents = contents
        self._remotes = remotes
        self._lock = threading.RLock()
        self._followed = epochs.now()
        self._tried = float("-inf")
        self.on_purge: Callable[[frozenset[bytes]], None] = lambda tags: None

    # Following

    def epoch_known(self) -> int | None:
        """See `Archive.epoch_known`."""
        followed = self._followed
        return followed if not self._epochs.is_news and self._epochs.now() == followed else None

    def epoch(self) -> int:
        """See `Archive.epoch`."""
        if (known := self.epoch_known()) is not None:
            return known
        try:
            return self._follow() if self._disk is None else self._disk.files.bounded.call(self._follow)
        except (StoreStalled, OSError) as error:  # a request that begins now is not stored if there was a purge
            self._health.failed("asking for purges", error)
            return self._followed

    def _follow(self) -> int:
        """Forget what any process purged since the last call. Raises OSError."""
        with self._lock:
            now = self._epochs.now()  # read first: a purge that begins between the two is then seen twice, not missed
            tags = self._epochs.since(self._followed)
            if tags:
                for run in self._ram.runs():
                    if is_under(run.salts, tags):
                        self._ram.remove(run.id)
                if self._disk is not None:
                    self._disk.files.forget_headers()
                self._contents.forget_names()
                self.on_purge(tags)
            self._followed = now
            return now

    # Purging

    def purge(self, tags: Tags) -> Purged:
        """Remove what is under salts with these tags, and finish purges that another process began and did not finish.
        Raises StoreError."""
        held = {run.id for run in self._ram.runs() if is_under(run.salts, tags)}
        names = len(self._contents.names())
        with self._alone(tags, finish=True) as todo:
            report, gone = self._purge_here(todo)
            far, nbytes = self._remotes.purge(todo)
        self.epoch()
        names -= len(self._contents.names())
        return replace(report, runs=max(len(held | gone), len(far)), nbytes=report.nbytes + nbytes, names=names)

    def follow(self, tags: Tags) -> bool:
        """Remove here what another replica purged. Return False if the caller must try again."""
        try:
            with self._alone(tags, wait=False) as todo:
                self._purge_here(todo)
        except StoreError as error:
            self._health.failed("following a purge", error)
            return False
        self.epoch()
        return True

    def finish(self) -> None:
        """Finish abandoned purges, but look for them only every few seconds. Never raises."""
        if time.monotonic() - self._tried < _TRY_EVERY:
            return
        self._tried = time.monotonic()
        try:
            if self._epochs.pending():
                with self._alone((), finish=True, wait=False) as todo:
                    if todo:  # no other process was faster
                        self._purge_here(todo)
                        self._remotes.purge(todo)
        except (StoreError, OSError) as error:
            self._health.failed("finishing a purge", error)

    def begin(self) -> None:
        """Before anything is answered from this archive, finish in the folder the purges of processes that ended, and
        follow the purges of other replicas."""
        try:
            if self._epochs.pending():
                with self._alone((), finish=True, wait=False) as todo:
                    if todo:  # no other process was faster
                        self._purge_here(todo)
                    if todo and self._remotes:
                        raise _Unfinished  # a service may be slow: `finish` asks it later
        except _Unfinished:
            pass
        except (StoreError, OSError) as error:
            self._health.failed("finishing a purge", error)
        for behind in self._remotes:
            name = f"purges of {behind.tier.blobs.label}"
            behind.begin(partial(self._recall, name), partial(self._remember, name))

    def _purge_here(self, tags: Tags) -> tuple[Purged, set[str]]:
        self.epoch()
        if self._disk is None:
            return Purged(0, 0, 0), set()
        purge_conversations(self._disk.folder, tags, self._disk.space.room)
        purge_sets(self._disk.folder, tags)
        return purge_disk(self._disk, tags)

    @contextmanager
    def _alone(self, tags: Tags, *, finish: bool = False, wait: bool = True) -> Iterator[frozenset[bytes]]:
        """See `Epochs.purging`. Raises StoreError."""
        try:
            with self._epochs.purging(tags, finish=finish, wait=wait) as todo:
                yield todo
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the purge is not complete ({error}); run it again") from error

    def _recall(self, name: str) -> dict[bytes, float] | None:
        """Return the purges of a remote tier that were followed here; None when nothing is stored here to purge."""
        if self._disk is None:
            return None
        try:
            text = self._disk.index.setting(name)
            if text is None:
                return {} if self._disk.index.run_count() else None
            return {bytes.fromhex(tag): when for tag, when in json.loads(text).items()}
        except (sqlite3.Error, ValueError) as error:
            self._health.failed("asking for purges", error)
            return {}

    def _remember(self, name: str, purges: Purges) -> None:
        if self._disk is None:
            return
        try:
            self._disk.index.set_setting(name, json.dumps({tag.hex(): when for tag, when in purges.items()}))
        except sqlite3.Error as error:
            self._health.failed("noting purges", error)


class _Unfinished(Exception):
    """A purge must not count as finished."""


def purge_disk(disk: DiskTier, tags: Tags) -> tuple[Purged, set[str]]:
    """Remove every run with a block under these salts and the runs that continue it, and everything that may belong to
    them. Return also the ids of the live runs that were removed.

    What may belong to them: quarantined files, catalogues moved aside, files that no row names or that a process
    evicted and has not unlinked yet, unfinished writes of any process (their writers notice), names of prompts that are
    not stored, notes of blocks that were seen or evicted, and runs of a version that did not record salts. Then the
    catalogue is rewritten.

    Raises sqlite3.Error and OSError; a second call then finishes the work.
    """
    with disk.index.database.transaction() as db:
        gone = left_behind(db)
        gone += doom(db, _found(db, tags))
        names = db.execute("DELETE FROM names WHERE leaf NOT IN (SELECT exact FROM blocks)").rowcount
        db.execute("DELETE FROM ghosts")
        db.execute("DELETE FROM sightings")
        db.execute("DELETE FROM evictions")
        db.execute("DELETE FROM layouts WHERE run NOT IN (SELECT id FROM runs)")
    unlink_rows(disk.folder, gone)
    disk.index.unlinked(row.id for row in gone)
    for entry in (disk.folder / QUARANTINE).iterdir():
        entry.unlink(missing_ok=True)
    sweep(disk.folder, disk.index)
    disk.space.rewrite()
    live = [row for row in gone if row.state == "live"]
    return Purged(len(live), sum(row.nbytes for row in gone), names), {row.id for row in live}


def _found(db: sqlite3.Connection, tags: Tags) -> list[str]:
    """Ids of the runs under these salts, and of all runs that are not live."""
    if EVERYTHING in tags:
        return [row[0] for row in db.execute("SELECT id FROM runs")]
    found = {row[0] for row in db.execute("SELECT id FROM runs WHERE state <> 'live'")}
    for tag in (*tags, UNKNOWN_SALT):
        found.update(row[0] for row in db.execute("SELECT run FROM salts WHERE tag = ?", [tag]))
    return sorted(found)
