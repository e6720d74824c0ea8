"""The catalogue's connections and transactions, and the notes that are written later. `store.catalog.index` says what
the catalogue holds."""

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
_TIMEOUT = 0.5  # seconds that a request waits for another one's query


TURNS = "writing"  # the file whose lock a writer holds
_LONG_LOG = WAL_BYTES * 5 // 8  # bytes
_PAUSE = 0.02  # seconds, at most
_PAUSE_EVERY = 0.1


class Replaced(sqlite3.OperationalError):
    """The catalogue's file is not the one that was opened: it was removed, or another process created a new one."""


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
            # Writing into an unlinked file would seem to store, but no process could open it later.
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
        """Take the lock that lets one process write at a time. It is our own: with many writers, SQLite's lock never
        lets one empty the log, which would then outgrow the cap. The kernel frees the lock of a process that dies.
        Raises sqlite3.OperationalError.
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
        """Return the rows of a query. Raises sqlite3.Error."""
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
        """Size of the catalogue in bytes, without its log."""
        return _bytes_of(self._path)

    def rewrite(self) -> None:
        """Rewrite the catalogue, so that free pages and the log keep nothing of deleted rows.

        Raises sqlite3.OperationalError when others kept it busy for too long; deleted rows stay deleted.
        """
        with self._write_lock, self._read_lock:
            self._writer.execute("PRAGMA temp_store = MEMORY")  # leaves nothing in a temporary file either
            self._writer.execute("VACUUM")
            if not self._empty_log():
                raise sqlite3.OperationalError(
                    "the catalogue's log could not be emptied: another process is reading it"
                )

    def _empty_log(self) -> bool:
        """Copy the log into the catalogue and empty it. Return whether that worked. The loop is needed since SQLite
        waits for readers, but not for another process that empties the log."""
        until = time.monotonic() + BUSY_SECONDS
        while True:
            busy, _, _ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy or time.monotonic() > until:
                return not busy
            time.sleep(0.01)

    def _let_writers_pass(self) -> None:
        """If the log is long, wait briefly before reading. A writer can empty the log only in a moment without readers,
        and among many processes there would be none."""
        if _bytes_of(self._log) <= _LONG_LOG or time.monotonic() - self._waited < _PAUSE_EVERY:
            return
        self._waited = time.monotonic()
        while _bytes_of(self._log) > _LONG_LOG and time.monotonic() - self._waited < _PAUSE:
            time.sleep(0.001)

    def _shorten_log(self) -> None:
        """Copy the log into the catalogue and empty it, if it grew because readers kept SQLite from doing so. The cap
        covers the log, too."""
        size = _bytes_of(self._log)
        if size <= WAL_BYTES // 2:
            return
        # Wait for readers that are about to finish; longer when the log nears what the cap allows it.
        self._writer.execute(f"PRAGMA busy_timeout = {20 if size <= _LONG_LOG else 2000}")
        try:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:
            return  # the transaction is committed anyway
        finally:
            self._writer.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")

    def is_sound(self) -> bool:
        """False when the file was found damaged, or is not the one that was opened."""
        return not self.damage and place_of(self._path) == self._place

    def check(self) -> None:
        """Let SQLite check every page, which takes a while; `damage` says what it found. Raises sqlite3.Error."""
        connection = connect(self._path, writer=False)  # a separate one, so that no request waits for it
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

    # Notes, which are written later, so that a hit never writes

    def touch(self, run_ids: Iterable[str]) -> None:
        """Note that runs were used now."""
        now = self.clock()
        with self._note_lock:
            for run_id in run_ids:
                _, times = self._used.pop(run_id, (now, 0))
                self._used[run_id] = (now, times + 1)

    def count(self, name: str, delta: int = 1) -> None:
        """Add to a counter."""
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
        """Return the notes that are not written yet, for another catalogue to write, and forget them."""
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
        """Yield a function that writes the notes so far. They are put back when the body raises."""
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
