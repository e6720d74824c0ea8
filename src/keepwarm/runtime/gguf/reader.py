"""Reads what a GGUF file says before its weights.

gguf's own reader makes two objects of every word of the vocabulary and of every merge, which takes seconds and hundreds
of megabytes. Here the file is parsed once, and arrays are stepped over.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

_LENGTH = struct.Struct("<Q")
_WHOLE = (*(GGUFValueType.INT32, GGUFValueType.UINT32, GGUFValueType.INT64, GGUFValueType.UINT64), GGUFValueType.BOOL)


class Reader(GGUFReader):
    """gguf's reader, which leaves arrays of the metadata unread: `length` tells how long they are.

    Raises ValueError, where a file ends early.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """Read bytes. Raises ValueError after the file's end, where the library's own function returns less than was
        asked for."""
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != int(count):
            raise ValueError("it ends early")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        start = orig_offs + 12
        size = self._size_of(GGUFValueType(kind[0]), int(count[0]), start)
        self._get(start, np.uint8, size)  # raises ValueError if the file ends before
        return 12 + size, [kind, count], [], [GGUFValueType.ARRAY, GGUFValueType(kind[0])]

    others: tuple[Reader, ...] = ()  # of the further files of a model that is split

    def join(self, others: tuple[Reader, ...]) -> None:
        """Add the tensors of a model's further files. Their metadata are left out."""
        self.others = others
        self.tensors = [*self.tensors, *(each for other in others for each in other.tensors)]

    @property
    def map(self) -> mmap.mmap:
        """The file's memory map."""
        found: mmap.mmap = self.data._mmap  # type: ignore[attr-defined]
        return found

    @property
    def maps(self) -> list[mmap.mmap]:
        """The memory maps of all of a model's files."""
        return [self.map, *(other.map for other in self.others)]

    def _size_of(self, kind: GGUFValueType, count: int, start: int) -> int:
        """The bytes of an array's values."""
        if kind in self.gguf_scalar_to_np:
            return count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        if kind != GGUFValueType.STRING:
            raise ValueError(f"it has an array of {kind.name}: expected numbers or texts")
        memory, at = memoryview(self.map), start
        try:
            for _ in range(count):
                at += 8 + _LENGTH.unpack_from(memory, at)[0]
        except struct.error:
            raise ValueError("it ends early") from None
        return at - start

    def value(self, name: str) -> Any:
        """A number or a text of the metadata; None if it is not there, or an array."""
        field = self.fields.get(name)
        return None if field is None or field.types[0] == GGUFValueType.ARRAY else field.contents()

    def needed(self, name: str) -> Any:
        """A number or a text of the metadata. Raises KeyError, which names it, if it is not there."""
        if (found := self.value(name)) is None:
            raise KeyError(f"its metadata lacks {name}")
        return found

    def length(self, name: str) -> int | None:
        """How many values an array of the metadata has; None if it is not there."""
        field = self.fields.get(name)
        return None if field is None or field.types[0] != GGUFValueType.ARRAY else int(field.parts[-1][0])

    def numbers(self, name: str) -> list[int]:
        """Whole numbers of the metadata. Raises KeyError if the array is not there, ValueError if it holds others."""
        parts = self.fields[name].parts
        kind, count = GGUFValueType(int(parts[-2][0])), parts[-1]
        if self.fields[name].types[0] != GGUFValueType.ARRAY or kind not in _WHOLE:
            raise ValueError(f"{name} is no array of whole numbers")
        start = count.ctypes.data - self.data.ctypes.data + count.nbytes
        return [int(each) for each in self._get(start, self.gguf_scalar_to_np[kind], int(count[0]))]

    def everything(self) -> dict[str, Any]:
        """The metadata. Arrays of texts and of fractions are represented by their lengths."""
        found: dict[str, Any] = {}
        for name in self.fields:
            found[name] = self.value(name)
            if found[name] is None:
                try:
                    found[name] = self.numbers(name)
                except ValueError:
                    found[name] = self.length(name)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.tensors)
