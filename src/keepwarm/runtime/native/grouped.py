"""Weights of 4 bits in groups, as GPTQ, AWQ and compressed-tensors store them: words of eight codes, scales, and zeros.

They stay as their file has them, and are read in C++ (`blocks.h`). A weight is scale * (code - zero), exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from keepwarm.runtime.native.blocks import FLOATS, BlockLinear, Blocks, Source, row_bytes

GPTQ, GPTQ_2, AWQ, COMPRESSED = range(4)  # as in blocks.h; GPTQ's second version stores zeros as they are
_KINDS = {128: 228, 64: 164, 32: 132}  # columns that share a packed scale, and the kind in blocks.h
_CODES = 8  # in a word
_Parts = Mapping[str, torch.Tensor | None]


class NotMapped(Exception):
    """The kernels have no form for these weights; the text says why."""


@dataclass(frozen=True)
class Grouped(Blocks):
    """A weight `[rows, columns]`; `group` columns share a scale and a zero. `raw`, `scales` and `zeros` are bytes of
    the file. Without zeros each is 8. `scale_kind` is as in blocks.h."""

    rows: int
    group: int
    layout: int
    scale_kind: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    first: int = 0  # the rows are those from this one on
    others: int = 0  # how many more rows the tensors have

    @classmethod
    def of(
        cls, layout: int, shape: tuple[int, int], codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> Grouped:
        """Make a weight of a file's tensors. Raises ValueError for such as do not fit each other, and NotMapped."""
        rows, columns = shape
        groups = int(scales.shape[1 if layout == COMPRESSED else 0]) if scales.dim() == 2 else 0
        _check({"codes": codes, "scales": scales, "zeros": zeros}, _shapes(layout, rows, columns, groups), shape)
        if not groups or columns % groups:
            raise ValueError(f"{groups} groups of scales for {columns} columns")
        share = next((each for each in _KINDS if columns // groups % each == 0), 0)
        if not share:
            raise NotMapped(f"groups of {columns // groups} columns; the kernels have multiples of 32")
        if layout == GPTQ and zeros is not None and _has_code(zeros, 15):
            raise NotMapped("a zero of GPTQ's first version that is 16 or 0, depending on who reads it")
        if scales.dtype is torch.float32 and bool((scales.contiguous().view(torch.int32) & 255).any()):
            raise NotMapped("scales in float32 with more than 16 significant bits")
        return cls(
            raw=_bytes(codes),
            kind=_KINDS[share],
            columns=columns,
            rows=rows,
            group=columns // groups,
            layout=layout,
            scale_kind=FLOATS[scales.dtype],
            scales=_bytes(scales),
            zeros=None if zeros is None else _bytes(zeros),
        )

    def __len__(self) -> int:
        return self.rows

    @property
    def source(self) -> Source:
        found = super().source
        found.scales, found.zeros = self.scales.data_ptr(), None if self.zeros is None else self.zeros.data_ptr()
        found.group, found.layout, found.scale_kind = self.group, self.layout, self.scale_kind
        found.first, found.across = self.first, self.rows + self.others
        return found

    @property
    def is_whole(self) -> bool:
        """Whether the tensors have as many bytes as this shape, group and kind need."""
        held = [self.raw, self.scales, *([] if self.zeros is None else [self.zeros])]
        if any(t.dtype is not torch.uint8 or t.device.type != "cpu" or not t.is_contiguous() for t in held):
            return False
        if row_bytes(self.source) or self.group % (self.kind - 100) or self.columns % self.group:
            return False
        groups = self.columns // self.group
        shapes = _shapes(self.layout, self.rows + self.others, self.columns, groups)
        sizes = [4, 2 if self.scale_kind else 4, 4]
        needed = [rows * columns * size for (rows, columns), size in zip(shapes.values(), sizes, strict=True)]
        return [t.numel() for t in held] == needed[: len(held)]

    def split(self, sizes: Sequence[int]) -> tuple[Blocks, ...]:
        every, starts = self.rows + self.others, accumulate([self.first, *sizes[:-1]])
        parts = zip(sizes, starts, strict=True)
        return tuple(replace(self, rows=size, first=start, others=every - size) for size, start in parts)

    def of_rows(self, numbers: torch.Tensor) -> Blocks:
        """Return a copy of the rows of these numbers `[n]`. Raises ValueError unless they are whole eights of rows: a
        word may have the codes or zeros of eight."""
        eights = numbers.reshape(-1, _CODES) if len(numbers) % _CODES == 0 else numbers[:, None]
        whole = eights[:, 0] // _CODES
        if self.others or not torch.equal(eights, _CODES * whole[:, None] + torch.arange(_CODES)):
            raise ValueError("products in groups of 4 bits of which parts are taken that are no whole eights of rows")

        def taken(held: torch.Tensor, which: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return _bytes(held.view(dtype).index_select(0 if self.layout == COMPRESSED else 1, which))

        return replace(
            self,
            rows=len(numbers),
            raw=taken(self.raw, whole if self.layout == AWQ else numbers),
            scales=taken(self.scales, numbers, torch.int16 if self.scale_kind else torch.int32),
            zeros=None if self.zeros is None else taken(self.zeros, whole),
        )

    def linear(self, bias: torch.Tensor | None) -> BlockLinear:
        return GroupedLinear(self, bias)


class GroupedLinear(BlockLinear):
    """`BlockLinear` over a weight in groups."""

    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(self, weight: Grouped, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.group, self.layout, self.scale_kind = weight.group, weight.layout, weight.scale_kind
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)

    @property
    def blocks(self) -> Grouped:
        return Grouped(
            self.weight,
            self.kind,
            self.in_features,
            self.out_features,
            self.group,
            self.layout,
            self.scale_kind,
            self.scales,
            self.zeros,
        )


def _shapes(layout: int, rows: int, columns: int, groups: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a weight's tensors, in words or numbers."""
    if layout == COMPRESSED:
        return {"codes": (rows, columns // _CODES), "scales": (rows, groups), "zeros": (-(-rows // _CODES), groups)}
    codes = (columns, rows // _CODES) if layout == AWQ else (columns // _CODES, rows)
    return {"codes": codes, "scales": (groups, rows), "zeros": (groups, rows // _CODES)}


def _check(parts: _Parts, shapes: Mapping[str, tuple[int, int]], shape: tuple[int, int]) -> None:
    """Raise ValueError for another shape, and NotMapped for another type: some tools write that on purpose."""
    if any(size % _CODES for size in shape):
        raise NotMapped(f"a weight of {shape[0]} by {shape[1]}, which is no multiple of {_CODES}")
    for name, found in parts.items():
        dtypes = tuple(FLOATS) if name == "scales" else (torch.int32,)
        if found is None:
            continue
        if found.dtype not in dtypes:
            raise NotMapped(f"{name} in {found.dtype}; the kernels have {' and '.join(map(str, dtypes))}")
        if tuple(found.shape) != shapes[name]:
            told = f"{name} of the shape {list(found.shape)} for a weight of {shape[0]} by {shape[1]}"
            raise ValueError(f"{told}; expected {list(shapes[name])}")


def _has_code(words: torch.Tensor, code: int) -> bool:
    pairs = _bytes(words)
    return bool(((pairs & 15 == code) | (pairs >> 4 == code)).any())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8).reshape(len(tensor), -1)
