"""Weights that keep the blocks of few bits of their file (`blocks.h`): those of a GGUF file. Those of a folder are in
`grouped`.

A module with such weights computes in float32, from the file's own bytes. The kernels, which round the other operand to
8 bits, are compared with it. It widens one row of a weight at a time, so no weight is ever held in floats.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from keepwarm.runtime.native.build import LANES, compiled, done
from keepwarm.runtime.native.memory import pages

KINDS = {  # ggml's names and numbers, as in blocks.h
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
}
IN_PARTS = {KINDS["Q8_0"]: 108, KINDS["Q6_K"]: 114}  # kinds that are packed in two parts for a head
FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # weights that nobody quantized, beside blocks
ACTIVATIONS = "int8 in blocks of 32, scale max/127 in float32, to nearest even"  # part of the arithmetic identity
COLUMNS = 32  # columns of a block, as in blocks.h
_SOURCE = Path(__file__).with_name("blocks.cpp")
_NO_ROWS = 0  # bytes of a row of a kind that is not stored by rows (`grouped`)
_PANEL = np.dtype([("at", "<u8"), ("kind", "<i4"), ("apart", "<u4")])  # QuantPanel


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = compiled(_SOURCE)
    if found is None:
        return None
    for name in ("keepwarm_panel_bytes", "keepwarm_row_bytes"):
        getattr(found.library, name).restype = ctypes.c_int64
    return found.library


def packing_digest() -> str:
    """Return a digest of the code that packs blocks. It is a library beside the kernels, and its bits count, too."""
    found = compiled(_SOURCE)
    return "" if found is None else found.digest


def can_compute() -> bool:
    """Return whether this machine can compute with weights in blocks, which needs a compiler."""
    return _library() is not None


def _compute() -> ctypes.CDLL:
    found = _library()
    if found is None:
        raise RuntimeError("weights in blocks need a C++ compiler (set CXX, or install g++)")
    return found


class Source(ctypes.Structure):
    """A weight as `blocks.h` reads it."""

    _fields_ = (
        ("raw", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("layout", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("across", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Blocks:
    """A weight `[out, in]`. `raw` holds the file's bytes of it: uint8 `[out, bytes of a row]`."""

    raw: torch.Tensor
    kind: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), self.columns

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def source(self) -> Source:
        return Source(raw=self.raw.data_ptr(), rows=len(self), columns=self.columns, kind=self.kind)

    @property
    def is_whole(self) -> bool:
        """Whether the rows have the length that this kind and number of columns need."""
        if self.raw.dtype is not torch.uint8 or self.raw.device.type != "cpu":
            return False
        length = row_bytes(self.source)
        return length > _NO_ROWS and self.raw.shape[1:] == (length,) and self.raw.is_contiguous()

    @property
    def in_parts(self) -> Blocks:
        """The same weight, packed so that the upper bits of its codes can be read alone, if its kind has that."""
        return replace(self, kind=IN_PARTS.get(self.kind, self.kind))

    def split(self, sizes: Sequence[int]) -> tuple[Blocks, ...]:
        """Return weights with so many of the rows each."""
        return tuple(Blocks(raw, self.kind, self.columns) for raw in self.raw.split(list(sizes)))

    def of_rows(self, numbers: torch.Tensor) -> Blocks:
        """Return a copy of the rows of these numbers `[n]`."""
        return Blocks(self.raw[numbers], self.kind, self.columns)

    def widened(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers `[n]` as float32 `[n, in]`. Raises IndexError for a row out of range."""
        numbers = rows.to(torch.int64).contiguous()
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self):
            raise IndexError(f"rows {int(numbers.min())} to {int(numbers.max())} of {len(self)}")
        made = torch.empty(len(numbers), self.columns, dtype=torch.float32)
        source = ctypes.byref(self.source)
        _compute().keepwarm_widen(source, _at(numbers), ctypes.c_int64(len(numbers)), _at(made))
        return made

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with `x`, float32 `[n, in]`, as float32 `[n, out]`. Nothing is rounded to fewer bits."""
        made = torch.empty(len(x), len(self), dtype=torch.float32)
        x = x.contiguous()
        source, count = ctypes.byref(self.source), ctypes.c_int64(len(x))
        done(_compute().keepwarm_plain_product(source, _at(x), count, _at(made), torch.get_num_threads()))
        return made

    def linear(self, bias: torch.Tensor | None) -> BlockLinear:
        """Return a module over this weight. `bias`: float32 `[out]`."""
        return BlockLinear(self, bias)


def row_bytes(source: Source) -> int:
    """Return the bytes of a row in the file. It is 0 for a kind that is not stored by rows, and -1 for one that is
    unknown or does not divide the columns."""
    library = _compute()
    divisor = library.keepwarm_block_columns(source.kind)
    return library.keepwarm_row_bytes(ctypes.byref(source)) if divisor and not source.columns % divisor else -1


class Packed:
    """Weights, stacked and packed for products. The kernels read `table`, so this must live as long as they use it."""

    def __init__(self, weights: Sequence[Blocks]) -> None:
        """Raises MemoryError."""
        library = _compute()
        columns = weights[0].columns
        each = [library.keepwarm_panel_bytes(weight.kind, ctypes.c_int64(columns)) for weight in weights]
        panels = [-(-len(weight) // LANES) for weight in weights]
        self._memory = pages(sum(size * count for size, count in zip(each, panels, strict=True)))
        self.table = np.zeros(sum(panels) + 4, dtype=_PANEL)  # kernels point past the last panel, but read none
        at, first = _address(self._memory), 0
        for weight, size, count in zip(weights, each, panels, strict=True):
            source = ctypes.byref(weight.source)
            table = ctypes.c_void_p(self.table[first:].ctypes.data)
            library.keepwarm_pack(source, ctypes.c_void_p(at), torch.get_num_threads(), table)
            at, first = at + size * count, first + count

    @property
    def address(self) -> int:
        return int(self.table.ctypes.data)

    @property
    def nbytes(self) -> int:
        return len(self._memory)


class BlockLinear(nn.Module):
    """`nn.Linear` over a weight in blocks. Its output has the input's dtype.

    A file may have rows or columns in another order than the model. They stay there: `outputs` are the rows' numbers in
    the model's order, and `inputs` the places of the columns' numbers in the input.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    outputs: torch.Tensor | None
    inputs: torch.Tensor | None

    def __init__(self, weight: Blocks, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.kind, self.in_features, self.out_features = weight.kind, weight.columns, len(weight)
        self.register_buffer("weight", weight.raw)
        self.register_buffer("bias", bias)
        self.register_buffer("outputs", None)
        self.register_buffer("inputs", None)

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.weight, self.kind, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float().reshape(-1, self.in_features)
        made = self.blocks.product(rows if self.inputs is None else rows[:, self.inputs])
        if self.outputs is not None:
            made = made[:, self.outputs]
        if self.bias is not None:
            made += self.bias
        return made.reshape(*x.shape[:-1], self.out_features).to(x.dtype)


class BlockLinears(nn.Module):
    """`nn.Linear` without a bias over several weights in blocks, whose outputs follow one another."""

    def __init__(self, weights: Sequence[Blocks]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(weight.linear(None) for weight in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class BlockEmbedding(nn.Module):
    """`nn.Embedding` over a table in blocks. Some models multiply embeddings by `scale`."""

    weight: torch.Tensor
    embed_scale: torch.Tensor | None

    def __init__(self, weight: Blocks, dtype: torch.dtype, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.kind, self.embedding_dim, self.dtype = weight.kind, weight.columns, dtype
        self.scale_dtype = torch.float32
        self.register_buffer("weight", weight.raw)
        self.register_buffer("embed_scale", scale, persistent=False)

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.weight, self.kind, self.embedding_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = self.blocks.widened(ids.reshape(-1))
        if self.embed_scale is not None:
            made *= self.embed_scale
        return made.reshape(*ids.shape, self.embedding_dim).to(self.dtype)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def raw_bytes(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a file's rows as a tensor over the same memory."""
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8))
