"""The database of sessions: in the store's folder, or in memory without a store.

A session is a tree of messages that only ever grows, and a head: the message that the next turn continues. A message's
name depends on everything up to it, so branches and forks share their common messages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepwarm.core.identity import canonical_json, digest, salt_key, salt_tag
from keepwarm.errors import CorruptRun, StoreLocked
from keepwarm.store.admin.conversations import Conversations
from keepwarm.store.admin.purge_epochs import Epochs
from keepwarm.store.disk.room import TakeRoom
from keepwarm.store.runfile.crypto import SALT_BYTES, StoreKey, new_salt

log = logging.getLogger(__name__)

_CHECK_BYTES = 16
_ANSWER = b"answer:"  # keys of answers that are kept by an id (`kept`) begin with this; they are no conversations


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
    """One session as stored in the database."""

    key: bytes
    salt: bytes
    head: bytes
    created: float
    used: float
    turns: int
    settled: bytes
    record: dict[str, Any]  # "name"; "tools", "documents", "tool_order", "template_args" of the last turn

    @property
    def name(self) -> str:
        return str(self.record["name"])


class Records:
    """Threads and processes may share one folder. Raises StoreError when the database refuses something."""

    def __init__(
        self,
        store: Path | None,
        key: StoreKey | None = None,
        epochs: Epochs | None = None,
        room: TakeRoom = lambda part, need: nullcontext(),
    ) -> None:
        """`key`, `epochs` and `room` are the store's. Records are sealed with the key.

        Raises StoreNotWritable, StoreUnusable, StoreTooNew and StoreLocked.
        """
        self._key = key
        self._epochs = Epochs(store) if epochs is None else epochs
        self._kept = Conversations(store, self._check_key, room)

    # ---- names ----

    def session_key(self, name: str, salt: str | None) -> bytes:
        """Return the key of a session. Its name alone, without the salt, does not find it."""
        return self._hidden(digest("keepwarm session 1", _salt(salt), name))

    def root(self, salt: str | None) -> bytes:
        """Return the parent of a conversation's first message."""
        return self._hidden(digest("keepwarm session root 1", _salt(salt)))

    def answer_key(self, name: str, salt: str | None) -> bytes:
        """Return the key of an answer that is kept by its id."""
        return _ANSWER + self._hidden(digest("keepwarm answer 1", _salt(salt), name))

    def answer_root(self, salt: str | None) -> bytes:
        """Return the parent of a kept answer's first item."""
        return self._hidden(digest("keepwarm answer root 1", _salt(salt)))

    def _hidden(self, name: bytes) -> bytes:
        """Return a name that, in an encrypted store, tells nothing about the content without the key."""
        return name if self._key is None else self._key.hidden(name)

    # ---- reading ----

    def session(self, key: bytes) -> SessionRow | None:
        """Return a session; None if there is none. Raises CorruptRun for a damaged record."""
        row = self._kept.ask("SELECT * FROM sessions WHERE key = ?", [key])
        return self._row(row[0]) if row else None

    def sessions(self, salt: str | None = None) -> Iterator[SessionRow]:
        """Yield all sessions under a salt (None: under none), the last used first. Damaged ones are left out."""
        query = "SELECT * FROM sessions WHERE salt = ? AND substr(key, 1, ?) != ? ORDER BY used DESC, key"
        for row in self._kept.ask(query, [_tag(salt), len(_ANSWER), _ANSWER]):
            try:
                yield self._row(row)
            except CorruptRun as error:
                log.warning("a stored session cannot be used: %s", error)

    def path(self, head: bytes) -> tuple[Node, ...]:
        """Return the messages from the first to `head`. Raises CorruptRun."""
        rows = self._kept.ask(
            "WITH RECURSIVE up(id, parent, created, record, back) AS ("
            "SELECT id, parent, created, record, 0 FROM nodes WHERE id = ? UNION ALL "
            "SELECT n.id, n.parent, n.created, n.record, back + 1 FROM nodes n JOIN up ON n.id = up.parent) "
            "SELECT id, parent, created, record FROM up ORDER BY back DESC",
            [head],
        )
        return tuple(self._node(row) for row in rows)

    def children(self, parent: bytes) -> tuple[Node, ...]:
        """Return the messages that follow one, in all branches and sessions, oldest first. Raises CorruptRun."""
        rows = self._kept.ask(
            "SELECT id, parent, created, record FROM nodes WHERE parent = ? ORDER BY created, id", [parent]
        )
        return tuple(self._node(row) for row in rows)

    def tips(self, session: bytes) -> tuple[bytes, ...]:
        """Return the last messages of a session's branches."""
        return tuple(row[0] for row in self._kept.ask("SELECT node FROM tips WHERE session = ?", [session]))

    # ---- writing ----

    def node(self, parent: bytes, record: Mapping[str, Any]) -> Node:
        """Make a message that is to follow `parent`."""
        name = digest("keepwarm message 1", parent, canonical_json([record["message"], record.get("generated")]))
        return Node(name, parent, time.time(), dict(record))

    def save(
        self,
        key: bytes,
        salt: str | None,
        head: bytes,
        nodes: Sequence[Node],
        record: Mapping[str, Any],
        epoch: int,
        turns: int = 0,
    ) -> None:
        """Add messages to a session, creating it if needed, and move its head. `epoch` is that of the store when the
        turn began. Raises PurgedMeanwhile."""
        tag, now = _tag(salt), time.time()
        rows = [(node.id, node.parent, node.created, self._seal(node.id, node.record)) for node in nodes]
        with self._kept.changing(sum(len(row[3]) for row in rows)) as db:
            self._epochs.check(epoch, [tag] if tag else [])  # a purge too late for this check removes what is added
            # A node that is there already is equal or damaged, so it may be replaced.
            db.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?)", rows)
            db.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, x'', ?) ON CONFLICT (key) DO UPDATE SET "
                "head = excluded.head, used = excluded.used, turns = turns + ?, record = excluded.record",
                [key, tag, head, now, now, turns, self._seal(key, record), turns],
            )
            above = [node.parent for node in nodes]
            db.execute("INSERT OR IGNORE INTO tips VALUES (?, ?)", [key, head])
            db.executemany("DELETE FROM tips WHERE session = ? AND node = ?", [(key, parent) for parent in above])

    def settled(self, key: bytes, head: bytes) -> None:
        """Note up to which message a session's KV is settled."""
        with self._kept.changing() as db:
            db.execute("UPDATE sessions SET settled = ? WHERE key = ?", [head, key])

    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove sessions and the messages that no other session holds. Return how many sessions were removed."""
        return self._kept.drop(keys)

    def expired(self, seconds: float) -> list[bytes]:
        """Return the sessions, of all salts, that have been unused for longer than `seconds`."""
        return [row[0] for row in self._kept.ask("SELECT key FROM sessions WHERE used < ?", [time.time() - seconds])]

    def old_answers(self, salt: str | None, most: int, seconds: float) -> list[bytes]:
        """Return the keys of the kept answers under a salt that are beyond the limit, or older than `seconds`."""
        query = "SELECT key, created FROM sessions WHERE salt = ? AND substr(key, 1, ?) = ? ORDER BY created DESC, key"
        found = self._kept.ask(query, [_tag(salt), len(_ANSWER), _ANSWER])
        until = time.time() - seconds
        return [key for number, (key, created) in enumerate(found) if number >= most or created < until]

    def purged(self, tags: Collection[bytes]) -> None:
        """Remove the sessions of purged salts from memory. In a folder, the process that purges removes them."""
        if self._kept.in_memory:
            self._kept.purge(tags)

    def close(self) -> None:
        self._kept.close()

    def _check_key(self, db: sqlite3.Connection, path: Path) -> None:
        mine = "" if self._key is None else self._key.id
        db.execute("INSERT OR IGNORE INTO settings VALUES ('key', ?)", [mine])
        (found,) = db.execute("SELECT value FROM settings WHERE name = 'key'").fetchone()
        if found != mine:
            state = "encrypted under another key" if found else "not encrypted"
            raise StoreLocked(f"the sessions in {path} are {state}: give the store's own key, or none")

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


def _salt(salt: str | None) -> bytes:
    return b"" if salt is None else salt_key(salt)


def _tag(salt: str | None) -> bytes:
    """Return the tag of a salt in the database; empty for none."""
    return b"" if salt is None else salt_tag(salt_key(salt))
