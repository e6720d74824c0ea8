"""The catalogue's connections and transactions, and the notes that are written later. `store.catalog.index` says what
is in it."""

from __future__ import annotations

import fcntl
import os
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepwarm.store.catalog import ranking
from keepwarm.store.catalog.schema import BUSY_SECONDS, WAL_BYTES, connect
from keepwarm.store.disk.files import place_of

Used = dict[str, tuple[float, int]]  # run id -> when it was last used, and how often; in the order of the last use
_TIMEOUT = 0.5  # seconds that a request waits for another one's question to the catalogue


TURNS = "writing"  # the file whose lock says who writes
_LONG_LOG = WAL_BYTES * 5 // 8  # bytes
_PAUSE = 0.02  # seconds, at most
_PAUSE_EVERY = 0.1


class Replaced(sqlite3.OperationalError):
    """The catalogue's file is not the one that was opened: it was removed, or made again by another process."""


class Database:
    """The catalogue of one store, for one process. Safe for use from several threads.

    Access times and counters are noted in memory (`touch`, `count`) and written by `merge` and `Index.reserve`.
    """

    def __init__(self, path: Path, writer: sqlite3.Connection, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._place = place_of(path)
        self._turn = os.open(path.with_name(TURNS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._log = path.with_name(path.name + "-wal")
        self._writer = writer
        self._reader = connect(path, writer=False)
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._note_lock = threading.Lock()
        self.clock = clock
        self.damage = ""  # what SQLite said when it found the file damaged
        self._waited = 0.0
        self._used: Used = {}
        self._counts: Counter[str] = Counter()

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()
            if self._turn >= 0:
                os.close(self._turn)
                self._turn = -1

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction, committed when the body ends and rolled back when it raises."""
        with self._write_lock:
            # Writing into a file that nobody can open any more would only look like storing.
            if place_of(self._path) != self._place:
                raise Replaced(f"{self._path} is gone, or another file is in its place")
            self._wait_for_turn()
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                yield self._writer
                self._writer.execute("COMMIT")
                self._shorten_log()
            except BaseException as error:
                self._writer.rollback()
                self._note_damage(error)
                raise
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _wait_for_turn(self) -> None:
        """Processes write one after another by a lock of our own: among many writers SQLite's never lets one empty
        the log, which would then outgrow the cap. The kernel frees the lock of a process that dies. Raises
        sqlite3.OperationalError.
        """
        if self._turn < 0:
            raise sqlite3.ProgrammingError(f"{self._path} is closed")
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise sqlite3.OperationalError(f"another process holds {self._path} locked") from error
            time.sleep(random.uniform(0.0005, 0.003))

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows that a question gives. Raises sqlite3.Error."""
        self._let_writers_pass()
        if not self._read_lock.acquire(timeout=_TIMEOUT):
            raise sqlite3.OperationalError("the catalogue does not answer")
        try:
            return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            self._note_damage(error)
            raise
        finally:
            self._read_lock.release()

    def nbytes(self) -> int:
        """Of the catalogue, without its log."""
        return _bytes_of(self._path)

    def rewrite(self) -> None:
        """Write the catalogue anew, so that free pages and the log keep nothing of deleted rows.

        Raises sqlite3.OperationalError when others kept it busy for too long; what is deleted stays so.
        """
        with self._write_lock, self._read_lock:
            self._writer.execute("PRAGMA temp_store = MEMORY")  # nothing of it in a temporary file either
            self._writer.execute("VACUUM")
            if not self._empty_log():
                raise sqlite3.OperationalError(
                    "the catalogue's log could not be emptied: another process is reading it"
                )

    def _empty_log(self) -> bool:
        """Copy the log into the catalogue and empty it. SQLite waits for who reads, not for who empties it, too."""
        until = time.monotonic() + BUSY_SECONDS
        while True:
            busy, _, _ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy or time.monotonic() > until:
                return not busy
            time.sleep(0.01)

    def _let_writers_pass(self) -> None:
        """The log is emptied when nobody reads for a moment; where many processes always do, each makes room."""
        if _bytes_of(self._log) <= _LONG_LOG or time.monotonic() - self._waited < _PAUSE_EVERY:
            return
        self._waited = time.monotonic()
        while _bytes_of(self._log) > _LONG_LOG and time.monotonic() - self._waited < _PAUSE:
            time.sleep(0.001)

    def _shorten_log(self) -> None:
        """Copy the log into the catalogue and empty it, when readers kept SQLite from doing so: the cap covers it
        too."""
        size = _bytes_of(self._log)
        if size <= WAL_BYTES // 2:
            return
        # Readers that are just finishing are waited for; for longer when the log nears what the cap allows it.
        self._writer.execute(f"PRAGMA busy_timeout = {20 if size <= _LONG_LOG else 2000}")
        try:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:
            return  # the transaction is committed all the same
        finally:
            self._writer.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")

    def is_sound(self) -> bool:
        """False when the file was found damaged, or is not the one that was opened."""
        return not self.damage and place_of(self._path) == self._place

    def check(self) -> None:
        """Have SQLite look at every page, which takes a while; `damage` says what it found. Raises sqlite3.Error."""
        connection = connect(self._path, writer=False)  # of its own: nobody waits for this one
        try:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            self._note_damage(error)
            if not self.damage:
                raise
            return
        finally:
            connection.close()
        if found != "ok":
            self.damage = str(found)

    def _note_damage(self, error: BaseException) -> None:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            self.damage = str(error)

    # Notes: written later, so that a hit never writes

    def touch(self, run_ids: Iterable[str]) -> None:
        """Note that runs were used now."""
        now = self.clock()
        with self._note_lock:
            for run_id in run_ids:
                _, times = self._used.pop(run_id, (now, 0))
                self._used[run_id] = (now, times + 1)

    def count(self, name: str, delta: int = 1) -> None:
        """Note that something happened."""
        with self._note_lock:
            self._counts[name] += delta

    def merge(self) -> None:
        """Write the notes. On failure they are kept for the next time."""
        with self._note_lock:
            if not self._used and not self._counts:
                return
        with self.noted() as write, self.transaction() as db:
            write(db)

    def hand_over(self) -> tuple[Used, Counter[str]]:
        """The notes that are not written yet, for another catalogue to write; this one forgets them."""
        with self._note_lock:
            used, counts = self._used, self._counts
            self._used, self._counts = {}, Counter()
            return used, counts

    def take_over(self, used: Used, counts: Mapping[str, int]) -> None:
        """Add notes to this catalogue's."""
        with self._note_lock:
            later, self._used = self._used, dict(used)
            for run_id, (when, times) in later.items():
                _, before = self._used.pop(run_id, (when, 0))
                self._used[run_id] = (when, before + times)
            self._counts.update(counts)

    @contextmanager
    def noted(self) -> Iterator[Callable[[sqlite3.Connection], None]]:
        """Something that writes the notes so far; they are put back when the body raises."""
        used, counts = self.hand_over()

        def write(db: sqlite3.Connection) -> None:
            ranking.use(db, used)
            db.executemany(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                list(counts.items()),
            )

        try:
            yield write
        except BaseException:
            self.take_over(used, counts)
            raise


def _bytes_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
