"""Space on disk, reserved under the cap before anything is written: for runs and for other data."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from keepwarm.errors import StoreFull
from keepwarm.store.admin.purge_epochs import Epochs
from keepwarm.store.catalog.index import Index
from keepwarm.store.catalog.rows import RunRow, Wanted
from keepwarm.store.catalog.schema import WAL_BYTES
from keepwarm.store.disk.recovery import run_file, unlink_rows
from keepwarm.store.disk.room import REWRITING, size_of
from keepwarm.store.health import Health
from keepwarm.store.retention import Rules
from keepwarm.store.runfile.layout import Outline, new_run_id

_TRIES = 16  # to reserve space that other processes also want
_MOST_EVICTED = 4096  # times that runs are evicted to make room for other data


class Space:
    """The bytes of one store's folder. Evicted files are unlinked before their space counts as free, so the cap holds
    at every moment."""

    def __init__(self, folder: Path, cap: int, index: Index, rules: Rules, health: Health, epochs: Epochs) -> None:
        self._folder, self._cap, self._index = folder, cap, index
        self._rules, self._health, self._epochs = rules, health, epochs

    def fits(self, nbytes: int) -> bool:
        """Whether a run of about `nbytes` bytes could be stored today, under the cap and the budget."""
        if nbytes + WAL_BYTES >= self._cap:
            return False
        budget = self._rules.writes_per_day
        try:
            if budget is None or self._index.written_today() + nbytes <= budget:
                return True
        except sqlite3.Error as error:
            self._health.failed("asking for today's writes", error)
            return False
        self._health.count("over_budget")
        self._health.once("writing to disk today", f"the {budget} bytes of max_disk_writes_per_day are written")
        return False

    def reserve(self, run: Outline, need: int, epoch: int) -> None:
        """Reserve space for a run whose request began at `epoch`, and evict if needed.

        Raises StoreFull, Orphan, BudgetSpent, PurgedMeanwhile and sqlite3.Error.
        """
        wanted = Wanted(run.id, run_file(run.id), need, run)
        check = partial(self._epochs.check, epoch, run.salts)
        gone: list[RunRow] = []
        for _ in range(_TRIES):
            freed = [row.id for row in gone]
            gone = self._index.reserve(wanted, self._cap, self._rules, freed, check)
            if not gone:
                return
            self._health.count("evicted_disk", sum(row.state == "live" for row in gone))
            unlink_rows(self._folder, gone)
        raise StoreFull(f"other processes take the space as fast as {need} bytes are freed")

    def reserve_spare(self, run: Outline, need: int) -> None:
        """Reserve free space only. Raises what `reserve` does."""
        wanted = Wanted(run.id, run_file(run.id), need, run)
        for _ in range(_TRIES):
            gone = self._index.reserve_spare(wanted, self._cap, self._rules)
            if not gone:
                return
            self.unlink(gone)
        raise StoreFull("files that nobody needs cannot be unlinked")

    def unlink(self, rows: Sequence[RunRow]) -> None:
        """Remove the files of runs that the catalogue dropped; their bytes no longer count. Raises OSError and
        sqlite3.Error."""
        if rows:
            unlink_rows(self._folder, rows)
            self._index.unlinked(row.id for row in rows)

    @contextmanager
    def room(self, part: str, need: int) -> Iterator[None]:
        """Keep room under the cap so that a part of the folder can grow by `need` bytes in the body (see
        `store.disk.room`). The body runs even if the catalogue fails."""
        name = ""
        try:
            if not part or size_of(self._folder / part) + need > self._index.granted(part):
                name = self._take_room(need)
        except (OSError, sqlite3.Error) as error:
            self._health.failed("making room on disk", error)
        try:
            yield
        finally:
            try:
                if name:
                    self._index.release_room(name, self._cap)
            except sqlite3.Error as error:  # the reservation ends with its lease
                self._health.failed("making room on disk", error)

    def _take_room(self, need: int) -> str:
        name = f"room {new_run_id()}"
        gone: list[RunRow] = []
        for _ in range(_MOST_EVICTED):
            gone = self._index.take_room(name, need, self._cap, self._rules, [row.id for row in gone])
            if not gone:
                return name
            self._health.count("evicted_disk", sum(row.state == "live" for row in gone))
            unlink_rows(self._folder, gone)
        return ""

    def rewrite(self) -> None:
        """Rewrite the catalogue: see `Database.rewrite`. Meanwhile its log is as large as the catalogue itself."""
        with self.room(REWRITING, self._index.database.nbytes()):
            self._index.database.rewrite()
