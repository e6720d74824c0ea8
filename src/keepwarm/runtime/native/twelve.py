"""Packs bfloat16 weights in 12 bits, without loss (`twelve.h`), for processors that multiply bfloat16."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from keepwarm.runtime.native.build import LANES, compiled
from keepwarm.runtime.native.memory import WeightMemory

_SOURCE = Path(__file__).with_name("twelve.cpp")
_PANEL = np.dtype(  # WeightPanel
    [("at", np.uint64), ("others", np.uint64), ("upper", np.uint8, 16), ("rest", np.uint64), ("in_parts", np.int64)]
)
_PAIRED, _REST = 8, 64  # columns of a group, and bytes of its second part, as in twelve.h
_FEW = 512  # of so many weights at most one may have another upper byte; for more, 12 bits are slower than 16
_MOST_COLUMNS = 1 << 20  # the list numbers a panel's weights in 24 bits; so many columns have more


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("across", ctypes.c_int64),
        ("in_parts", ctypes.c_int64),
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
        self.errors = np.zeros(-(-len(matrices[0]) // LANES) * LANES, np.float32) if in_parts else None
        tables = [_table(matrix, deep, memory, self.errors) for matrix in matrices]
        if not tables[0]["in_parts"].any():
            self.errors = None
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


def _table(matrix: torch.Tensor, deep: int, memory: WeightMemory, errors: np.ndarray | None) -> np.ndarray:
    rows, columns = matrix.shape
    across, threads = -(-columns // max(deep, _PAIRED)) * max(deep, _PAIRED), torch.get_num_threads()
    found = compiled(_SOURCE)
    if found is None or across >= _MOST_COLUMNS:
        return _wide(matrix, across, memory)
    library = found.library
    library.keepwarm_twelve_plan.restype = ctypes.c_int64
    table = np.zeros(-(-rows // LANES), dtype=_PANEL)
    upper, ends = np.zeros(16, dtype=np.uint8), np.zeros(len(table), dtype=np.int64)
    source = _Matrix(matrix.data_ptr(), rows, columns, across, errors is not None)
    plan = (ctypes.byref(source), ctypes.c_void_p(upper.ctypes.data), ctypes.c_void_p(ends.ctypes.data))
    others = library.keepwarm_twelve_plan(*plan, threads)
    if others * _FEW > table.size * LANES * across:
        return _wide(matrix, across, memory)
    room = memory.room(int(ends[-1]))
    rest = None if errors is None else memory.room(len(table) * across // _PAIRED * _REST).data_ptr()
    bounds = None if errors is None else errors.ctypes.data
    into = (ctypes.c_void_p(address) for address in (room.data_ptr(), rest, bounds, table.ctypes.data))
    library.keepwarm_twelve_pack(*plan, *into, threads)
    return table


def _wide(matrix: torch.Tensor, across: int, memory: WeightMemory) -> np.ndarray:
    """Panels of weights that stay in 16 bits."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, across - columns, 0, -rows % LANES))
    panels = padded.unflatten(-1, (-1, 2)).unflatten(0, (-1, LANES)).transpose(1, 2)
    table = np.zeros(len(panels), dtype=_PANEL)
    table["at"] = memory.add(panels) + np.arange(len(panels), dtype=np.uint64) * (LANES * across * 2)
    return table
