"""Where sessions are remembered: a database in the store's folder, or in memory without a store.

A session is a tree of messages that only ever grows, and a head: the message after which the next turn goes on. A
message is named by everything up to it, so branches and forks share what they have in common.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepwarm.core.identity import canonical_json, digest, salt_key, salt_tag
from keepwarm.errors import CorruptRun, StoreError, StoreLocked, StoreNotWritable, StoreTooNew, StoreUnusable
from keepwarm.store.crypto import SALT_BYTES, StoreKey, new_salt
from keepwarm.store.schema import connect

log = logging.getLogger("keepwarm.sessions")

FOLDER = "sessions"
FILE = "sessions.sqlite"
APPLICATION_ID = 0x4B575353  # "KWSS"
_CHECK_BYTES = 16

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
        # The ends of a session's branches; the head is one of them, or before one.
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


@dataclass(frozen=True)
class Node:
    """One message of a conversation and everything before it."""

    id: bytes
    parent: bytes
    created: float
    record: dict[str, Any]  # "message"; of an answer also "generated" (ids), "finish", "model", "ran"

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = self.record["message"]
        return message


@dataclass(frozen=True)
class SessionRow:
    """One session, as the database knows it."""

    key: bytes
    salt: bytes
    head: bytes
    created: float
    used: float
    turns: int
    settled: bytes
    record: dict[str, Any]  # "name"; "tools", "documents", "tool_order" of the last turn

    @property
    def name(self) -> str:
        return str(self.record["name"])


class Records:
    """Threads and processes may share one folder. Raises StoreError for what the database refuses."""

    def __init__(self, store: Path | None, key: StoreKey | None = None) -> None:
        """`key` is the store's: what is written is sealed with it.

        Raises StoreNotWritable, StoreUnusable, StoreTooNew and StoreLocked.
        """
        self._key = key
        self._lock = threading.RLock()
        self._path = None if store is None else store / FOLDER / FILE
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreNotWritable(f"sessions cannot be kept in {self._path.parent}: {error.strerror}") from None
        self._db = self._open()

    # ---- names ----

    def session_key(self, name: str, salt: str | None) -> bytes:
        """Under what a session is found: nobody finds another's by its name."""
        return self._hidden(digest("keepwarm session 1", _salt(salt), name))

    def root(self, salt: str | None) -> bytes:
        """What the first message of a conversation follows."""
        return self._hidden(digest("keepwarm session root 1", _salt(salt)))

    def _hidden(self, name: bytes) -> bytes:
        """In an encrypted store, names of content tell nothing to who has not the key."""
        return name if self._key is None else self._key.hidden(name)

    # ---- reading ----

    def session(self, key: bytes) -> SessionRow | None:
        """Raises CorruptRun for a record that is not what was written."""
        row = self._ask("SELECT * FROM sessions WHERE key = ?", [key])
        return self._row(row[0]) if row else None

    def sessions(self, salt: str | None = None) -> Iterator[SessionRow]:
        """All sessions under a salt (None: under none), the last used first. Damaged ones are left out."""
        tag = b"" if salt is None else salt_tag(salt_key(salt))
        for row in self._ask("SELECT * FROM sessions WHERE salt = ? ORDER BY used DESC, key", [tag]):
            try:
                yield self._row(row)
            except CorruptRun as error:
                log.warning("a stored session cannot be used: %s", error)

    def path(self, head: bytes) -> tuple[Node, ...]:
        """The messages from the first to `head`. Raises CorruptRun."""
        rows = self._ask(
            "WITH RECURSIVE up(id, parent, created, record, back) AS ("
            "SELECT id, parent, created, record, 0 FROM nodes WHERE id = ? UNION ALL "
            "SELECT n.id, n.parent, n.created, n.record, back + 1 FROM nodes n JOIN up ON n.id = up.parent) "
            "SELECT id, parent, created, record FROM up ORDER BY back DESC",
            [head],
        )
        return tuple(self._node(row) for row in rows)

    def children(self, parent: bytes) -> tuple[Node, ...]:
        """What follows a message, in all branches and sessions, the oldest first. Raises CorruptRun."""
        rows = self._ask(
            "SELECT id, parent, created, record FROM nodes WHERE parent = ? ORDER BY created, id", [parent]
        )
        return tuple(self._node(row) for row in rows)

    def tips(self, session: bytes) -> tuple[bytes, ...]:
        """The ends of a session's branches."""
        return tuple(row[0] for row in self._ask("SELECT node FROM tips WHERE session = ?", [session]))

    # ---- writing ----

    def node(self, parent: bytes, record: Mapping[str, Any]) -> Node:
        """A message to be added after `parent`."""
        name = digest("keepwarm message 1", parent, canonical_json([record["message"], record.get("generated")]))
        return Node(name, parent, time.time(), dict(record))

    def save(
        self,
        key: bytes,
        salt: str | None,
        head: bytes,
        nodes: Sequence[Node],
        record: Mapping[str, Any],
        turns: int = 0,
    ) -> None:
        """Add messages to a session, made if need be, and move its head."""
        tag = b"" if salt is None else salt_tag(salt_key(salt))
        now = time.time()
        with self._changing() as db:
            for node in nodes:
                db.execute(
                    "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?)",  # the same, or one that was damaged
                    [node.id, node.parent, node.created, self._seal(node.id, node.record)],
                )
            db.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, x'', ?) ON CONFLICT (key) DO UPDATE SET "
                "head = excluded.head, used = excluded.used, turns = turns + ?, record = excluded.record",
                [key, tag, head, now, now, turns, self._seal(key, record), turns],
            )
            above = [node.parent for node in nodes]
            db.execute("INSERT OR IGNORE INTO tips VALUES (?, ?)", [key, head])
            db.executemany("DELETE FROM tips WHERE session = ? AND node = ?", [(key, parent) for parent in above])

    def settled(self, key: bytes, head: bytes) -> None:
        """Note up to where a session's KV is settled."""
        with self._changing() as db:
            db.execute("UPDATE sessions SET settled = ? WHERE key = ?", [head, key])

    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove sessions and the messages that no other session holds; returns how many sessions there were."""
        with self._changing() as db:
            return sum(_drop(db, key) for key in keys)

    def expired(self, seconds: float) -> list[bytes]:
        """Sessions of all salts that were not used for so long."""
        return [row[0] for row in self._ask("SELECT key FROM sessions WHERE used < ?", [time.time() - seconds])]

    def purge(self, tag: bytes) -> int:
        """Remove every session under a salt, so that nothing of it is left in the file."""
        with self._changing() as db:
            gone = [row[0] for row in db.execute("SELECT key FROM sessions WHERE salt = ?", [tag]).fetchall()]
            for key in gone:
                _drop(db, key)
        if gone:
            self._ask("VACUUM")
            self._ask("PRAGMA wal_checkpoint(TRUNCATE)")
        return len(gone)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # ---- records ----

    def _row(self, row: Sequence[Any]) -> SessionRow:
        key, salt, head, created, used, turns, settled, record = row
        return SessionRow(key, salt, head, created, used, turns, settled, self._opened(key, record))

    def _node(self, row: Sequence[Any]) -> Node:
        return Node(row[0], row[1], row[2], self._opened(row[0], row[3]))

    def _seal(self, name: bytes, record: Mapping[str, Any]) -> bytes:
        plain = json.dumps(record, separators=(",", ":"), ensure_ascii=True).encode()
        if self._key is None:
            return hashlib.sha256(name + plain).digest()[:_CHECK_BYTES] + plain
        salt = new_salt()
        return salt + self._key.cipher(f"session {name.hex()}", salt).seal(0, 0, 0, plain)

    def _opened(self, name: bytes, stored: bytes) -> dict[str, Any]:
        if self._key is not None:
            cipher = self._key.cipher(f"session {name.hex()}", stored[:SALT_BYTES])
            plain = cipher.open(0, 0, 0, stored[SALT_BYTES:])
        else:
            plain = stored[_CHECK_BYTES:]
            if hashlib.sha256(name + plain).digest()[:_CHECK_BYTES] != stored[:_CHECK_BYTES]:
                raise CorruptRun(f"the record {name.hex()[:16]} of a session is not what was written")
        record: dict[str, Any] = json.loads(plain)
        return record

    # ---- the database ----

    def _open(self) -> sqlite3.Connection:
        if self._path is None:
            db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA foreign_keys = ON")
            _migrate(db, 0)
            return db
        try:
            return self._connect(self._path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise StoreUnusable(f"the sessions in {self._path} cannot be opened: {error}") from error
            aside = self._path.with_name(f"damaged-{time.time_ns()}.sqlite")
            log.warning("the sessions in %s are damaged (%s); moved to %s", self._path, error, aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(FILE + suffix).unlink(missing_ok=True)
            self._path.replace(aside)
            return self._connect(self._path)

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
            self._check_key(db, path)
        except BaseException:
            db.close()
            raise
        return db

    def _check_key(self, db: sqlite3.Connection, path: Path) -> None:
        mine = "" if self._key is None else self._key.id
        db.execute("INSERT OR IGNORE INTO settings VALUES ('key', ?)", [mine])
        (found,) = db.execute("SELECT value FROM settings WHERE name = 'key'").fetchone()
        if found != mine:
            state = "encrypted under another key" if found else "not encrypted"
            raise StoreLocked(f"the sessions in {path} are {state}: give the store's own key, or none")

    def _ask(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"the sessions cannot be read: {error}") from error

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreError(f"the sessions cannot be written: {error}") from error


def purge_sessions(store: Path, salt_key: bytes, key: StoreKey | None = None) -> int:
    """Remove every session under a salt from a store's folder; returns how many there were. Raises StoreError."""
    if not (store / FOLDER / FILE).exists():
        return 0
    records = Records(store, key)
    try:
        return records.purge(salt_tag(salt_key))
    finally:
        records.close()


def _salt(salt: str | None) -> bytes:
    return b"" if salt is None else salt_key(salt)


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
