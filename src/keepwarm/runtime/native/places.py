"""Where the keys and values of sequences lie, as the kernels read them: regions, pages, and who reads what together.

A *region* is memory with rows of one head each; a *page* is 8 consecutive positions, counted from 0, that lie in
consecutive rows of one region; a *unit* is four pages. Sequences that name the same pages share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

PAGE = 8  # positions; PAGE and UNIT are the kernels' own
UNIT = 64
_PAGES = UNIT // PAGE
Places = npt.NDArray[np.int64]  # region << 32 | row


@dataclass(frozen=True)
class Region:
    """Memory whose rows hold keys or values of one head; the owner keeps it alive while it is read.

    `base` is the address of layer 0, keys, head 0, row 0; `plane` the bytes from there to its values, and on to the
    next layer's keys; `head` the bytes from one head to the next.
    """

    DTYPE: ClassVar[Any] = np.dtype([("base", "<i8"), ("plane", "<i8"), ("head", "<i8")])
    base: int
    plane: int
    head: int

    @property
    def record(self) -> tuple[int, int, int]:
        return self.base, self.plane, self.head


@dataclass(frozen=True)
class Sequenced:
    """One sequence's memory: its regions, and for every page its region and first row, `region << 32 | row`."""

    regions: tuple[Region, ...]
    pages: Places


@dataclass(frozen=True)
class Placed:
    """A step's memory, as the kernels take it."""

    regions: npt.NDArray[Any]
    pages: Places
    slots: Places  # per row, where its key and value go
    work: npt.NDArray[Any]
    members: npt.NDArray[np.int32]


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
    for sequence, end in zip(sequences, ends, strict=True):
        units = -(-end // UNIT)
        numbers = np.array([regions.setdefault(region, len(regions)) for region in sequence.regions], dtype=np.int64)
        pages = sequence.pages[: units * _PAGES]
        table = np.zeros(units * _PAGES, dtype=np.int64)
        table[: len(pages)] = numbers[pages >> 32] << 32 | (pages & 0xFFFFFFFF)
        tables.append(table)
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
