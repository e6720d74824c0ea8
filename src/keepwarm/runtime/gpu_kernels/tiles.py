"""Sizes of the tiles in which products are computed.

A tensor core sums a result in one order, whatever the tile around it: on an H100, all tiles below give the same bits.
So a product takes the tile that is fastest for its rows and columns. `tile_check` compares them all on a device when a
model is loaded there. Where they differ, the number of rows decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import triton

from keepwarm.runtime.gpu_kernels import rows as row_kernels

INTERPRETED = not isinstance(row_kernels.norm, triton.JITFunction)  # with `TRITON_INTERPRET=1`
_FEW, _MANY = 8192, 32_768  # columns
_BUSY = 1.8  # programs for each multiprocessor, at least, where a tile is to be large


@dataclass(frozen=True)
class Tile:
    """`rows` and `columns` of results, and how many numbers of the inner dimension are taken at a time."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3

    def within(self, shared: int, weights: int, itemsize: int) -> Tile | None:
        """Return the tile with as many stages as fit in `shared` bytes, for a product with so many weights side by
        side; None if two stages do not."""
        stage = (self.rows + weights * self.columns) * self.depth * itemsize
        stages = min(self.stages, shared // stage)
        return replace(self, stages=stages) if stages > 1 else None

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), -(-columns // self.columns)

    @property
    def options(self) -> dict[str, Any]:
        """How a kernel is compiled for it."""
        size = {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}
        return size | {"num_warps": self.warps, "num_stages": self.stages}


Sizes = tuple[Tile, ...]  # for one row, for it with few columns, for some rows, for them with many columns; larger ones

# The fastest on an H100, with weights of 1,024 to 12,288 columns and with a head: one weight, and two side by side.
_FASTEST: tuple[Sizes, Sizes] = (
    (
        *(Tile(16, 32, 256), Tile(16, 16, 512), Tile(64, 32, 128, stages=4), Tile(64, 64, 128)),
        *(Tile(64, 128, 64), Tile(128, 128, 64, warps=8), Tile(128, 256, 64, warps=8)),
    ),
    (
        *(Tile(16, 32, 128, stages=4), Tile(16, 32, 128, stages=4), Tile(64, 32, 128, stages=4), Tile(64, 64, 64)),
        *(Tile(64, 128, 64), Tile(128, 128, 64, warps=8)),
    ),
)
_BY_HAND = Tile(16, 256, 64)  # for the interpreter, where another depth would have other bits
_INTERPRETED: Sizes = (_BY_HAND, _BY_HAND, *[replace(_BY_HAND, rows=32)] * 3)


@dataclass(frozen=True)
class Tiles:
    """The tiles for one type of weights. `lanes` is how many queries of one key head a program of attention takes.
    `sizes` are for one weight and for two side by side; None: the number of rows decides nothing."""

    base: Tile
    lanes: int
    sizes: tuple[Sizes, Sizes] | None = None
    busy: int = 1  # programs

    @classmethod
    def of(cls, dtype: torch.dtype, group: int, shared: int = 0, processors: int = 1) -> Tiles:
        """`group` is how many heads of queries share one of keys. A device has so many `processors`, and each has
        `shared` bytes of memory for a program; 0 if that is not known."""
        least = triton.next_power_of_2(group)
        if INTERPRETED:
            return cls(_BY_HAND, max(16, least), (_INTERPRETED, _INTERPRETED))
        if dtype is torch.float32:
            return cls(Tile(32, 32, 32, stages=2), max(16, least))
        base, lanes = Tile(64, 32, 64), max(64, least)
        if not shared:
            return cls(base, lanes)
        one, two = (
            tuple(tile.within(shared, number + 1, dtype.itemsize) or base for tile in sizes)
            for number, sizes in enumerate(_FASTEST)
        )
        return cls(base, lanes, (one, two), int(_BUSY * processors))

    def of_all(self, columns: int, weights: int = 1) -> Tile:
        """Return the tile for any number of rows. Wide weights have wider ones. Three stages of two wide tiles need
        more shared memory than many GPUs have."""
        wide = self.base.columns * (1 if columns < _FEW else 2 if columns < _MANY else 4)
        return replace(self.base, columns=wide, stages=2 if weights * wide > 128 else self.base.stages)

    def of_rows(self, rows: int, columns: int, weights: int = 1) -> Tile:
        """Return the tile for a product of so many rows with weights of so many columns."""
        if self.sizes is None:
            return self.of_all(columns, weights)
        one, narrow, some, wide, *large = self.sizes[weights - 1]
        if rows <= 32 and columns <= 2048:
            return narrow
        if rows <= 16:
            return one
        if rows <= 64 and columns <= _FEW:
            return some
        busy = [tile for tile in large if prod(tile.grid(rows, columns)) >= self.busy]
        return busy[-1] if rows > 64 and busy else wide
