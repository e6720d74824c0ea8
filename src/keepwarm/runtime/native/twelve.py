"""Packs bfloat16 weights in 12 bits, without loss (`twelve.h`), for processors that multiply bfloat16."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepwarm.runtime.native.build import LANES, compiled, done
from keepwarm.runtime.native.memory import WeightMemory

_SOURCE = Path(__file__).with_name("twelve.cpp")
_PANEL = np.dtype(  # WeightPanel
    [("at", np.uint64), ("others", np.uint64), ("upper", np.uint8, 16), ("rest", np.uint64), ("cells", np.uint64)]
)
_CELLS = np.dtype([("first", np.uint16, 64), ("middle", np.uint16, 64), ("count", np.uint8, 64)])  # WeightCells
_PAIRED, _PART = 8, 96  # columns of a group, and bytes of its second part, as in cells.h
_FEW = 512  # of so many weights at most one may have no code; for more, 12 bits are slower than 16
_MOST_COLUMNS = 1 << 19  # the list numbers a panel's bytes in 24 bits; so many columns have more


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("across", ctypes.c_int64),
    )


class Panels:
    """A weight `[..., out, in]`, in panels. The kernels read `table`, so this must live as long as they use it.

    `errors`, float32 `[out, rounded up]`, says how far a product is off if only the first part of the weights is read,
    per norm of what they are multiplied with. It is None if the weights lie in one part.
    """

    def __init__(self, weight: torch.Tensor, deep: int, memory: WeightMemory, *, in_parts: bool = False) -> None:
        """Copies the weight to `memory`. `deep`: columns that the processor multiplies together. A matrix can be packed
        `in_parts`. Raises MemoryError."""
        matrices = [*_matrices(weight)]
        self.errors: np.ndarray | None = None
        self._cells = np.zeros(1, dtype=_CELLS)
        if in_parts:
            table, self.errors = _in_parts(matrices[0], deep, memory, self._cells)
            tables = [table]
        else:
            tables = [_table(matrix, deep, memory) for matrix in matrices]
        none = np.zeros(4, dtype=_PANEL)  # kernels ask for what follows the last panel: there is nothing
        self.table = np.concatenate([*tables, none])

    @property
    def address(self) -> int:
        return int(self.table.ctypes.data)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes


def _matrices(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    for matrix in weight.reshape(-1, *weight.shape[-2:]) if weight.dim() > 2 else [weight]:
        yield matrix.contiguous()


class _Plan:
    """What the library's functions take of a matrix."""

    def __init__(self, matrix: torch.Tensor, across: int, chosen: np.ndarray) -> None:
        self.table = np.zeros(-(-len(matrix) // LANES), dtype=_PANEL)
        self.ends = np.zeros(len(self.table), dtype=np.int64)
        self._most = self.table.size * LANES * across // _FEW
        self._source = _Matrix(matrix.data_ptr(), *matrix.shape, across)
        self._taken = (ctypes.byref(self._source), _address(chosen), _address(self.ends))

    def made(self, function: Any, threads: int) -> bool:
        """Fill in what is chosen, and `ends`. Returns whether few weights have no code. Raises MemoryError."""
        function.restype = ctypes.c_int64
        return bool(done(function(*self._taken, threads)) <= self._most)

    def packed(self, function: Any, *into: ctypes.c_void_p, threads: int) -> np.ndarray:
        function(*self._taken, *into, _address(self.table), threads)
        return self.table


def _across(matrix: torch.Tensor, deep: int) -> int:
    return -(-matrix.shape[1] // max(deep, _PAIRED)) * max(deep, _PAIRED)


def _table(matrix: torch.Tensor, deep: int, memory: WeightMemory) -> np.ndarray:
    across, threads = _across(matrix, deep), torch.get_num_threads()
    found = compiled(_SOURCE)
    if found is None or across >= _MOST_COLUMNS:
        return _wide(matrix, across, memory)
    upper = np.zeros(16, dtype=np.uint8)
    plan = _Plan(matrix, across, upper)
    if not plan.made(found.library.keepwarm_twelve_plan, threads):
        return _wide(matrix, across, memory)
    room = memory.room(int(plan.ends[-1]))
    return plan.packed(found.library.keepwarm_twelve_pack, ctypes.c_void_p(room.data_ptr()), threads=threads)


def _in_parts(
    matrix: torch.Tensor, deep: int, memory: WeightMemory, cells: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Pack a matrix in two parts, and choose its cells; in one part if they leave out too many weights. Returns its
    panels, and the errors of its first part."""
    across, threads = _across(matrix, deep), torch.get_num_threads()
    found = compiled(_SOURCE)
    if found is None or across >= _MOST_COLUMNS:
        return _wide(matrix, across, memory), None
    plan = _Plan(matrix, across, cells)
    if not plan.made(found.library.keepwarm_cells_plan, threads):
        return _table(matrix, deep, memory), None
    errors = np.zeros(len(plan.table) * LANES, dtype=np.float32)
    room, rest = memory.room(int(plan.ends[-1])), memory.room(len(plan.table) * across // _PAIRED * _PART)
    into = (ctypes.c_void_p(room.data_ptr()), ctypes.c_void_p(rest.data_ptr()), _address(errors))
    return plan.packed(found.library.keepwarm_cells_pack, *into, threads=threads), errors


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _wide(matrix: torch.Tensor, across: int, memory: WeightMemory) -> np.ndarray:
    """Panels of weights that stay in 16 bits."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, across - columns, 0, -rows % LANES))
    panels = padded.unflatten(-1, (-1, 2)).unflatten(0, (-1, LANES)).transpose(1, 2)
    table = np.zeros(len(panels), dtype=_PANEL)
    table["at"] = memory.add(panels) + np.arange(len(panels), dtype=np.uint64) * (LANES * across * 2)
    return table
