"""The database of conversations in a store's folder: its tables, how to open it, how to delete sessions from it.

`sessions.records` says what the records hold. This module does not read them, so a purge needs neither key nor model.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from keepwarm.errors import StoreError, StoreNotWritable, StoreTooNew, StoreUnusable
from keepwarm.store.admin.purge_epochs import EVERYTHING
from keepwarm.store.catalog.schema import WAL_BYTES, connect
from keepwarm.store.disk.files import Place, locked, place_of
from keepwarm.store.disk.room import SESSIONS, TakeRoom, size_of

log = logging.getLogger(__name__)

FOLDER = SESSIONS  # in the store's
FILE = "sessions.sqlite"
APPLICATION_ID = 0x4B575353  # "KWSS"
_LOCK = "lock"  # held while a database is opened or moved aside
_DAMAGED = "damaged-"
_GROWTH = WAL_BYTES // 2  # bytes that a transaction may add to the log beside its records; size of a new database

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE sessions (
            key BLOB PRIMARY KEY,           -- of salt and name
            salt BLOB NOT NULL,             -- tag of the salt it is under (`core.identity.salt_tag`); empty: none
            head BLOB NOT NULL,
            created REAL NOT NULL,
            used REAL NOT NULL,             -- seconds since the epoch
            turns INTEGER NOT NULL,         -- answers recorded
            settled BLOB NOT NULL,          -- the head up to which KV was settled last; empty: never
            record BLOB NOT NULL            -- name, tools, documents
        ) WITHOUT ROWID""",
        """CREATE TABLE nodes (
            id BLOB PRIMARY KEY,            -- of the node before, the message and the ids generated
            parent BLOB NOT NULL,
            created REAL NOT NULL,
            record BLOB NOT NULL            -- message, ids generated
        ) WITHOUT ROWID""",
        "CREATE INDEX nodes_parent ON nodes(parent)",
        # The ends of a session's branches; the head is one of them, or comes before one.
        """CREATE TABLE tips (
            session BLOB NOT NULL REFERENCES sessions(key) ON DELETE CASCADE,
            node BLOB NOT NULL,
            PRIMARY KEY (session, node)
        ) WITHOUT ROWID""",
        "CREATE INDEX tips_node ON tips(node)",
        "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    ),
)
SCHEMA = len(MIGRATIONS)

# Messages that no session leads to.
_LOST = """DELETE FROM nodes WHERE id NOT IN (
    WITH RECURSIVE live(id) AS (
        SELECT node FROM tips UNION SELECT head FROM sessions
        UNION SELECT parent FROM nodes JOIN live USING (id)
    ) SELECT id FROM live)"""


class Conversations:
    """One connection; threads and processes may share the folder. Raises StoreError when the database fails."""

    def __init__(
        self,
        store: Path | None,
        check: Callable[[sqlite3.Connection, Path], None] = lambda db, path: None,
        room: TakeRoom = lambda part, need: nullcontext(),
    ) -> None:
        """Without a folder the sessions are kept in memory. `check` inspects an opened database before it is used.
        `room` is asked for the bytes by which the folder will grow.

        Raises StoreNotWritable, StoreUnusable, StoreTooNew, and what `check` does.
        """
        self._check = check
        self._room = room
        self._lock = threading.RLock()
        self._path = None if store is None else store / FOLDER / FILE
        self._place: Place | None = None
        self._db = self._open()

    @property
    def in_memory(self) -> bool:
        return self._path is None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            try:
                self._follow()
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"the sessions cannot be read: {error}") from error

    @contextmanager
    def changing(self, nbytes: int = 0) -> Iterator[sqlite3.Connection]:
        """One transaction, which writes `nbytes` bytes of records."""
        with self._lock, self._room(SESSIONS, 2 * nbytes + _GROWTH):  # first in the log, then in the database
            try:
                self._follow()
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreError(f"the sessions cannot be written: {error}") from error

    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove sessions and the messages that no other session holds. Return how many sessions were removed."""
        with self.changing() as db:
            return sum(_drop(db, key) for key in keys)

    def purge(self, tags: Collection[bytes]) -> int:
        """Remove every session under salts with these tags, so that nothing of it is left in any file. Return how many.
        Databases that were set aside because of damage are removed, too: it is unknown whose text they hold."""
        with self._lock:
            try:
                gone = self._purge(tags)
            except sqlite3.DatabaseError as error:
                if self._path is None or isinstance(error, sqlite3.OperationalError):
                    raise StoreError(f"the sessions cannot be purged: {error}; run it again") from error
                self._db.close()
                with locked(self._path.with_name(_LOCK)):
                    _set_aside(self._path, error)
                self._db, gone = self._open(), 0
            if self._path is not None:
                with locked(self._path.with_name(_LOCK)):
                    for path in self._path.parent.glob(f"{_DAMAGED}*"):
                        path.unlink(missing_ok=True)
            return gone

    def _purge(self, tags: Collection[bytes]) -> int:
        self._follow()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            gone = self._db.execute("SELECT key, salt FROM sessions").fetchall()
            gone = [(key,) for key, salt in gone if salt in tags or EVERYTHING in tags]
            self._db.executemany("DELETE FROM sessions WHERE key = ?", gone)
            self._db.execute(_LOST)
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        # Do this even if no session was found: free pages and the log may hold what was dropped or half purged before.
        self._db.execute("PRAGMA temp_store = MEMORY")  # leaves nothing of it in a temporary file
        with self._room(SESSIONS, 0 if self._path is None else size_of(self._path.parent)):  # the log gets all of it
            self._db.execute("VACUUM")
            if self._path is not None:
                busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if busy:
                    raise sqlite3.OperationalError("their log could not be emptied: another process is reading it")
        return len(gone)

    # ---- opening ----

    def _follow(self) -> None:
        """If another process replaced a damaged database, open the new one."""
        if self._path is not None and place_of(self._path) != self._place:
            self._db.close()
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        if self._path is not None and not self._path.exists():
            with self._room(SESSIONS, _GROWTH):
                return self._opened()
        return self._opened()

    def _opened(self) -> sqlite3.Connection:
        if self._path is None:
            db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA foreign_keys = ON")
            _migrate(db, 0)
            return db
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._path.with_name(_LOCK)):
                try:
                    db = self._connect(self._path)
                except sqlite3.DatabaseError as error:
                    if isinstance(error, sqlite3.OperationalError):
                        raise StoreUnusable(f"the sessions in {self._path} cannot be opened: {error}") from error
                    _set_aside(self._path, error)
                    db = self._connect(self._path)
                self._place = place_of(self._path)
                return db
        except OSError as error:
            raise StoreNotWritable(f"sessions cannot be kept in {self._path.parent}: {error.strerror}") from None

    def _connect(self, path: Path) -> sqlite3.Connection:
        db = connect(path, writer=True)
        try:
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            if version > SCHEMA:
                raise StoreTooNew(f"the sessions in {path} have schema {version}, this Keepwarm knows {SCHEMA}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA secure_delete = ON")
            if version:
                found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    raise sqlite3.DatabaseError(found)
            _migrate(db, version)
            self._check(db, path)
        except BaseException:
            db.close()
            raise
        return db


def purge_conversations(store: Path, tags: Collection[bytes], room: TakeRoom = lambda part, need: nullcontext()) -> int:
    """Remove every session under salts with these tags from a store's folder. Return how many. Raises StoreError."""
    if not (store / FOLDER).exists():
        return 0
    conversations = Conversations(store, room=room)
    try:
        return conversations.purge(tags)
    finally:
        conversations.close()


def _set_aside(path: Path, error: Exception) -> None:
    """Move a damaged database away. The next connection creates a new one."""
    aside = path.with_name(f"{_DAMAGED}{time.time_ns()}.sqlite")
    log.warning("the sessions in %s are damaged (%s); moved to %s", path, error, aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(FILE + suffix).unlink(missing_ok=True)
    path.replace(aside)


def _migrate(db: sqlite3.Connection, version: int) -> None:
    if version == SCHEMA:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])  # another process may have been faster
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA}")
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise


def _drop(db: sqlite3.Connection, key: bytes) -> int:
    ends = [row[0] for row in db.execute("SELECT node FROM tips WHERE session = ?", [key]).fetchall()]
    ends += [row[0] for row in db.execute("SELECT head FROM sessions WHERE key = ?", [key]).fetchall()]
    count = db.execute("DELETE FROM sessions WHERE key = ?", [key]).rowcount
    used = (
        "SELECT 1 FROM nodes WHERE parent = :id UNION ALL SELECT 1 FROM tips WHERE node = :id "
        "UNION ALL SELECT 1 FROM sessions WHERE head = :id LIMIT 1"
    )
    for end in ends:
        while not db.execute(used, {"id": end}).fetchone():
            row = db.execute("DELETE FROM nodes WHERE id = ? RETURNING parent", [end]).fetchone()
            if row is None:
                break
            end = row[0]
    return count
