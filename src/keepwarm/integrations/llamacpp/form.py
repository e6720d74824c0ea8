"""The form of llama.cpp's saved states: which bytes are the keys and values of which token.

A state is a head, sections, and a tail. A section is one of llama.cpp's caches of keys and values: the meaning of its
cells, then all layers' keys, then all layers' values. Models with a window have two sections. The tail is the rest: the
states of recurrent layers, or a cache that has dropped positions. Only sections that hold every token are taken apart.

This follows llama.cpp's own writer (`llama_kv_cache::state_write`). llama.cpp does not promise to keep this form, so it
is checked against the loaded build before it is used (`context.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.ports import Bytes

BYTES = "float8_e4m3fn"  # a dtype of one byte: rows are moved unchanged, whatever they mean to llama.cpp
_MOST_LAYERS, _MOST_KINDS, _MOST_ROW, _MOST_STREAMS = 4096, 256, 1 << 24, 1 << 10
Order = npt.NDArray[np.intp] | None
CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])


class Unreadable(Exception):
    """The bytes are not in the expected form."""


@dataclass(frozen=True)
class Plane:
    """One layer's keys or values: `nbytes` per token of llama.cpp's type `kind`. With `width`, element by element:
    `[nbytes // width, tokens, width]` in place of `[tokens, nbytes]`."""

    kind: int
    nbytes: int
    width: int = 0

    @property
    def head(self) -> bytes:
        """The bytes before those of the plane."""
        if self.width:
            return struct.pack("<iII", self.kind, self.width, self.nbytes // self.width)
        return struct.pack("<iQ", self.kind, self.nbytes)


@dataclass(frozen=True)
class Section:
    """One cache of keys and values, with a plane for each layer. `values` is empty if there are only keys. If sequences
    have `streams` of their own, the others are empty."""

    transposed: bool
    keys: tuple[Plane, ...]
    values: tuple[Plane, ...]
    streams: int = 1

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (*self.keys, *self.values)

    def by_layer(self, parts: Sequence[Bytes]) -> list[tuple[tuple[Plane, Bytes], ...]]:
        """Return each layer's planes with their bytes: the keys, and the values if there are any."""
        named = [*zip(self.planes, parts, strict=True)]
        keys, values = named[: len(self.keys)], named[len(self.keys) :]
        return [*zip(keys, values, strict=True)] if values else [(key,) for key in keys]

    def head(self, tokens: int) -> bytes:
        """Return the bytes before the planes: the cells of positions 0 to `tokens` of sequence 0, in order."""
        cells = np.zeros(tokens, CELL)
        cells["position"], cells["sequences"] = np.arange(tokens), 1
        counts = struct.pack("<II", self.streams, tokens)
        return counts + cells.tobytes() + struct.pack("<II", self.transposed, len(self.keys))

    @property
    def end(self) -> bytes:
        """Return the bytes behind the planes: the other streams have no cells."""
        return bytes(4 * (self.streams - 1))

    @property
    def layers(self) -> list[LayerGeometry]:
        """The store's view of each layer. If there are only keys, they are split into two halves."""
        if self.values:
            return [LayerGeometry(1, k.nbytes, v.nbytes) for k, v in zip(self.keys, self.values, strict=True)]
        return [LayerGeometry(1, k.nbytes - k.nbytes // 2, k.nbytes // 2) for k in self.keys]


@dataclass(frozen=True)
class Form:
    """All facts of a state except its bytes."""

    sections: tuple[Section, ...]
    has_tail: bool

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(tuple(layer for section in self.sections for layer in section.layers), BYTES)

    def describe(self) -> list[Any]:
        """A JSON-ready form, part of the KV's identity. The number of streams is none."""
        planes = ([(p.kind, p.nbytes, p.width) for p in s.planes] for s in self.sections)
        parts = [[s.transposed, len(s.values), each] for s, each in zip(self.sections, planes, strict=True)]
        return [self.has_tail, *parts]


class Reader:
    """Takes bytes from the beginning of a state. Raises Unreadable when there are not enough."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> Bytes:
        if self.at + count > len(self.data):
            raise Unreadable(f"{count} bytes expected at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, kinds: str) -> tuple[int, ...]:
        return struct.unpack("<" + kinds, self.take(struct.calcsize("<" + kinds)).tobytes())


@dataclass(frozen=True)
class Found:
    """A section that was read: its planes' bytes, keys first, and the cell of each position (None: in order)."""

    form: Section
    parts: tuple[Bytes, ...]
    order: Order


@dataclass(frozen=True)
class State:
    """A state that was read."""

    sections: tuple[Found, ...]
    tail: Bytes

    @property
    def form(self) -> Form:
        return Form(tuple(found.form for found in self.sections), len(self.tail) > 0)


def read_state(data: Bytes, tokens: int, most: int) -> State:
    """Read a state without its head, of `tokens` tokens in sequence 0 and nothing else. All that follows the first
    `most` sections is its tail. Raises Unreadable."""
    reader = Reader(data)
    sections: list[Found] = []
    while reader.at < len(data) and len(sections) < most:
        began = reader.at
        try:
            sections.append(_section(reader, tokens))
        except Unreadable:
            reader.at = began
            break
    return State(tuple(sections), data[reader.at :])


def _section(reader: Reader, tokens: int) -> Found:
    streams, before = _stream(reader, tokens)
    order = _order(np.frombuffer(reader.take(CELL.itemsize * tokens).tobytes(), CELL))
    transposed, count = reader.numbers("II")
    if transposed > 1 or not 0 < count < _MOST_LAYERS:
        raise Unreadable(f"{count} layers, transposed {transposed}")
    keys = [_plane(reader, tokens, transposed=False) for _ in range(count)]
    began = reader.at
    try:
        values = [_plane(reader, tokens, transposed=bool(transposed)) for _ in range(count)]
    except Unreadable:  # latent attention keeps only keys
        values, reader.at = [], began
    if any(reader.numbers("I" * (streams - 1 - before))):
        raise Unreadable("cells of other streams")
    form = Section(bool(transposed), tuple(form for form, _ in keys), tuple(form for form, _ in values), streams)
    return Found(form, tuple(data for _, data in (*keys, *values)), order)


def _stream(reader: Reader, tokens: int) -> tuple[int, int]:
    """Return how many streams there are, and how many empty ones are before the one with the cells."""
    (streams,) = reader.numbers("I")
    if not 0 < streams <= _MOST_STREAMS or not tokens:
        raise Unreadable(f"{streams} streams of {tokens} tokens")
    before, count = 0, reader.numbers("I")[0]
    while not count and before < streams - 1:
        before, count = before + 1, reader.numbers("I")[0]
    if count != tokens:
        raise Unreadable(f"no cache of {tokens} tokens")
    return streams, before


def _order(cells: npt.NDArray[np.void]) -> Order:
    positions = cells["position"]
    if (cells["sequences"] != 1).any() or (cells["sequence"] != cells["sequence"][0]).any():
        raise Unreadable("cells of other sequences")
    if np.array_equal(positions, np.arange(len(cells))):
        return None
    order = np.argsort(positions)
    if not np.array_equal(positions[order], np.arange(len(cells))):
        raise Unreadable("positions are missing")
    return order


def _plane(reader: Reader, tokens: int, *, transposed: bool) -> tuple[Plane, Bytes]:
    if transposed:
        kind, width, elements = reader.numbers("iII")
        form = Plane(kind, width * elements, width)
    else:
        kind, nbytes = reader.numbers("iQ")
        form = Plane(kind, nbytes)
    if not 0 <= kind < _MOST_KINDS or not 0 < form.nbytes < _MOST_ROW or (transposed and form.width not in (1, 2, 4)):
        raise Unreadable(f"no rows: type {kind}, {form.nbytes} bytes")
    return form, reader.take(form.nbytes * tokens)


def rows_of(plane: Plane, data: Bytes, start: int, end: int, order: Order) -> Bytes:
    """Return the bytes of positions `[start, end)` of a plane, `[end - start, nbytes]`."""
    wanted: Any = slice(start, end) if order is None else order[start:end]
    if not plane.width:
        rows: Bytes = data.reshape(-1, plane.nbytes)[wanted]
        return rows
    cut = np.ascontiguousarray(data.reshape(plane.nbytes // plane.width, -1, plane.width)[:, wanted])
    turned = np.ascontiguousarray(cut.view(f"u{plane.width}")[..., 0].T)
    return turned.view(np.uint8)


def put_rows(plane: Plane, data: Bytes, start: int, rows: Bytes) -> None:
    """Write rows `[n, nbytes]`, for positions from `start` on, into a plane."""
    end = start + len(rows)
    if not plane.width:
        data.reshape(-1, plane.nbytes)[start:end] = rows
        return
    turned = np.ascontiguousarray(np.ascontiguousarray(rows).view(f"u{plane.width}").T)
    target = data.reshape(plane.nbytes // plane.width, -1, plane.width)
    target[:, start:end] = turned.view(np.uint8).reshape(len(target), len(rows), plane.width)


def lay_out(form: Form, tokens: int, head: bytes, tail: Bytes) -> tuple[Bytes, list[tuple[Bytes, ...]]]:
    """Return an empty state of `tokens` tokens, and the bytes of its planes by section, keys first."""
    pieces = [(head, 0)]
    for section in form.sections:
        pieces.append((section.head(tokens), 0))
        pieces += [(plane.head, plane.nbytes * tokens) for plane in section.planes]
        pieces.append((section.end, 0))
    data = np.empty(sum(len(said) + count for said, count in pieces) + len(tail), np.uint8)
    parts: list[Bytes] = []
    at = 0
    for said, count in pieces:
        data[at : at + len(said)] = np.frombuffer(said, np.uint8)
        at += len(said) + count
        if count:
            parts.append(data[at - count : at])
    data[at:] = tail
    left = iter(parts)
    return data, [tuple(islice(left, len(section.planes))) for section in form.sections]
