"""Parts of a layer that are written when they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from keepwarm.core.ports import Bytes
from keepwarm.runtime.device.plane import Plane, Rows, fill


@dataclass(frozen=True)
class Late(ABC):
    """Positions `[start, end)`."""

    start: int
    end: int

    @abstractmethod
    def write(self, first: int) -> None:
        """Write the positions from `first` on."""

    def cut(self, end: int) -> Self:
        """Return the part before a position."""
        return self if self.end <= end else replace(self, end=end)


@dataclass(frozen=True)
class LateBlock(Late):
    """A block that is decoded from its beginning. `decode(a, b)` writes at least the positions from `start + a` to
    `start + b`."""

    decode: Callable[[int, int], object]

    def write(self, first: int) -> None:
        self.decode(first - self.start, self.end - self.start)


@dataclass(frozen=True)
class LateRows(Late):
    """Rows that lie in the host's memory, the first at `start`."""

    plane: Plane
    data: Bytes

    def rows(self, first: int) -> Rows:
        """Return the rows from a position on."""
        return Rows(self.plane, first, self.data[:, first - self.start : self.end - self.start])

    def write(self, first: int) -> None:
        part = self.rows(first)
        self.plane.fill(part.start, part.bytes)


@dataclass(frozen=True)
class LateLayer(Late):
    """Rows of keys and of values that lie in the host's memory, `[2, kv_heads, n, head_bytes]`, for planes there."""

    planes: tuple[Plane, Plane]
    data: Bytes

    def write(self, first: int) -> None:
        for plane, rows in zip(self.planes, self.data, strict=True):
            plane.fill(first, rows[:, first - self.start : self.end - self.start])


def written(parts: Sequence[Late], start: int, *, whole: bool) -> None:
    """Write what parts of one layer have from `start` on; with `whole`, all of the parts that have any. Rows go to a
    device together."""
    rows: list[Rows] = []
    for part in parts:
        if part.end > start:
            first = part.start if whole else max(start, part.start)
            if isinstance(part, LateRows) and part.plane.array is None:
                rows.append(part.rows(first))
            else:
                part.write(first)
    if rows:
        fill(rows)
