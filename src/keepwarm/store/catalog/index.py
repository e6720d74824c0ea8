"""The catalogue: which blocks are stored, in which run, and how much space is taken or reserved.

Every method is one transaction or none. All raise sqlite3.Error when the catalogue fails; callers treat that as a miss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from keepwarm.core.ports import BlockRef
from keepwarm.store.catalog import ranking
from keepwarm.store.catalog import reservations as reserving
from keepwarm.store.catalog.chains import SHORT, find_chain
from keepwarm.store.catalog.database import Database
from keepwarm.store.catalog.rows import COLUMNS, SNAPSHOT_SPACES, RunRow, Wanted
from keepwarm.store.catalog.schema import UNFILLED
from keepwarm.store.disk.room import granted, left_out
from keepwarm.store.retention import Retention, Rules
from keepwarm.store.runfile.layout import NEIGHBOURS, Described

_VARIABLES = 500  # per query
_SORTED = 16  # times the number of blocks asked for: at most this many are sorted
_REF = "exact, prefix, run, ordinal, start, length"
_SIDES = [
    f"SELECT * FROM (SELECT {table}.lead, {_REF} FROM {joined} WHERE {behind} = ?1 AND {table}.lead {side} ?2 "
    f"ORDER BY {table}.lead {order} LIMIT {NEIGHBOURS})"
    for table, joined, behind in (
        ("blocks", "blocks", "parent_exact"),
        ("rests", "rests JOIN blocks USING (exact)", "behind"),
    )
    for side, order in (("<=", "DESC"), (">", "ASC"))
]
_BESIDE = " UNION ALL ".join(_SIDES)
# How many other runs continue the KV of run `r`. Snapshots do not count: one stands on a block, and moves with it.
_KV_CHILDREN = f"""(r.children - (SELECT count(*) FROM edges s JOIN runs c ON c.id = s.child
    WHERE s.parent = r.id AND c.namespace IN ({SNAPSHOT_SPACES})))"""
# The snapshots of recurrent state of the runs that lead to a block, up to its end.
_SNAPSHOTS_OF = f"""SELECT r.id FROM edges e JOIN runs r ON r.id = e.child
    WHERE e.parent IN (SELECT value FROM json_each(?2)) AND r.state = 'live' AND r.namespace IN ({SNAPSHOT_SPACES})
      AND r.start + r.tokens <= (SELECT start + length FROM blocks WHERE exact = ?1)"""


class Index:
    """The queries and changes of a catalogue."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # What is stored

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """Return the blocks that are stored."""
        found: dict[bytes, BlockRef] = {}
        for at in range(0, len(ids), _VARIABLES):
            part = list(ids[at : at + _VARIABLES])
            marks = ",".join("?" * len(part))
            rows = self.database.read(f"SELECT {_REF} FROM blocks WHERE exact IN ({marks})", part)
            found.update((row[0], _ref(row)) for row in rows)
        return found

    def chain(self, ids: Sequence[bytes]) -> list[BlockRef]:
        """Return the longest leading part of a chain of blocks that is stored."""
        found = find_chain(self.database.read, ids) if len(ids) > SHORT else None
        if found is not None:
            return found
        rows = self.find(ids)
        return [rows[block_id] for block_id in takewhile(rows.__contains__, ids)]

    def children(self, prefix: bytes, most: int | None = None) -> tuple[BlockRef, ...]:
        """Return at most `most` blocks whose left context has this prefix name, the most recently used run's first. Of
        thousands of blocks, only some are sorted."""
        columns = ", ".join(f"b.{name}" for name in _REF.split(", "))
        rows = self.database.read(
            f"SELECT {columns} FROM (SELECT * FROM blocks WHERE parent_prefix = ? LIMIT ?) b "
            "JOIN runs r ON r.id = b.run ORDER BY r.last_used DESC LIMIT ?",
            [prefix, -1 if most is None else _SORTED * most, -1 if most is None else most],
        )
        return tuple(_ref(row) for row in rows)

    def beside(self, parent: bytes, wanted: bytes) -> list[tuple[bytes, BlockRef]]:
        """Return the blocks right behind a parent whose leads are next to `wanted` in order, each with its lead."""
        rows = self.database.read(_BESIDE, [parent, wanted])
        return [(row[0], _ref(row[1:])) for row in rows]

    def unsorted(self, parent: bytes) -> list[BlockRef]:
        """Return a few blocks right behind a parent whose lead the catalogue does not hold, last used runs first."""
        columns = ", ".join(f"b.{name}" for name in _REF.split(", "))
        rows = self.database.read(
            f"SELECT {columns} FROM blocks b JOIN runs r ON r.id = b.run WHERE b.parent_exact = ? AND b.lead IS NULL "
            f"ORDER BY r.last_used DESC LIMIT {2 * NEIGHBOURS}",
            [parent],
        )
        return [_ref(row) for row in rows]

    def run(self, run_id: str) -> RunRow | None:
        rows = self.runs("id = ?", [run_id])
        return rows[0] if rows else None

    def runs(self, where: str = "state = 'live'", values: Sequence[Any] = ()) -> list[RunRow]:
        """Rows of `runs`, the least recently used first."""
        rows = self.database.read(f"SELECT {COLUMNS} FROM runs WHERE {where} ORDER BY last_used, seq, id", values)
        return [RunRow(*row) for row in rows]

    def files(self) -> list[tuple[str, str, str]]:
        """Run id, file and state of every file that the catalogue names."""
        rows = self.database.read("SELECT id, file, state FROM runs UNION ALL SELECT id, file, 'reserved' FROM doomed")
        return [(row[0], row[1], row[2]) for row in rows]

    def run_count(self) -> int:
        """Number of live runs."""
        return int(self.database.read("SELECT value FROM facts WHERE name = 'runs'")[0][0])

    def block_counts(self) -> dict[str, int]:
        """Number of blocks by run."""
        return {row[0]: row[1] for row in self.database.read("SELECT run, count(*) FROM blocks GROUP BY run")}

    def totals(self) -> tuple[int, int]:
        """Number of stored blocks, and bytes of the files of live runs."""
        blocks = self.database.read("SELECT count(*) FROM blocks")[0][0]
        size = self.database.read("SELECT coalesce(sum(bytes), 0) FROM runs WHERE state = 'live'")[0][0]
        return int(blocks), int(size)

    def snapshots(self) -> tuple[int, int]:
        """Number of stored snapshots of recurrent state, and bytes of their files. `totals` includes them."""
        where = f"state = 'live' AND namespace IN ({SNAPSHOT_SPACES})"
        count, size = self.database.read(f"SELECT count(*), coalesce(sum(bytes), 0) FROM runs WHERE {where}")[0]
        return int(count), int(size)

    def content(self, content_id: bytes) -> list[dict[str, Any]]:
        """Return the stored blocks with these tokens, whatever came before; at most 64."""
        rows = self.database.read(
            "SELECT b.exact, b.prefix, b.run, b.start, b.length, b.parent_exact, b.parent_prefix, n.description "
            "FROM blocks b JOIN runs r ON r.id = b.run JOIN namespaces n ON n.digest = r.namespace "
            "WHERE b.content = ? ORDER BY r.last_used DESC LIMIT 64",
            [content_id],
        )
        keys = ("id", "prefix", "run_id", "start", "length", "parent_exact", "parent_prefix")
        return [dict(zip(keys, row[:7], strict=True)) | {"namespace": json.loads(row[7])} for row in rows]

    def blocks_like(self, prefix: bytes) -> list[BlockRef]:
        """Blocks whose id starts with these bytes; at most 8."""
        rows = self.database.read(
            f"SELECT {_REF} FROM blocks WHERE substr(exact, 1, ?) = ? LIMIT 8", [len(prefix), prefix]
        )
        return [_ref(row) for row in rows]

    def block_ids(self, run_id: str) -> list[bytes]:
        """The blocks of a run, in order."""
        return [
            row[0] for row in self.database.read("SELECT exact FROM blocks WHERE run = ? ORDER BY ordinal", [run_id])
        ]

    def continued_by(self, block_id: bytes) -> list[str]:
        """Runs with a block that stands on this one."""
        return [
            row[0] for row in self.database.read("SELECT DISTINCT run FROM blocks WHERE parent_exact = ?", [block_id])
        ]

    def eviction_reason(self, block_id: bytes) -> str | None:
        """Why a block is no longer here; None when nothing was noted."""
        rows = self.database.read("SELECT why FROM evictions WHERE id = ?", [block_id])
        return rows[0][0] if rows else None

    def namespaces(self) -> dict[str, dict[str, Any]]:
        """Descriptions of all namespaces ever stored, by digest."""
        return {row[0]: json.loads(row[1]) for row in self.database.read("SELECT digest, description FROM namespaces")}

    def names(self) -> dict[str, bytes]:
        """Leaf block ids by given name."""
        return {row[0]: row[1] for row in self.database.read("SELECT name, leaf FROM names ORDER BY created")}

    def setting(self, name: str) -> str | None:
        """A fact about the store itself."""
        rows = self.database.read("SELECT value FROM settings WHERE name = ?", [name])
        return rows[0][0] if rows else None

    def set_setting(self, name: str, value: str) -> None:
        with self.database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", [name, value])

    def counters(self) -> dict[str, int]:
        """Counters of all processes so far."""
        return {row[0]: row[1] for row in self.database.read("SELECT name, value FROM counters")}

    def retention(self, run_id: str) -> Retention | None:
        """The retention that was asked for a run, if any."""
        rows = self.database.read("SELECT priority, ttl, expires FROM runs WHERE id = ? AND ttl IS NOT NULL", [run_id])
        return Retention(*rows[0]) if rows else None

    def places(self) -> dict[str, tuple[str | None, frozenset[bytes], int, float | None]]:
        """Return for every live run: the run it continues, the tags of its salts, how often it was used, until when it
        is pinned."""
        above = {child: parent for parent, child in self.database.read("SELECT parent, child FROM edges")}
        tags: dict[str, set[bytes]] = {}
        for run_id, tag in self.database.read("SELECT run, tag FROM salts"):
            tags.setdefault(run_id, set()).add(tag)
        rows = self.database.read("SELECT id, uses, priority, expires FROM runs WHERE state = 'live'")
        return {
            run_id: (above.get(run_id), frozenset(tags.get(run_id, ())), uses, expires if priority else None)
            for run_id, uses, priority, expires in rows
        }

    def written_today(self) -> int:
        """Bytes of run files that all processes wrote, or began to write, on this UTC day."""
        day = int(self.database.clock() // reserving.DAY)
        return int(self.database.read("SELECT coalesce(sum(bytes), 0) FROM writes WHERE day = ?", [day])[0][0])

    def small_chain(self, run_id: str, small: int, largest: int) -> list[RunRow]:
        """Return the chain of small runs that ends with a run, in order. Each run except the last is continued only by
        the next one (and by snapshots), which begins where it ends. It is at most twice as large as all that follows it
        (or at most `small` bytes), and is under the same salts. All together have at most `largest` bytes."""
        row = self.run(run_id)
        chain: list[RunRow] = []
        total = 0
        while row is not None and row.state == "live" and total + row.nbytes <= largest:
            if chain and row.nbytes > max(small, 2 * total):
                break
            chain.insert(0, row)
            total += row.nbytes
            above = self.database.read(
                "SELECT r.id FROM edges e JOIN runs r ON r.id = e.parent JOIN blocks b ON b.run = r.id "
                f"WHERE e.child = ?1 AND {_KV_CHILDREN} = 1 AND (SELECT count(*) FROM edges WHERE child = ?1) = 1 "
                "AND b.exact = (SELECT parent_exact FROM blocks WHERE run = ?1 ORDER BY ordinal LIMIT 1) "
                "AND b.ordinal = (SELECT max(ordinal) FROM blocks WHERE run = r.id) "
                "AND b.start + b.length = (SELECT min(start) FROM blocks WHERE run = ?1) "
                "AND (SELECT group_concat(hex(tag)) FROM salts WHERE run = r.id) "
                "IS (SELECT group_concat(hex(tag)) FROM salts WHERE run = ?1)",
                [row.id],
            )
            row = self.run(above[0][0]) if above else None
        return chain

    def mostly_dead(self, run_id: str) -> bool:
        """Whether other runs serve at least half of a run's tokens."""
        return bool(
            self.database.read("SELECT 1 FROM runs WHERE id = ? AND state = 'live' AND dead * 2 >= tokens", [run_id])
        )

    def chain_ends(self) -> list[str]:
        """Live runs that continue another run and are continued by snapshots at most, and runs that are mostly dead."""
        sql = (
            f"SELECT id FROM runs r WHERE state = 'live' AND namespace NOT IN ({SNAPSHOT_SPACES}) "
            f"AND ({_KV_CHILDREN} = 0 AND start > 0 OR dead * 2 >= tokens)"
        )
        return [row[0] for row in self.database.read(sql)]

    # Storing: reserve, write the file, publish

    def reserve(
        self,
        wanted: Wanted,
        cap: int,
        rules: Rules,
        unlinked: Iterable[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> list[RunRow]:
        """Reserve space for a run's file before it is written, and evict runs if needed.

        When rows are returned, nothing is reserved yet: unlink their files, then call again with their ids as
        `unlinked`.

        Raises StoreFull when the run does not fit under `cap` (nothing is evicted then), Orphan when the run does not
        start at position 0 and its parent block is not stored, BudgetSpent, and what `check` raises. A purge that
        `check` does not see yet removes the run.
        """
        with self.database.noted() as write, self.database.transaction() as db:
            check()
            write(db)
            reserving.unlinked(db, unlinked)
            return reserving.take(db, wanted, cap, rules, self.database.clock())

    def reserve_spare(self, wanted: Wanted, cap: int, rules: Rules) -> list[RunRow]:
        """Reserve as `reserve` does, but only free space, and only within half of the day's bytes."""
        with self.database.transaction() as db:
            now = self.database.clock()
            return reserving.take(db, wanted, cap, rules, now, evicting=False, budget_part=0.5)

    def take_room(self, name: str, need: int, cap: int, rules: Rules, unlinked: Iterable[str] = ()) -> list[RunRow]:
        """Reserve as `reserve` does, for data other than runs. It is never refused."""
        with self.database.transaction() as db:
            reserving.unlinked(db, unlinked)
            return reserving.take_room(db, name, need, cap, rules, self.database.clock())

    def release_room(self, name: str, cap: int) -> None:
        """Drop the reservation of `take_room`: the data is there now, and its own size counts."""
        with self.database.transaction() as db:
            reserving.doom(db, [name])
            reserving.unlinked(db, [name])
            left_out(db, cap)

    def granted(self, part: str) -> int:
        """Bytes that a part of the folder may have without a reservation."""
        found = self.database.read(*granted(part))
        return int(found[0][0]) if found else 0

    def is_reserved(self, run_id: str) -> bool:
        """Whether the space for a run is still reserved."""
        return bool(self.database.read("SELECT 1 FROM runs WHERE id = ? AND state = 'reserved'", [run_id]))

    def publish(self, run_id: str, described: Described, ttl: float | None = None) -> int | None:
        """Make a written run live. Return how many of its blocks are new.

        0 means that others stored them all meanwhile, and the run's row is gone. None means that the reservation was
        lost. In both cases the caller unlinks the file.
        """
        with self.database.transaction() as db:
            now = self.database.clock()
            kept = None if ttl is None else Retention.beginning(now, ttl, 0)
            return reserving.publish(db, run_id, described, kept, now)

    def replace(self, run_id: str, members: Sequence[RunRow], described: Described) -> bool:
        """Replace runs by a written run that holds their blocks; the caller then unlinks their files. Return False when
        one of them has changed meanwhile."""
        with self.database.transaction() as db:
            return reserving.replace(db, run_id, members, described)

    def adopt_all(self, runs: Iterable[tuple[str, str, int, float, Described]]) -> int:
        """Enter runs whose files exist already, into a new catalogue: id, file, its size and time, and its contents. A
        run that could not be reached, or holds nothing new, is left out. Return how many were entered. The catalogue
        then no longer counts as unfilled."""
        with self.database.transaction() as db:
            db.execute("DELETE FROM settings WHERE name = ?", [UNFILLED])
            return sum(reserving.adopt(db, *run) for run in runs)

    def forget(self, run_ids: Iterable[str]) -> list[RunRow]:
        """Drop runs or reservations, and every run that continues them. Return the rows that were dropped. Their bytes
        count under the cap until `unlinked`."""
        with self.database.transaction() as db:
            return reserving.doom(db, run_ids)

    def unlinked(self, run_ids: Iterable[str]) -> None:
        """Note that the files of dropped runs are unlinked."""
        with self.database.transaction() as db:
            reserving.unlinked(db, run_ids)

    def expire(self) -> list[RunRow]:
        """Drop reservations whose process is gone or whose lease has ended. Return the rows whose files the caller must
        unlink, including all that any process dropped before and has not unlinked yet."""
        with self.database.transaction() as db:
            left = reserving.left_behind(db)
            known = {row.id for row in left}
            return left + [row for row in reserving.expire(db, self.database.clock()) if row.id not in known]

    # What people ask for

    def retain(self, leaf: bytes, ttl: float, priority: int, *, public: bool = True) -> list[str]:
        """Keep the runs from the beginning of a prompt to its last block, and the snapshots up to there. Return their
        ids, or none when the prompt is not stored. Without `public`, runs that are under no salt stay as they are.

        Raises ValueError for a time that is not positive and finite.
        """
        kept = Retention.beginning(self.database.clock(), ttl, priority)
        with self.database.transaction() as db:
            found = [row[0] for row in db.execute("SELECT run FROM blocks WHERE exact = ?", [leaf])]
            for run_id in found:
                above = db.execute("SELECT parent FROM edges WHERE child = ?", [run_id]).fetchall()
                found += [row[0] for row in above if row[0] not in found]
            found += [row[0] for row in db.execute(_SNAPSHOTS_OF, [leaf, json.dumps(found)]) if row[0] not in found]
            reserving.retain(db, found, kept, public=public)
            return found

    def sight(self, ids: Iterable[bytes], check: Callable[[], None] = lambda: None) -> set[bytes]:
        """Return the blocks that any process saw before, and note all of them as seen. Bounded: the oldest notes are
        forgotten. Raises what `check` does, as `reserve`."""
        with self.database.transaction() as db:
            check()
            return ranking.sight(db, ids)

    def set_name(self, name: str, leaf: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Give a name to the prompt that ends with a block; a name in use is moved. Raises what `check` does, as
        `reserve`."""
        with self.database.transaction() as db:
            check()
            db.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?)", [name, leaf, self.database.clock()])


def _ref(row: Sequence[Any]) -> BlockRef:
    block_id, prefix, run_id, ordinal, start, length = row
    return BlockRef(block_id, prefix, run_id, ordinal, start, length, "disk")
