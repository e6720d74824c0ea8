"""Tells the kernels where the keys and values of sequences are, and which rows read which pages together.

A *region* is memory with rows of one head each. A *page* is 8 consecutive positions, counted from 0, in consecutive
rows of one region. A *unit* is eight pages. Sequences that name the same pages share them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.core.codecs import CODING
from keepwarm.core.lora import Lora

PAGE = 8  # positions; PAGE and UNIT are as in model.h
UNIT = 64
_PAGES = UNIT // PAGE
Places = npt.NDArray[np.int64]  # region << 32 | row


RAW = (0, False, 0, 0)  # the coding of rows that are not encoded
MOVE = np.dtype([("source", "<i8"), ("target", "<i8"), ("rows", "<i8")])  # two places, and the number of rows
NO_MOVES: npt.NDArray[Any] = np.empty(0, MOVE)


@dataclass(frozen=True)
class Region:
    """Memory whose rows hold keys or values of one head; or one encoded block, whose rows are counted from its start.

    `base` is the address of layer 0's keys, head 0, row 0. The other numbers are distances in bytes: `value` from keys
    to values, `layer` from one layer to the next, `heads` from one head to the next, of keys and of values. Where
    layers differ in shape, `planes` count instead: for each layer's keys, and then its values, the address and the
    distance from one head to the next. The region keeps `memory` alive.
    """

    DTYPE: ClassVar[Any] = np.dtype([
        ("base", "<i8"),
        ("value", "<i8"),
        ("layer", "<i8"),
        ("heads", "<i8", 2),
        ("coding", CODING),
        ("planes", "<i8"),
    ])
    base: int
    value: int
    layer: int
    heads: tuple[int, int]
    coding: tuple[int, bool, int, int] = RAW  # how a block is encoded (`core.codecs.Codec.coding`)
    memory: Any = field(default=None, compare=False, repr=False)
    planes: npt.NDArray[np.int64] | None = field(default=None, compare=False, repr=False)  # `[planes, 2]`

    @classmethod
    def of(cls, planes: Sequence[tuple[int, int]], shapes: Collection[tuple[int, ...]], memory: Any = None) -> Region:
        """Return a region of these `planes` (keys, values, the next layer's keys, ...). `shapes` are theirs,
        without repetitions. Planes of one shape must have equal distances."""
        (base, head), (value, _) = planes[:2]
        if len(shapes) == 1:
            return cls.even(base, value - base, head, memory)
        return cls(base, 0, 0, (0, 0), memory=memory, planes=np.array(planes, dtype=np.int64))

    @classmethod
    def even(cls, base: int, plane: int, head: int, memory: Any = None) -> Region:
        """Return a region whose planes (keys, values, the next layer's keys, ...) have equal distances."""
        return cls(base, plane, 2 * plane, (head, head), memory=memory)

    @property
    def is_encoded(self) -> bool:
        return self.coding != RAW

    @property
    def record(self) -> tuple[Any, ...]:
        planes = 0 if self.planes is None else self.planes.ctypes.data
        return self.base, self.value, self.layer, self.heads, self.coding, planes


@dataclass(frozen=True, eq=False)
class Recurrent:
    """The state of one sequence in each layer that has one, float32. A step writes the state behind its last token over
    it. `kept` has room for the states behind earlier tokens, by position: those before which the step stands."""

    layers: tuple[torch.Tensor, ...]
    kept: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sequenced:
    """One sequence's memory: its regions, and for every page its region and first row, `region << 32 | row`.

    The kernels make the `moves` (records of `MOVE`) before they read the pages. Only regions without coding are written
    to. `lora` is the adapter with which its tokens are computed. `state` is set in a model whose layers have one.
    """

    regions: tuple[Region, ...]
    pages: Places
    moves: npt.NDArray[Any] = field(default_factory=lambda: NO_MOVES)
    lora: Lora | None = None
    state: Recurrent | None = None


@dataclass(frozen=True)
class Placed:
    """A step's memory, in the form that the kernels read."""

    regions: npt.NDArray[Any]
    pages: Places
    slots: Places  # for each row, where its key and value are written
    work: npt.NDArray[Any]
    members: npt.NDArray[np.int32]
    moves: npt.NDArray[Any]


_Work = tuple[int, int, int, int, int]  # a Work of model.h
_WORK = np.dtype(
    [("first_unit", "<i4"), ("last_unit", "<i4"), ("row", "<i4"), ("rows", "<i4"), ("pages", "<i8")], align=True
)


def works(starts: Sequence[int], ends: Sequence[int], sequences: Sequence[Sequenced]) -> Placed:
    """Group a step's rows by the pages they read. Rows that share a prefix's pages attend to it in one product.

    Sequence i runs positions `[starts[i], ends[i])`. Shared pages are found unit by unit, so that a shared system
    prompt may hold shared tools, and these a shared conversation. Sharing decides what is computed together, never the
    result.
    """
    regions: dict[Region, int] = {}
    moves = []
    units = [-(-end // UNIT) for end in ends]
    offsets = [0, *(_PAGES * total for total in accumulate(units))]  # where each sequence's pages begin
    pages = np.zeros(offsets[-1], dtype=np.int64)  # zeros follow the last page of a sequence
    for sequence, first, last in zip(sequences, offsets, offsets[1:], strict=False):
        numbers = [regions.setdefault(region, len(regions)) for region in sequence.regions]
        own = sequence.pages[: last - first]
        pages[first : first + len(own)] = _numbered(own, numbers)
        moves.append(_renumbered(sequence.moves, numbers) if len(sequence.moves) else NO_MOVES)
    counts = np.subtract(ends, starts)
    first_rows = [0, *accumulate(counts.tolist())]
    rows = np.arange(first_rows[-1])
    positions = rows + np.repeat(np.subtract(starts, first_rows[:-1]), counts)
    if len(sequences) == 1:
        work, members = [(0, units[0], 0, len(rows), 0)], rows.astype(np.int32)
    else:
        work, members = _shared(pages, units, offsets, first_rows)
    return Placed(
        np.array([region.record for region in regions], dtype=Region.DTYPE),
        pages,
        pages[np.repeat(offsets[:-1], counts) + positions // PAGE] + positions % PAGE,
        np.array(work, dtype=_WORK),
        members,
        np.concatenate(moves),
    )


def _numbered(places: Places, numbers: Sequence[int]) -> Places:
    """Return places with their regions renumbered."""
    if list(numbers) == [0]:
        return places
    there: Places = np.array(numbers, dtype=np.int64)[places >> 32] << 32 | (places & 0xFFFFFFFF)
    return there


def _renumbered(moves: npt.NDArray[Any], numbers: Sequence[int]) -> npt.NDArray[Any]:
    moves = moves.copy()
    for name in ("source", "target"):
        moves[name] = _numbered(moves[name], numbers)
    return moves


def scattered(positions: Sequence[int] | npt.NDArray[np.int64], sequence: Sequenced) -> Placed:
    """Place rows of one sequence at any rising positions. Each reads the pages up to its own."""
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


def _shared(
    pages: Places, units: Sequence[int], offsets: Sequence[int], first_rows: Sequence[int]
) -> tuple[list[_Work], npt.NDArray[np.int32]]:
    """Return the work of several sequences, ordered by position. A group that shares a range of units reads it once."""
    work: list[_Work] = []
    members: list[int] = []
    groups: list[tuple[int, list[int]]] = [(0, [*range(len(units))])]  # first unit, sequences that agree so far
    while groups:
        unit, group = groups.pop(0)
        end = min(units[i] for i in group)
        if len(group) > 1 and end > unit:
            there = pages[np.add.outer([offsets[i] for i in group], np.arange(unit * _PAGES, end * _PAGES))]
            differ = (there != there[0]).any(axis=0)
            end = unit + int(differ.argmax()) // _PAGES if differ.any() else end
        if end > unit:
            rows = [row for i in group for row in range(first_rows[i], first_rows[i + 1])]
            work.append((unit, end, len(members), len(rows), offsets[group[0]] + unit * _PAGES))
            members += rows
        split: dict[bytes, list[int]] = {}
        for i in group:
            if units[i] > end:
                at = offsets[i] + end * _PAGES
                split.setdefault(pages[at : at + _PAGES].tobytes(), []).append(i)
        groups += [(end, part) for part in split.values()]
    work.sort(key=lambda item: item[0])
    return work, np.array(members, dtype=np.int32)
