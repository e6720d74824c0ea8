"""Plans a step's attention: which rows attend to which part of the positions together.

A part is attended to as a whole. So rows share one if all of its pages are theirs, and otherwise each sequence attends
to its own pages of it. What is shared decides what is computed together, never a row's bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepwarm.runtime.native.places import PAGE, UNIT, Placed

PART = 256  # positions; as in the kernels
JOB = 5  # numbers of a job; as in the kernels
_UNITS = PART // UNIT
_PAGES = UNIT // PAGE
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Jobs:
    """The attention of some rows, whose parts' results are in memory at the same time.

    `rows` are those rows. `members` are rows, too, one after another for each job. A job (a row of `jobs`) is the place
    of its rows there, their number, a part, where its page table begins, and the slot of the part's first position if
    those of the others follow it, otherwise -1. `cells[row]` is the number of the row's
    first result; all have `results` together.
    """

    rows: Numbers
    members: Numbers
    jobs: Numbers
    cells: Numbers
    results: int

    def within(self, window: int | None, positions: Numbers) -> Numbers:
        """Return the jobs of parts to which a row attends through a window."""
        if window is None or not len(self.jobs):
            return self.jobs
        # A job's rows stand in order, so the first of a sequence is not always the lowest of all.
        at = np.repeat(np.arange(len(self.jobs)), self.jobs[:, 1])
        place = np.arange(len(at)) - np.repeat(np.cumsum(self.jobs[:, 1]) - self.jobs[:, 1], self.jobs[:, 1])
        lowest = np.full(len(self.jobs), np.iinfo(np.int64).max)
        np.minimum.at(lowest, at, positions[self.members[self.jobs[at, 0] + place]])
        return self.jobs[(self.jobs[:, 2] + 1) * PART > lowest - window + 1]


@dataclass(frozen=True)
class _Group:
    """Rows that attend to the parts `[first, last)` of one page table together."""

    rows: Numbers
    first: int
    last: int
    table: int


def planned(placed: Placed, positions: Numbers, chosen: Numbers, tile: int, most: int) -> list[Jobs]:
    """Return the jobs of the `chosen` rows, which are in order. `tile` is how many rows a job has at most. With more
    than `most` results the rows are taken in several goes, each of at least one row."""
    kept = np.zeros(len(positions), dtype=bool)
    kept[chosen] = True
    groups = list(_groups(placed, len(positions), kept))
    parts = positions[chosen] // PART + 1
    slots = _Slots.of(placed.pages.astype(np.int64))
    made = []
    at = 0
    while at < len(chosen):
        reached = np.cumsum(parts[at:])
        end = at + max(1, int(np.searchsorted(reached, most, side="right")))
        made.append(_jobs(groups, positions, chosen[at:end], parts[at:end], tile, slots))
        at = end
    return made


def _groups(placed: Placed, rows: int, kept: npt.NDArray[np.bool_]) -> Iterator[_Group]:
    """Yield which kept rows attend together. Works form a tree by position: of a part in which works begin, each row
    attends to the whole with the last work that has it."""
    reach = np.zeros(rows, dtype=np.int64)  # the unit at which a row's pages end
    works = [tuple(map(int, work)) for work in placed.work]
    members = placed.members.astype(np.int64)
    for _, last, row, count, _ in works:
        each = members[row : row + count]
        reach[each] = np.maximum(reach[each], last)
    for first, last, row, count, pages in works:
        each = members[row : row + count]
        each = each[kept[each]]
        table = pages - first * _PAGES  # of all works on the way here, the last one's pages go on from the first's
        first, whole = first // _UNITS, last // _UNITS
        if len(each) and first < whole:
            yield _Group(each, first, whole, table)
        if last % _UNITS and len(ending := each[reach[each] == last]):
            yield _Group(ending, whole, whole + 1, table)


@dataclass(frozen=True)
class _Slots:
    """The slots of pages, and how many ends of a row of pages that follow each other are before each page."""

    pages: Numbers
    ends: Numbers

    @classmethod
    def of(cls, pages: Numbers) -> _Slots:
        return cls(pages, np.concatenate([[0], np.cumsum(np.diff(pages) != PAGE)]).astype(np.int64))

    def flat(self, first: Numbers, last: Numbers) -> Numbers:
        """Return the slots of the `first` pages where all pages up to the `last` ones follow them, otherwise -1."""
        return np.where(self.ends[first] == self.ends[last], self.pages[first], -1)


def _jobs(groups: list[_Group], positions: Numbers, rows: Numbers, parts: Numbers, tile: int, slots: _Slots) -> Jobs:
    """Return the jobs of a range of rows."""
    cells = np.zeros(len(positions), dtype=np.int64)
    cells[rows] = np.cumsum(parts) - parts
    here = np.zeros(len(positions), dtype=bool)
    here[rows] = True
    members = [each if here[each].all() else each[here[each]] for each in (group.rows for group in groups)]
    counts = np.array([len(each) for each in members], dtype=np.int64)
    every = np.concatenate([np.empty(0, np.int64), *members])
    if not len(every):
        return Jobs(rows, every, np.empty((0, JOB), np.int64), cells, int(parts.sum()))
    # Tiles of each group's rows, then the parts of each tile.
    firsts, lasts, tables = np.array([(group.first, group.last, group.table) for group in groups], dtype=np.int64).T
    tiles = -(-counts // tile)
    group = np.repeat(np.arange(len(groups)), tiles)
    within = (np.arange(len(group)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile
    begins = (np.cumsum(counts) - counts)[group] + within
    sizes = np.minimum(tile, counts[group] - within)
    highest = np.maximum.reduceat(positions[every], begins)
    ends = np.minimum(lasts[group], highest // PART + 1)
    spans = np.maximum(ends - firsts[group], 0)
    at = np.repeat(np.arange(len(group)), spans)
    part = firsts[group][at] + np.arange(len(at)) - np.repeat(np.cumsum(spans) - spans, spans)
    table = tables[group][at]
    latest = np.minimum((part + 1) * PART - 1, highest[at])
    flat = slots.flat(table + part * (PART // PAGE), table + latest // PAGE)
    jobs = np.stack([begins[at], sizes[at], part, table, flat], axis=1)
    return Jobs(rows, every, jobs, cells, int(parts.sum()))
