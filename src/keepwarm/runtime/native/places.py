"""Where the keys and values of sequences lie, as the kernels read them: regions, pages, and who reads what together.

A *region* is memory with rows of one head each; a *page* is 8 consecutive positions, counted from 0, that lie in
consecutive rows of one region; a *unit* is eight pages. Sequences that name the same pages share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from keepwarm.core.codecs import CODING

PAGE = 8  # positions; PAGE and UNIT are the kernels' own
UNIT = 64
_PAGES = UNIT // PAGE
Places = npt.NDArray[np.int64]  # region << 32 | row


RAW = (0, False, 0, 0)  # the coding of rows that are not encoded
MOVE = np.dtype([("source", "<i8"), ("target", "<i8"), ("rows", "<i8")])  # places, and how many rows
NO_MOVES: npt.NDArray[Any] = np.empty(0, MOVE)


@dataclass(frozen=True)
class Region:
    """Memory whose rows hold keys or values of one head; or one encoded block, whose rows are counted from its start.

    `base` is the address of layer 0, keys, head 0, row 0; `value` the bytes from there to its values, `layer` those to
    the next layer's keys; `heads` those from one head to the next, of keys and of values. `memory` is kept alive.
    """

    DTYPE: ClassVar[Any] = np.dtype(
        [("base", "<i8"), ("value", "<i8"), ("layer", "<i8"), ("heads", "<i8", 2), ("coding", CODING)]
    )
    base: int
    value: int
    layer: int
    heads: tuple[int, int]
    coding: tuple[int, bool, int, int] = RAW  # of an encoded block (`core.codecs.Codec.coding`)
    memory: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def even(cls, base: int, plane: int, head: int, memory: Any = None) -> Region:
        """With planes at equal distances: keys, values, the next layer's keys, ..."""
        return cls(base, plane, 2 * plane, (head, head), memory=memory)

    @property
    def is_encoded(self) -> bool:
        return self.coding != RAW

    @property
    def record(self) -> tuple[Any, ...]:
        return self.base, self.value, self.layer, self.heads, self.coding


@dataclass(frozen=True)
class Sequenced:
    """One sequence's memory: its regions, and for every page its region and first row, `region << 32 | row`.

    `moves` (records of `MOVE`) are to be made before the pages are read. What is written to is never encoded.
    """

    regions: tuple[Region, ...]
    pages: Places
    moves: npt.NDArray[Any] = field(default_factory=lambda: NO_MOVES)


@dataclass(frozen=True)
class Placed:
    """A step's memory, as the kernels take it."""

    regions: npt.NDArray[Any]
    pages: Places
    slots: Places  # per row, where its key and value go
    work: npt.NDArray[Any]
    members: npt.NDArray[np.int32]
    moves: npt.NDArray[Any]


_Work = tuple[int, int, int, int, int]  # a Work of the kernels
_WORK = np.dtype(
    [("first_unit", "<i4"), ("last_unit", "<i4"), ("row", "<i4"), ("rows", "<i4"), ("pages", "<i8")], align=True
)


def works(starts: Sequence[int], ends: Sequence[int], sequences: Sequence[Sequenced]) -> Placed:
    """Group a step's rows by the pages they read: rows that share a prefix's pages attend to it in one product.

    Sequence i runs positions `[starts[i], ends[i])`. Sharing is found unit by unit, so that system prompt, tools and
    conversation nest; it decides what is computed together, never the result.
    """
    regions: dict[Region, int] = {}
    tables: list[Places] = []
    moves: list[npt.NDArray[Any]] = []
    for sequence, end in zip(sequences, ends, strict=True):
        units = -(-end // UNIT)
        numbers = np.array([regions.setdefault(region, len(regions)) for region in sequence.regions], dtype=np.int64)
        pages = sequence.pages[: units * _PAGES]
        table = np.zeros(units * _PAGES, dtype=np.int64)
        table[: len(pages)] = numbers[pages >> 32] << 32 | (pages & 0xFFFFFFFF)
        tables.append(table)
        moves.append(sequence.moves)
        if len(sequence.moves):
            moves[-1] = sequence.moves.copy()
            for name in ("source", "target"):
                place = sequence.moves[name]
                moves[-1][name] = numbers[place >> 32] << 32 | (place & 0xFFFFFFFF)
    first_rows = np.cumsum([0, *(end - start for start, end in zip(starts, ends, strict=True))])
    slots = [
        table[np.arange(start, end) // PAGE] + np.arange(start, end) % PAGE
        for table, start, end in zip(tables, starts, ends, strict=True)
    ]
    if len(sequences) == 1:
        work: list[_Work] = [(0, len(tables[0]) // _PAGES, 0, int(first_rows[-1]), 0)]
        members = np.arange(first_rows[-1], dtype=np.int32)
    else:
        work, members = _shared(tables, first_rows)
    return Placed(
        np.array([region.record for region in regions], dtype=Region.DTYPE),
        np.concatenate(tables),
        np.concatenate(slots),
        np.array(work, dtype=_WORK),
        members,
        np.concatenate(moves),
    )


def scattered(positions: Sequence[int] | npt.NDArray[np.int64], sequence: Sequenced) -> Placed:
    """Rows of one sequence at any rising positions: each reads the pages up to its own."""
    at = np.asarray(positions, dtype=np.int64)
    units = -(-(int(at[-1]) + 1) // UNIT)
    table = np.zeros(units * _PAGES, dtype=np.int64)
    pages = sequence.pages[: units * _PAGES]
    table[: len(pages)] = pages
    return Placed(
        np.array([region.record for region in sequence.regions], dtype=Region.DTYPE),
        table,
        table[at // PAGE] + at % PAGE,
        np.array([(0, units, 0, len(at), 0)], dtype=_WORK),
        np.arange(len(at), dtype=np.int32),
        sequence.moves,
    )


def _shared(tables: Sequence[Places], first_rows: npt.NDArray[Any]) -> tuple[list[_Work], npt.NDArray[np.int32]]:
    """The work of several sequences, ordered by position; each range of units is read once per group that shares it."""
    offsets = np.cumsum([0, *(len(table) for table in tables)])
    units = [table.reshape(-1, _PAGES) for table in tables]
    work: list[_Work] = []
    members: list[npt.NDArray[np.int32]] = []
    count = 0
    groups: list[tuple[int, list[int]]] = [(0, list(range(len(tables))))]  # first unit, sequences that agree so far
    while groups:
        unit, group = groups.pop(0)
        leader = group[0]
        end = min(len(units[i]) for i in group)
        for other in group[1:]:
            differ = np.flatnonzero((units[leader][unit:end] != units[other][unit:end]).any(axis=1))
            if len(differ):
                end = unit + int(differ[0])
        if end > unit:
            rows = np.concatenate([np.arange(first_rows[i], first_rows[i + 1], dtype=np.int32) for i in group])
            work.append((unit, end, count, len(rows), int(offsets[leader]) + unit * _PAGES))
            members.append(rows)
            count += len(rows)
        split: dict[bytes, list[int]] = {}
        for i in group:
            if len(units[i]) > end:
                split.setdefault(units[i][end].tobytes(), []).append(i)
        groups += [(end, part) for part in split.values()]
    work.sort(key=lambda item: item[0])
    return work, np.concatenate(members)
