"""Find a chain of blocks in few steps. A child is never stored without its parent, so a binary search finds the length
of the longest stored beginning. The blocks are then read a run at a time, not a block at a time, from a contiguous copy
of the catalogue's rows (`layouts`). See docs/decisions/0011-disk-layout.md for the figures.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from struct import unpack
from typing import Any, NamedTuple

from keepwarm.core.ports import BlockRef

SHORT = 12  # chains of at most this many blocks are looked up block by block
_ID = 32  # bytes
_PLACE = 16  # bytes
_as_ref: Callable[[tuple[Any, ...]], BlockRef] = partial(tuple.__new__, BlockRef)  # `_make` without a Python frame
_ABOVE = """WITH RECURSIVE chain(run, depth) AS (
    SELECT run, 0 FROM blocks WHERE exact = ?1
    UNION ALL SELECT edges.parent, depth + 1 FROM edges JOIN chain ON edges.child = chain.run WHERE depth < ?2
) SELECT chain.run, first, ids, prefixes, places FROM chain JOIN layouts ON layouts.run = chain.run ORDER BY depth"""


def lay_out(db: sqlite3.Connection, run_id: str) -> None:
    """Rewrite a run's part of `layouts` from its rows in `blocks`."""
    rows = db.execute(
        "SELECT ordinal, exact, prefix, start, length FROM blocks WHERE run = ? ORDER BY ordinal", [run_id]
    ).fetchall()
    db.execute("DELETE FROM layouts WHERE run = ?", [run_id])
    in_order = all(row[0] == rows[0][0] + at for at, row in enumerate(rows))
    if not rows or not in_order:  # then the rows in `blocks` alone are used
        return
    places = array("q", (number for row in rows for number in row[3:5]))
    values = [run_id, rows[0][0], b"".join(row[1] for row in rows), b"".join(row[2] for row in rows), places.tobytes()]
    db.execute("INSERT INTO layouts VALUES (?, ?, ?, ?, ?)", values)


def lay_out_all(db: sqlite3.Connection) -> None:
    """Write `layouts` for every run, in a catalogue of a version that did not have this table."""
    for (run_id,) in db.execute("SELECT id FROM runs WHERE state = 'live'").fetchall():
        lay_out(db, run_id)


def find_chain(
    read: Callable[[str, Sequence[Any]], list[tuple[Any, ...]]], ids: Sequence[bytes]
) -> list[BlockRef] | None:
    """Return the longest leading part of a chain that is stored. None means that the caller must ask block by block,
    because the layouts do not suffice (a run was evicted between two queries, or `ids` is no chain)."""
    length = _stored_length(read, ids)
    if not length:
        return []
    parts: list[_Part] = []
    joined, end = b"".join(ids[:length]), length
    for run_id, first, held, prefixes, places in read(_ABOVE, (ids[length - 1], length)):
        if held == joined[max(0, end * _ID - len(held)) : end * _ID]:  # usually the chain holds the whole run
            parts.append(_Part(run_id, range(first, first + len(held) // _ID), prefixes, places))
            end -= len(held) // _ID
            if not end:
                return _refs(ids[:length], parts[::-1])
            continue
        at = _ordinals(held, ids, end)
        end -= len(at)
        if isinstance(at, range):
            cut = prefixes[at.start * _ID : at.stop * _ID], places[at.start * _PLACE : at.stop * _PLACE]
            parts.append(_Part(run_id, range(first + at.start, first + at.stop), *cut))
        elif at:
            names, numbers = (
                [data[n * size : (n + 1) * size] for n in at] for data, size in ((prefixes, _ID), (places, _PLACE))
            )
            parts.append(_Part(run_id, [first + n for n in at], b"".join(names), b"".join(numbers)))
        if not end:
            return _refs(ids[:length], parts[::-1])
    return None


class _Part(NamedTuple):
    """Blocks of a run that follow each other in the chain."""

    run_id: str
    ordinals: range | list[int]
    prefixes: bytes
    places: bytes  # start and length of each


def _ordinals(held: bytes, ids: Sequence[bytes], end: int) -> range | list[int]:
    """Return the places in `held`, 32 bytes each, of the longest tail of `ids[:end]` that is there in order."""
    at = _place_of(held, ids[end - 1])
    if at is None:  # the run holds the beginning of a rest's page
        return []
    count = min(at + 1, end)
    if held[(at + 1 - count) * _ID : (at + 1) * _ID] == b"".join(ids[end - count : end]):
        return range(at + 1 - count, at + 1)
    found: list[int] = []  # a merged run also holds short pages that longer ones have overtaken
    while end and at >= 0:
        if held[at * _ID : (at + 1) * _ID] == ids[end - 1]:
            found.append(at)
            end -= 1
        at -= 1
    return found[::-1]


def _refs(ids: Sequence[bytes], parts: Sequence[_Part]) -> list[BlockRef]:
    """Return the blocks of a chain, out of consecutive runs. They are built column by column, so that a block of a long
    chain costs little more than its tuple."""
    prefixes = b"".join([part.prefixes for part in parts])
    places = array("q", b"".join([part.places for part in parts]))
    columns = zip(
        ids,
        unpack(f"{_ID}s" * (len(prefixes) // _ID), prefixes),
        chain.from_iterable([repeat(part.run_id, len(part.ordinals)) for part in parts]),
        chain.from_iterable([part.ordinals for part in parts]),
        places[::2],
        places[1::2],
        repeat("disk"),
    )
    return [*map(_as_ref, columns)]


def _stored_length(read: Callable[[str, Sequence[Any]], list[tuple[Any, ...]]], ids: Sequence[bytes]) -> int:
    known, limit = 0, len(ids)
    middle = limit - 1  # begin with the last block: usually all of a chain is stored, or little of it
    while known < limit:
        if read("SELECT 1 FROM blocks WHERE exact = ?", (ids[middle],)):
            known = middle + 1
        else:
            limit = middle
        middle = (known + limit) // 2
    return known


def _place_of(held: bytes, block_id: bytes) -> int | None:
    """Return the place of a block among the ids in `held`, 32 bytes each; None when it is not there."""
    at = held.rfind(block_id)
    while at >= 0 and at % _ID:
        at = held.rfind(block_id, 0, at + _ID - 1)
    return at // _ID if at >= 0 else None
