"""The catalogue: which blocks are stored, in which run, and how much space is taken or reserved.

Every method is one transaction or none. All raise sqlite3.Error when the catalogue fails; callers treat that as a miss.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keepwarm.core.identity import canonical_json, json_digest
from keepwarm.core.ports import BlockRef
from keepwarm.errors import StoreFull
from keepwarm.store.format import StoredBlock
from keepwarm.store.owner import Owner
from keepwarm.store.schema import WAL_BYTES, connect

LEASE_SECONDS = 600.0
_ROW_BYTES = 1024  # generous: catalogue bytes per block, with its indexes
_VARIABLES = 500  # per query

# A run that another one continues is not given up before it: nobody could reach the other one any more. A reservation
# protects the run it stands on in the same way.
_LEAF = """NOT EXISTS (SELECT 1 FROM blocks own JOIN blocks child ON child.parent_exact = own.exact
                       WHERE own.run = runs.id AND child.run <> runs.id)
       AND NOT EXISTS (SELECT 1 FROM runs waiting JOIN blocks own ON own.exact = waiting.parent
                       WHERE own.run = runs.id AND waiting.state = 'reserved')"""
_REF = "exact, prefix, run, ordinal, start, length"


class Orphan(Exception):
    """The block that a run stands on is not stored (any more), so nobody could reach the run."""


class Described(Protocol):
    """What the catalogue keeps of a run: `format.Run` and `format.RunHeader` both have it."""

    @property
    def namespace(self) -> Mapping[str, Any]: ...

    @property
    def blocks(self) -> tuple[StoredBlock, ...]: ...


@dataclass(frozen=True)
class RunRow:
    """One row of `runs`."""

    id: str
    file: str
    nbytes: int  # of the file
    tokens: int
    start: int
    state: str
    parent: bytes
    created: float
    last_used: float
    namespace: str


class Index:
    """The catalogue of one store, for one process. Safe for use from several threads.

    Access times and counters are noted in memory (`touch`, `count`) and written by `merge` and `reserve`.
    """

    def __init__(self, path: Path, writer: sqlite3.Connection, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._writer = writer
        self._reader = connect(path, writer=False)
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._note_lock = threading.Lock()
        self._clock = clock
        self._used: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def close(self) -> None:
        with self._read_lock, self._write_lock:
            self._reader.close()
            self._writer.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction, committed when the body ends and rolled back when it raises."""
        with self._write_lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                self._writer.rollback()
                raise

    def _read(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._read_lock:
            return self._reader.execute(sql, values).fetchall()

    # What is stored

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """The stored ones of some blocks."""
        found: dict[bytes, BlockRef] = {}
        for at in range(0, len(ids), _VARIABLES):
            part = list(ids[at : at + _VARIABLES])
            marks = ",".join("?" * len(part))
            rows = self._read(f"SELECT {_REF} FROM blocks WHERE exact IN ({marks})", part)
            found.update((row[0], _ref(row)) for row in rows)
        return found

    def children(self, prefix: bytes) -> tuple[BlockRef, ...]:
        """Blocks whose left context has this prefix name, the most recently used run's first."""
        columns = ", ".join(f"b.{name}" for name in _REF.split(", "))
        rows = self._read(
            f"SELECT {columns} FROM blocks b JOIN runs r ON r.id = b.run WHERE b.parent_prefix = ? "
            "ORDER BY r.last_used DESC",
            [prefix],
        )
        return tuple(_ref(row) for row in rows)

    def run(self, run_id: str) -> RunRow | None:
        rows = self.runs("id = ?", [run_id])
        return rows[0] if rows else None

    def runs(self, where: str = "state = 'live'", values: Sequence[Any] = ()) -> list[RunRow]:
        """Rows of `runs`, the least recently used first."""
        rows = self._read(
            "SELECT id, file, bytes, tokens, start, state, parent, created, last_used, namespace FROM runs "
            f"WHERE {where} ORDER BY last_used, created, id",
            values,
        )
        return [RunRow(*row) for row in rows]

    def block_counts(self) -> dict[str, int]:
        """Blocks by run."""
        return {row[0]: row[1] for row in self._read("SELECT run, count(*) FROM blocks GROUP BY run")}

    def totals(self) -> tuple[int, int]:
        """Blocks stored, and bytes of their files."""
        blocks = self._read("SELECT count(*) FROM blocks")[0][0]
        size = self._read("SELECT coalesce(sum(bytes), 0) FROM runs WHERE state = 'live'")[0][0]
        return int(blocks), int(size)

    def content(self, content_id: bytes) -> list[dict[str, Any]]:
        """Every stored block with these tokens, whatever came before."""
        rows = self._read(
            "SELECT b.exact, b.prefix, b.run, b.start, b.length, b.parent_exact, b.parent_prefix, n.description "
            "FROM blocks b JOIN runs r ON r.id = b.run JOIN namespaces n ON n.digest = r.namespace "
            "WHERE b.content = ? ORDER BY r.last_used DESC LIMIT 64",
            [content_id],
        )
        keys = ("id", "prefix", "run_id", "start", "length", "parent_exact", "parent_prefix")
        return [dict(zip(keys, row[:7], strict=True)) | {"namespace": json.loads(row[7])} for row in rows]

    def blocks_like(self, prefix: bytes) -> list[BlockRef]:
        """Blocks whose id starts with these bytes; at most 8."""
        rows = self._read(f"SELECT {_REF} FROM blocks WHERE substr(exact, 1, ?) = ? LIMIT 8", [len(prefix), prefix])
        return [_ref(row) for row in rows]

    def block_ids(self, run_id: str) -> list[bytes]:
        """The blocks of a run, in order."""
        return [row[0] for row in self._read("SELECT exact FROM blocks WHERE run = ? ORDER BY ordinal", [run_id])]

    def continued_by(self, block_id: bytes) -> list[str]:
        """Runs with a block that stands on this one."""
        return [row[0] for row in self._read("SELECT DISTINCT run FROM blocks WHERE parent_exact = ?", [block_id])]

    def namespaces(self) -> dict[str, dict[str, Any]]:
        """Descriptions of all namespaces ever stored, by digest."""
        return {row[0]: json.loads(row[1]) for row in self._read("SELECT digest, description FROM namespaces")}

    def names(self) -> dict[str, bytes]:
        """Leaf block ids by given name."""
        return {row[0]: row[1] for row in self._read("SELECT name, leaf FROM names ORDER BY created")}

    def counters(self) -> dict[str, int]:
        """Counters of all processes so far."""
        return {row[0]: row[1] for row in self._read("SELECT name, value FROM counters")}

    # Notes: written later, so that a hit never writes

    def touch(self, run_ids: Iterable[str]) -> None:
        """Note that runs were used now."""
        now = self._clock()
        with self._note_lock:
            self._used.update((run_id, now) for run_id in run_ids)

    def count(self, name: str, delta: int = 1) -> None:
        """Note that something happened."""
        with self._note_lock:
            self._counts[name] += delta

    def merge(self) -> None:
        """Write the notes. On failure they are kept for the next time."""
        with self._note_lock:
            if not self._used and not self._counts:
                return
        with self._noted() as (used, counts), self.transaction() as db:
            _write_notes(db, used, counts)

    @contextmanager
    def _noted(self) -> Iterator[tuple[dict[str, float], Counter[str]]]:
        """The notes so far; put back when the body raises."""
        with self._note_lock:
            used, counts = self._used, self._counts
            self._used, self._counts = {}, Counter()
        try:
            yield used, counts
        except BaseException:
            with self._note_lock:
                self._used = used | self._used
                self._counts.update(counts)
            raise

    # Storing: reserve, write the file, publish

    def reserve(self, run_id: str, file: str, need: int, cap: int, described: Described) -> list[RunRow]:
        """Take `need` bytes for a file before it is written; returns the runs given up, whose files are now to be
        unlinked.

        Raises StoreFull when `need` does not fit under `cap` (nothing is given up then), and Orphan when the run does
        not start at position 0 and its parent block is not stored.
        """
        blocks = described.blocks
        parent = blocks[0].parent
        need_rows = _ROW_BYTES * len(blocks)
        with self._noted() as (used, counts), self.transaction() as db:
            _write_notes(db, used, counts)
            given_up = self._expire(db)
            if blocks[0].start and not db.execute("SELECT 1 FROM blocks WHERE exact = ?", [parent]).fetchone():
                raise Orphan(run_id)
            now = self._clock()
            db.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, 'reserved', ?, ?, ?, ?, ?, ?)",
                [
                    run_id,
                    file,
                    need,
                    sum(block.length for block in blocks),
                    blocks[0].start,
                    parent,
                    str(Owner.current()),
                    now + LEASE_SECONDS,
                    now,
                    now,
                    namespace_digest(described.namespace),
                ],
            )
            free = cap - need_rows - self._overhead(db)
            taken = int(db.execute("SELECT sum(bytes) FROM runs").fetchone()[0])
            if need > free:
                raise StoreFull(f"a run of {need} bytes does not fit into {cap} bytes on disk")
            while taken > free:
                victim = _victim(db)
                if victim is None:
                    raise StoreFull(f"no run can be given up for {need} bytes under the cap of {cap}")
                db.execute("DELETE FROM runs WHERE id = ?", [victim.id])
                taken -= victim.nbytes
                given_up.append(victim)
        return given_up

    def publish(self, run_id: str, described: Described) -> int | None:
        """Make a written run live; returns how many of its blocks nobody had stored meanwhile.

        0 means that the run was not needed and its row is gone; None that the reservation had been lost. In both cases
        the caller unlinks the file.
        """
        with self.transaction() as db:
            now = self._clock()
            changed = db.execute(
                "UPDATE runs SET state = 'live', lease = NULL, last_used = ? WHERE id = ? AND state = 'reserved'",
                [now, run_id],
            ).rowcount
            if not changed:
                return None
            added = _insert_blocks(db, run_id, described)
            if not added:
                db.execute("DELETE FROM runs WHERE id = ?", [run_id])
            return added

    def adopt(self, run_id: str, file: str, size: int, written: float, described: Described) -> None:
        """Enter a run whose file is there already (when the catalogue is made again)."""
        blocks = described.blocks
        with self.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, 'live', ?, ?, NULL, ?, ?, ?)",
                [
                    run_id,
                    file,
                    size,
                    sum(block.length for block in blocks),
                    blocks[0].start,
                    blocks[0].parent,
                    str(Owner.current()),
                    written,
                    written,
                    namespace_digest(described.namespace),
                ],
            )
            if not _insert_blocks(db, run_id, described):
                db.execute("DELETE FROM runs WHERE id = ?", [run_id])

    def forget(self, run_ids: Iterable[str]) -> list[RunRow]:
        """Drop runs, or reservations; returns those that were there."""
        gone: list[RunRow] = []
        with self.transaction() as db:
            for run_id in run_ids:
                row = _row(db, run_id)
                if row is not None:
                    db.execute("DELETE FROM runs WHERE id = ?", [run_id])
                    gone.append(row)
        return gone

    def expire(self) -> list[RunRow]:
        """Drop reservations whose process is gone or whose lease has ended; returns them."""
        with self.transaction() as db:
            return self._expire(db)

    def set_name(self, name: str, leaf: bytes) -> None:
        """Give a name to the prompt that ends with a block; a name in use is moved."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?)", [name, leaf, self._clock()])

    def _expire(self, db: sqlite3.Connection) -> list[RunRow]:
        me, now = Owner.current(), self._clock()
        gone: list[RunRow] = []
        for run_id, owner, lease in db.execute("SELECT id, owner, lease FROM runs WHERE state = 'reserved'").fetchall():
            holder = Owner.parse(owner)
            if holder is None or holder.is_dead(me) or (lease or 0.0) < now:
                row = _row(db, run_id)
                db.execute("DELETE FROM runs WHERE id = ?", [run_id])
                if row is not None:
                    gone.append(row)
        return gone

    def _overhead(self, db: sqlite3.Connection) -> int:
        """Bytes of the catalogue itself, which the cap covers too."""
        pages = int(db.execute("PRAGMA page_count").fetchone()[0])
        return pages * int(db.execute("PRAGMA page_size").fetchone()[0]) + WAL_BYTES


def namespace_digest(description: Mapping[str, Any]) -> str:
    """Hex name of a namespace in the catalogue."""
    return json_digest("keepwarm namespace 1", description)


def _ref(row: Sequence[Any]) -> BlockRef:
    block_id, prefix, run_id, ordinal, start, length = row
    return BlockRef(block_id, prefix, run_id, ordinal, start, length, "disk")


def _victim(db: sqlite3.Connection) -> RunRow | None:
    """What to give up next: quarantined files, then the least recently used run that no other continues."""
    for condition in ("state = 'quarantined'", f"state = 'live' AND {_LEAF}"):
        # In the order of an index, so that only the oldest runs are asked whether another continues them.
        order = "ORDER BY last_used, created, id LIMIT 1"
        row = db.execute(f"SELECT id FROM runs WHERE {condition} {order}").fetchone()
        if row is not None:
            return _row(db, row[0])
    return None


def _row(db: sqlite3.Connection, run_id: str) -> RunRow | None:
    row = db.execute(
        "SELECT id, file, bytes, tokens, start, state, parent, created, last_used, namespace FROM runs WHERE id = ?",
        [run_id],
    ).fetchone()
    return None if row is None else RunRow(*row)


def _insert_blocks(db: sqlite3.Connection, run_id: str, described: Described) -> int:
    description = canonical_json(described.namespace)
    db.execute("INSERT OR IGNORE INTO namespaces VALUES (?, ?)", [namespace_digest(described.namespace), description])
    rows = [
        (b.id, run_id, b.ordinal, b.start, b.length, b.prefix, b.parent, b.parent_prefix, b.content)
        for b in described.blocks
    ]
    return db.executemany("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows).rowcount


def _write_notes(db: sqlite3.Connection, used: Mapping[str, float], counts: Mapping[str, int]) -> None:
    db.executemany(
        "UPDATE runs SET last_used = max(last_used, ?) WHERE id = ?", [(when, run_id) for run_id, when in used.items()]
    )
    db.executemany(
        "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
        list(counts.items()),
    )
