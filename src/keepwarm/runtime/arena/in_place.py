"""KV that attention reads in place: in a run in RAM, or in encoded blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from keepwarm.core.ports import Bytes
from keepwarm.runtime.native.places import MOVE, NO_MOVES, PAGE, Region, Sequenced


@dataclass(frozen=True)
class Mapped:
    """Positions `[start, end)` that are read from a region, beginning at its row 0."""

    start: int
    end: int
    region: Region


class InPlace:
    """Where each page of one arena is."""

    def __init__(self, planes: int) -> None:
        """`planes` is the number of planes of keys and values in all layers."""
        self._planes = planes
        self._mapped: list[Mapped] = []
        self._sequenced: Sequenced | None = None  # the same for the kernels; valid until something changes
        self._filling: list[tuple[int, int]] = []  # address and head stride per plane of the span being filled

    @property
    def is_encoded(self) -> bool:
        """Whether part of the KV is in encoded blocks."""
        return any(part.region.is_encoded for part in self._mapped)

    def map(self, start: int, end: int, region: Region) -> None:
        """Read the positions `[start, end)` from a region, beginning at its row 0."""
        self._mapped.append(Mapped(start, end, region))
        self._sequenced = None

    def fill(self, plane: int, start: int, data: Bytes) -> None:
        """Note where one plane of a span is, `[kv_heads, tokens, dim]`. A span's planes come in order, one after
        another. It is mapped once all are known, if they are at equal distances, as in a run."""
        if plane == 0:
            self._filling.clear()
        self._filling.append((data.__array_interface__["data"][0], data.strides[0]))
        if len(self._filling) < self._planes:
            return
        addresses, heads = zip(*self._filling, strict=True)
        steps = {b - a for a, b in pairwise(addresses)}
        if len(steps) == 1 and len(set(heads)) == 1 and data.strides[1:] == (data.shape[2], 1):
            self.map(start, start + data.shape[1], Region.even(addresses[0], steps.pop(), heads[0], data))

    def cut(self, length: int) -> None:
        """Forget what follows a position."""
        self._sequenced = None
        self._filling.clear()
        self._mapped = [replace(part, end=min(part.end, length)) for part in self._mapped if part.start < length]

    def clear(self) -> None:
        """Forget all: it was copied into the arena."""
        self._mapped.clear()
        self._sequenced = None

    def moved(self) -> None:
        """Note that a step has moved the pages that `sequenced` named."""
        if self._sequenced is not None:
            self._sequenced = replace(self._sequenced, moves=NO_MOVES)

    def sequenced(self, own: Region, capacity: int) -> Sequenced:
        """Return where each page of `capacity` positions is: in the arena's `own` memory, or elsewhere. A step moves
        pages that span both into the arena."""
        if self._sequenced is None:
            pages = np.arange(0, capacity, PAGE, dtype=np.int64)
            regions = [own]
            moves = []
            for part in self._mapped:
                number = len(regions) << 32
                first, last = -(-part.start // PAGE), part.end // PAGE  # whole pages
                for start, end in ((part.start, min(first * PAGE, part.end)), (max(last * PAGE, part.start), part.end)):
                    if start < end:
                        moves.append((number | start - part.start, start, end - start))
                if first < last:
                    pages[first:last] = number | np.arange(first, last, dtype=np.int64) * PAGE - part.start
                regions.append(part.region)
            self._sequenced = Sequenced(tuple(regions), pages, np.array(moves, MOVE))
        return self._sequenced
