"""Space on disk. It is reserved before bytes are written. Runs are evicted one at a time, each after those that
continue it.

Every function works inside the caller's transaction. Some row always names a file: a reservation is made before the
file, and after eviction a row in `doomed` stays until the file is unlinked. So a process may be killed anywhere, and
the next one knows which files to unlink.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keepwarm.core.identity import canonical_json
from keepwarm.core.schedule import PAGE_ENCODED
from keepwarm.errors import StoreFull
from keepwarm.store.catalog import ranking
from keepwarm.store.catalog.chains import lay_out
from keepwarm.store.catalog.overhead import overhead
from keepwarm.store.catalog.rows import BudgetSpent, Orphan, RunRow, Wanted, namespace_digest, row_of
from keepwarm.store.disk.owner import Owner
from keepwarm.store.disk.room import left_out
from keepwarm.store.retention import EVICTED, EXPIRED, Retention, Rules
from keepwarm.store.runfile.layout import Described, lead_of

LEASE_SECONDS = 600.0
DAY = 86400.0
_ROW_BYTES = 1024  # catalogue bytes per block, with its indexes; a generous estimate
_SLACK = 64 << 10  # bytes that the catalogue's trees may grow by when pages split


def take(
    db: sqlite3.Connection,
    wanted: Wanted,
    cap: int,
    rules: Rules,
    now: float,
    *,
    evicting: bool = True,
    budget_part: float = 1.0,
) -> list[RunRow]:
    """Reserve space for a run's file. When rows are returned, nothing is reserved yet: the caller unlinks their files,
    calls `unlinked`, and tries again.

    Raises StoreFull when the run does not fit under `cap` (without `evicting`: when it does not fit beside the others),
    Orphan when its parent block is not stored, and BudgetSpent when it would exceed this part of today's bytes.
    """
    me = Owner.current()
    if leftovers := expire(db, now):
        return leftovers
    blocks, need = wanted.described.blocks, wanted.nbytes
    above = db.execute("SELECT run FROM blocks WHERE exact = ?", [blocks[0].parent]).fetchone()
    if blocks[0].start and above is None:
        raise Orphan(wanted.id)
    day = int(now // DAY)
    written = db.execute("SELECT coalesce(sum(bytes), 0) FROM writes WHERE day = ?", [day]).fetchone()[0]
    if rules.writes_per_day is not None and written + need > rules.writes_per_day * budget_part:
        raise BudgetSpent(f"{written} of {rules.writes_per_day} bytes are written today; this run has {need}")
    others = left_out(db, cap)
    free = cap - _SLACK - _ROW_BYTES * len(blocks) - overhead(db, len(blocks)) - others
    if need > free:
        raise StoreFull(
            f"a run of {need} bytes does not fit into {cap} bytes on disk, {others} of which are for other data than KV"
        )
    over = ranking.fact(db, "bytes") + need - free
    if over > 0 and (leftovers := left_behind(db, lambda owner: _is_elsewhere(owner, me))):
        return leftovers
    keep = above[0] if above else ""
    victims, over = _give_up(db, over, lambda: next_victim(db, rules, cap, keep, now) if evicting else None, now)
    if over > 0:
        raise StoreFull(f"no run can be evicted for {need} bytes under the cap of {cap}")
    if victims:
        return victims
    _reserve(db, wanted.id, wanted.file, need, now, wanted.described)
    if above:
        db.execute("INSERT INTO edges VALUES (?, ?)", [above[0], wanted.id])
    db.execute(
        "INSERT INTO writes VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET bytes = bytes + excluded.bytes", [day, need]
    )
    db.execute("DELETE FROM writes WHERE day < ?", [day - 31])
    return []


def take_room(db: sqlite3.Connection, name: str, need: int, cap: int, rules: Rules, now: float) -> list[RunRow]:
    """Reserve `need` bytes under a name, for data other than runs. Rows are returned as by `take`, but one run at a
    time, since the log of a transaction counts, too. When no run is left, the space is reserved in any case: data other
    than KV is not refused."""
    if leftovers := expire(db, now):
        return leftovers
    over = ranking.fact(db, "bytes") + need - (cap - _SLACK - overhead(db) - left_out(db, cap))
    victims, _ = _give_up(db, min(over, 1), lambda: next_victim(db, rules, cap, "", now), now)
    if not victims:
        _reserve(db, name, "", need, now)
    return victims


def _give_up(
    db: sqlite3.Connection, over: int, victim: Callable[[], str | None], now: float
) -> tuple[list[RunRow], int]:
    """Drop runs until `over` bytes are free or none is left. Return the dropped runs, and the bytes still missing."""
    gone: list[RunRow] = []
    while over > 0 and (chosen := victim()) is not None:
        ended = db.execute("SELECT 1 FROM runs WHERE id = ? AND expires <= ?", [chosen, now]).fetchone()
        ranking.note_eviction(db, family(db, [chosen]), EXPIRED if ended else EVICTED)
        gone += doom(db, [chosen])
        over -= gone[-1].nbytes
    return gone, over


def _reserve(
    db: sqlite3.Connection, name: str, file: str, need: int, now: float, described: Described | None = None
) -> None:
    columns = "id, file, bytes, tokens, start, state, parent, owner, lease, created, last_used, namespace"
    values: list[Any] = [name, file, need, 0, 0, "reserved", b""]
    if described is not None:
        first, tokens = described.blocks[0], sum(block.length for block in described.blocks)
        values = [name, file, need, tokens, first.start, "reserved", first.parent]
    space = "" if described is None else namespace_digest(described.namespace)
    values += [str(Owner.current()), now + LEASE_SECONDS, now, now, space]
    db.execute(f"INSERT INTO runs ({columns}) VALUES ({','.join('?' * len(values))})", values)


def next_victim(db: sqlite3.Connection, rules: Rules, cap: int, keep: str, now: float) -> str | None:
    """Return the run to evict next: quarantined ones first, then live runs that no other continues; never `keep`."""
    row = db.execute("SELECT id FROM runs WHERE state = 'quarantined' ORDER BY last_used, id LIMIT 1").fetchone()
    return str(row[0]) if row else ranking.evict(db, rules.disk_policy, cap, keep, now)


def doom(db: sqlite3.Connection, run_ids: Iterable[str]) -> list[RunRow]:
    """Drop runs or reservations, and all that continue them. Return them, each before the run it continues; the caller
    unlinks their files."""
    owner = str(Owner.current())
    gone: list[RunRow] = []
    for run_id in family(db, run_ids):
        row = row_of(db, run_id)
        if row is not None:
            db.execute("INSERT OR REPLACE INTO doomed VALUES (?, ?, ?, ?)", [row.id, row.file, row.nbytes, owner])
            db.execute("DELETE FROM runs WHERE id = ?", [run_id])
            gone.append(row)
    return gone


def family(db: sqlite3.Connection, run_ids: Iterable[str]) -> list[str]:
    """Return these runs and all that continue them, each before the run it stands on."""
    order: dict[str, None] = {}
    waiting = [(run_id, False) for run_id in run_ids]
    while waiting:
        run_id, done = waiting.pop()
        if done:
            order[run_id] = None
        elif run_id not in order:
            waiting.append((run_id, True))
            waiting += [(row[0], False) for row in db.execute("SELECT child FROM edges WHERE parent = ?", [run_id])]
    return list(order)


def unlinked(db: sqlite3.Connection, run_ids: Iterable[str]) -> None:
    """Note that files are unlinked: their bytes no longer count."""
    db.executemany("DELETE FROM doomed WHERE id = ?", [(run_id,) for run_id in run_ids])


def publish(
    db: sqlite3.Connection, run_id: str, described: Described, retention: Retention | None, now: float
) -> int | None:
    """Make a written run live. Return how many of its blocks are new.

    0 means that others stored them all meanwhile, None that the reservation was lost. In both cases the run's row is
    gone and the caller unlinks the file.
    """
    changed = db.execute(
        "UPDATE runs SET state = 'live', lease = NULL, last_used = max(created, ?) WHERE id = ? AND state = 'reserved'",
        [now, run_id],
    ).rowcount
    if not changed:
        return None
    added = add_blocks(db, run_id, described)
    if not added:
        doom(db, [run_id])
        return 0
    ranking.enter(db, run_id, described.blocks[0].id)
    if retention is not None:
        retain(db, [run_id], retention)
    return added


def adopt(db: sqlite3.Connection, run_id: str, file: str, size: int, written: float, described: Described) -> bool:
    """Enter a run whose file exists already. Return False when its parent is not stored, or nothing in it is new."""
    blocks = described.blocks
    if blocks[0].start and not db.execute("SELECT 1 FROM blocks WHERE exact = ?", [blocks[0].parent]).fetchone():
        return False
    columns = "id, file, bytes, tokens, start, state, parent, owner, created, last_used, namespace"
    values = [run_id, file, size, sum(block.length for block in blocks), blocks[0].start, "live", blocks[0].parent]
    values += [str(Owner.current()), written, written, namespace_digest(described.namespace)]
    db.execute(f"INSERT INTO runs ({columns}) VALUES ({','.join('?' * len(values))})", values)
    if not add_blocks(db, run_id, described):
        db.execute("DELETE FROM runs WHERE id = ?", [run_id])
        return False
    ranking.enter(db, run_id, blocks[0].id)
    return True


def replace(db: sqlite3.Connection, run_id: str, members: Sequence[RunRow], described: Described) -> bool:
    """Replace runs by a written run, reserved as `run_id`, that holds their blocks. Return False and change nothing
    when one of them is gone or has other blocks by now; the reservation then stays."""
    wanted = [block.id for block in described.blocks]
    found = [
        row[0]
        for member in members
        for row in db.execute("SELECT exact FROM blocks WHERE run = ? ORDER BY ordinal", [member.id])
    ]
    live = all((row := row_of(db, member.id)) is not None and row.state == "live" for member in members)
    if found != wanted or not live:
        return False
    if not db.execute(
        "UPDATE runs SET state = 'live', lease = NULL WHERE id = ? AND state = 'reserved'", [run_id]
    ).rowcount:
        return False
    ranking.inherit(db, run_id, [member.id for member in members])
    db.executemany(
        "UPDATE blocks SET run = ?, ordinal = ? WHERE exact = ?",
        [(run_id, block.ordinal, block.id) for block in described.blocks],
    )
    db.executemany("INSERT OR IGNORE INTO salts VALUES (?, ?)", [(tag, run_id) for tag in described.salts])
    for member in members:  # also those of reservations, which have no blocks yet
        db.execute("INSERT OR IGNORE INTO edges SELECT ?, child FROM edges WHERE parent = ?", [run_id, member.id])
        db.execute("DELETE FROM edges WHERE parent = ?1 OR child = ?1", [member.id])
    db.execute("DELETE FROM edges WHERE parent = ?1 AND child = ?1", [run_id])
    _join(db, run_id)
    lay_out(db, run_id)
    doom(db, [member.id for member in members])
    return True


def add_blocks(db: sqlite3.Connection, run_id: str, described: Described) -> int:
    """Enter a run's blocks that are not stored yet, and which runs continue which. Return how many blocks were new."""
    description = canonical_json(described.namespace)
    db.execute("INSERT OR IGNORE INTO namespaces VALUES (?, ?)", [namespace_digest(described.namespace), description])
    db.executemany("INSERT OR IGNORE INTO salts VALUES (?, ?)", [(tag, run_id) for tag in described.salts])
    sealed = db.execute("SELECT 1 FROM settings WHERE name = 'key' AND value <> ''").fetchone() is not None
    first, tokens = described.blocks[0].start, described.tokens
    rows = [
        (
            b.id,
            run_id,
            b.ordinal,
            b.start,
            b.length,
            b.prefix,
            b.parent,
            b.parent_prefix,
            b.content,
            None
            if sealed or b.shared or b.length > PAGE_ENCODED
            else lead_of(b, tokens[b.start - first : b.end - first]),
        )
        for b in described.blocks
    ]
    added = db.executemany("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows).rowcount
    rests = [
        (b.behind, lead_of(b, tokens[b.start - first : b.end - first]), b.id, run_id)
        for b in described.blocks
        if b.shared
    ]
    db.executemany("INSERT OR IGNORE INTO rests SELECT ?, ?, exact FROM blocks WHERE exact = ? AND run = ?", rests)
    db.execute("DELETE FROM edges WHERE child = ?", [run_id])
    if added < len(rows):
        db.execute(
            "UPDATE runs SET dead = tokens - (SELECT coalesce(sum(length), 0) FROM blocks WHERE run = ?1) "
            "WHERE id = ?1",
            [run_id],
        )
    _join(db, run_id)
    lay_out(db, run_id)
    return added


def _join(db: sqlite3.Connection, run_id: str) -> None:
    """Note which runs this one continues, and which continue it."""
    db.execute(
        "INSERT OR IGNORE INTO edges SELECT DISTINCT own.run, ?1 FROM blocks b "
        "JOIN blocks own ON own.exact = b.parent_exact WHERE b.run = ?1 AND own.run <> ?1",
        [run_id],
    )
    db.execute(
        "INSERT OR IGNORE INTO edges SELECT DISTINCT ?1, child.run FROM blocks b "
        "JOIN blocks child ON child.parent_exact = b.exact WHERE b.run = ?1 AND child.run <> ?1",
        [run_id],
    )


def retain(db: sqlite3.Connection, run_ids: Iterable[str], kept: Retention, *, public: bool = True) -> None:
    """Keep runs longer, or shorter, than the policy would; this replaces earlier requests. Without `public`, only runs
    that are known to be under a salt are changed."""
    salted = "" if public else " AND EXISTS (SELECT 1 FROM salts WHERE run = runs.id AND tag <> x'')"
    db.executemany(
        f"UPDATE runs SET priority = ?, ttl = ?, expires = ? WHERE id = ?{salted}",
        [(kept.priority, kept.ttl, kept.expires, run_id) for run_id in run_ids],
    )


def expire(db: sqlite3.Connection, now: float) -> list[RunRow]:
    """Drop reservations whose process is gone or whose lease has ended, and pins whose time has ended. Return the rows
    whose files the caller must unlink, including those that a process left behind."""
    _mind_the_clock(db, now)
    db.execute("UPDATE runs SET priority = 0, ttl = NULL, expires = NULL WHERE priority > 0 AND expires <= ?", [now])
    me = Owner.current()
    waiting = db.execute("SELECT id, owner, lease FROM runs WHERE state = 'reserved'").fetchall()
    dead = [run_id for run_id, owner, lease in waiting if (lease or 0.0) < now or _is_dead(owner, me)]
    gone = doom(db, dead)
    known = {row.id for row in gone}
    left = left_behind(db, lambda owner: owner == str(me) or _is_dead(owner, me))
    return gone + [row for row in left if row.id not in known]


def left_behind(db: sqlite3.Connection, of: Callable[[str], bool] = lambda owner: True) -> list[RunRow]:
    """Return the runs that these owners evicted and have not unlinked yet. Any process may unlink them, even while the
    owner lives: a run's id is never used again."""
    rows = db.execute("SELECT id, file, bytes, owner FROM doomed").fetchall()
    return [
        RunRow(run_id, file, nbytes, 0, 0, "doomed", b"", 0.0, 0.0, "")
        for run_id, file, nbytes, owner in rows
        if of(owner)
    ]


def _is_elsewhere(owner: str, me: Owner) -> bool:
    holder = Owner.parse(owner)
    return holder is None or holder.host != me.host


def _is_dead(owner: str, me: Owner) -> bool:
    holder = Owner.parse(owner)
    return holder is None or holder.is_dead(me)


def _mind_the_clock(db: sqlite3.Connection, now: float) -> None:
    """If the clock was set back, shorten retentions and leases, so that none lasts longer from now than its full
    time."""
    if now < ranking.fact(db, "clock"):
        db.execute("UPDATE runs SET expires = ?1 + ttl WHERE expires > ?1 + ttl", [now])
        db.execute("UPDATE runs SET lease = ?1 WHERE state = 'reserved' AND lease > ?1", [now + LEASE_SECONDS])
    if int(now) != ranking.fact(db, "clock"):
        ranking.set_fact(db, "clock", int(now))
