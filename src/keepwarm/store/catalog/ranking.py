"""The replacement policies of `store.eviction` as columns of the catalogue, so that all processes share one order.

The state of every policy is always kept, so processes may choose different policies, and a change costs nothing. Every
function works inside the caller's transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import get_args

from keepwarm.store.eviction import DEFAULT_POLICY, MOST_USES, PROMOTED_FROM, SMALL_PART, PolicyName
from keepwarm.store.retention import NOTED_EVICTIONS, SIGHTINGS

NO_QUEUE, SMALL, MAIN = 0, 1, 2
POLICY = "disk policy"  # a setting of the store
_FREE = "state = 'live' AND children = 0 AND priority = 0"  # as in the partial indexes


def fact(db: sqlite3.Connection, name: str) -> int:
    """Return a number that triggers or the functions below maintain."""
    row = db.execute("SELECT value FROM facts WHERE name = ?", [name]).fetchone()
    return 0 if row is None else int(row[0])


def set_fact(db: sqlite3.Connection, name: str, value: int) -> None:
    db.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", [name, value])


def choose_policy(db: sqlite3.Connection, policy: PolicyName) -> None:
    """Note which policy orders the store from now on, for processes without rules of their own (`keepwarm gc`)."""
    db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", [POLICY, policy])


def chosen_policy(db: sqlite3.Connection) -> PolicyName:
    """The policy that was noted last, or the default."""
    row = db.execute("SELECT value FROM settings WHERE name = ?", [POLICY]).fetchone()
    known: dict[str, PolicyName] = {name: name for name in get_args(PolicyName)}
    return known.get(row[0], DEFAULT_POLICY) if row else DEFAULT_POLICY


def _tick(db: sqlite3.Connection) -> int:
    """Return the next number of the catalogue's own clock, which never goes back."""
    now = fact(db, "seq") + 1
    set_fact(db, "seq", now)
    return now


def enter(db: sqlite3.Connection, run_id: str, content: bytes) -> None:
    """Note that a run became live."""
    now = _tick(db)
    came_back = db.execute("DELETE FROM ghosts WHERE content = ?", [content]).rowcount
    db.execute(
        "UPDATE runs SET seq = ?1, entered = ?1, uses = 1, weight = 1 + ?2, freq = 0, queue = ?3 WHERE id = ?4",
        [now, fact(db, "age"), MAIN if came_back else SMALL, run_id],
    )


def use(db: sqlite3.Connection, used: Mapping[str, tuple[float, int]]) -> None:
    """Note that runs were used: when last, and how often. `used` is in the order of their last use."""
    if not used:
        return
    now, age = fact(db, "seq"), fact(db, "age")
    db.executemany(
        f"""UPDATE runs SET last_used = max(last_used, ?1),
                expires = iif(priority = 0, max(expires, ?1 + ttl), expires),
                seq = ?2, uses = uses + ?3, weight = {age} + uses + ?3, freq = min({MOST_USES}, freq + ?3)
            WHERE id = ?4""",
        [(when, now + turn, times, run_id) for turn, (run_id, (when, times)) in enumerate(used.items(), 1)],
    )
    set_fact(db, "seq", now + len(used))


def inherit(db: sqlite3.Connection, run_id: str, members: Iterable[str]) -> None:
    """Give a run that replaces others the maximum of each value of theirs: recency, uses, retention."""
    names = list(members)
    marks = ",".join("?" * len(names))
    db.execute(
        "UPDATE runs SET (created, last_used, seq, entered, uses, weight, freq, queue, priority, ttl, expires) = "
        "(SELECT min(created), max(last_used), max(seq), max(entered), max(uses), max(weight), max(freq), max(queue), "
        f"max(priority), max(ttl), max(expires) FROM runs WHERE id IN ({marks})) WHERE id = ?",
        [*names, run_id],
    )


def evict(db: sqlite3.Connection, policy: PolicyName, cap: int, keep: str, now: float) -> str | None:
    """Choose the live run to evict next, and update the policy's state. Never `keep`; None when there is none.

    Runs whose time to live has ended come first, then the policy's choice, then pinned runs by priority.
    """
    ended = _first(db, f"{_FREE} AND expires <= {now!r} AND id <> ?", "expires, seq", keep)
    chosen = ended or {"lru": _lru, "lfu": _lfu, "s3fifo": _s3fifo}[policy](db, cap, keep)
    return chosen or _first(db, "state = 'live' AND children = 0 AND priority > 0 AND id <> ?", "priority, seq", keep)


def _first(db: sqlite3.Connection, where: str, order: str, *values: str) -> str | None:
    row = db.execute(f"SELECT id FROM runs WHERE {where} ORDER BY {order} LIMIT 1", values).fetchone()
    return None if row is None else str(row[0])


def _lru(db: sqlite3.Connection, cap: int, keep: str) -> str | None:
    return _first(db, f"{_FREE} AND id <> ?", "seq", keep)


def _lfu(db: sqlite3.Connection, cap: int, keep: str) -> str | None:
    chosen = _first(db, f"{_FREE} AND id <> ?", "weight, seq", keep)
    if chosen is not None:
        weight = int(db.execute("SELECT weight FROM runs WHERE id = ?", [chosen]).fetchone()[0])
        set_fact(db, "age", max(fact(db, "age"), weight))
    return chosen


def _s3fifo(db: sqlite3.Connection, cap: int, keep: str) -> str | None:
    while True:
        small = _first(db, f"{_FREE} AND queue = {SMALL} AND id <> ?", "entered", keep)
        main = _first(db, f"{_FREE} AND queue = {MAIN} AND id <> ?", "entered", keep)
        chosen = small if small and (not main or fact(db, "main") <= cap - cap // SMALL_PART) else main
        if chosen is None:
            return None
        freq = int(db.execute("SELECT freq FROM runs WHERE id = ?", [chosen]).fetchone()[0])
        if chosen == small and freq < PROMOTED_FROM:
            _remember(db, chosen)
            return chosen
        if chosen == main and freq == 0:
            return chosen
        db.execute(
            "UPDATE runs SET queue = ?, entered = ?, freq = ? WHERE id = ?",
            [MAIN, _tick(db), 0 if chosen == small else freq - 1, chosen],
        )


def _remember(db: sqlite3.Connection, run_id: str) -> None:
    """Note a run that leaves the small queue unused. If its content comes back soon, that counts as a use."""
    row = db.execute("SELECT exact FROM blocks WHERE run = ? ORDER BY ordinal LIMIT 1", [run_id]).fetchone()
    if row is None:
        return
    db.execute("DELETE FROM ghosts WHERE content = ?", row)
    db.execute("INSERT INTO ghosts VALUES (?, ?)", [row[0], _tick(db)])
    _keep_newest(db, "ghosts", fact(db, "runs"))


def sight(db: sqlite3.Connection, ids: Iterable[bytes]) -> set[bytes]:
    """Return the blocks that were noted here before, and note all of them. The oldest notes are forgotten."""
    before: set[bytes] = set()
    for block_id in ids:
        if db.execute("DELETE FROM sightings WHERE id = ?", [block_id]).rowcount:
            before.add(block_id)
        db.execute("INSERT INTO sightings VALUES (?, ?)", [block_id, _tick(db)])
    _keep_newest(db, "sightings", SIGHTINGS)
    return before


def note_eviction(db: sqlite3.Connection, run_ids: Iterable[str], why: str) -> None:
    """Note why the blocks of runs are about to be removed. The oldest notes are forgotten."""
    for run_id in run_ids:
        db.execute("DELETE FROM evictions WHERE id IN (SELECT exact FROM blocks WHERE run = ?)", [run_id])
        db.execute("INSERT INTO evictions SELECT exact, ?, ? FROM blocks WHERE run = ?", [_tick(db), why, run_id])
    _keep_newest(db, "evictions", NOTED_EVICTIONS)


def _keep_newest(db: sqlite3.Connection, table: str, limit: int) -> None:
    excess = fact(db, table) - limit
    if excess > 0:
        key = "content" if table == "ghosts" else "id"
        db.execute(f"DELETE FROM {table} WHERE {key} IN (SELECT {key} FROM {table} ORDER BY seq LIMIT ?)", [excess])
