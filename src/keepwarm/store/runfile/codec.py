"""Runs of encoded KV. All code that stores, moves and verifies runs treats them like any other: as rows of bytes.

A block's encoded bytes (`core.codecs.pack`) lie in its rows, head after head, padded at the end. So a run's geometry
has the row's bytes as its widths and `codec/dtype` as its dtype, and everything from the checksums to the wire works as
for raw KV. Blocks that need about the same bytes per token share a run; others get their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepwarm.core.codecs import Codec, itemsize
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import BlockCodec, Bytes, KVSink
from keepwarm.core.reads import Arriving
from keepwarm.errors import CorruptRun
from keepwarm.store.runfile.attended import needed_from
from keepwarm.store.runfile.layout import Layout, Run, StoredBlock, new_run_id

_WASTE = 1.05  # most bytes of a run per byte that its blocks need


def coded_geometry(geometry: KVGeometry, codec: Codec, lengths: Sequence[int]) -> KVGeometry:
    """Return the geometry of rows that hold blocks of these lengths."""

    def row(dim: int, kv: int, kept: int | None) -> int:
        rows = lengths if kept is None else [min(n, kept) for n in lengths]
        return max(-(-codec.block_bytes(n, dim, itemsize(geometry.dtype), kv) // n) for n in rows)

    layers = tuple(
        replace(layer, key_dim=row(layer.key_dim, 0, layer.kept), value_dim=row(layer.value_dim, 1, layer.kept))
        for layer in geometry.layers
    )
    return KVGeometry(layers, f"{codec.identity}/{geometry.dtype}")


def coded_bytes(geometry: KVGeometry, codec: Codec, tokens: int) -> int:
    """Bytes of KV that a block of `tokens` tokens has in the store."""
    return coded_geometry(geometry, codec, [tokens]).block_bytes(tokens)


def coded_runs(run: Run, codec: BlockCodec) -> list[Run]:
    """Encode a raw run into one run, or several that continue each other. Raises ValueError for infinite numbers."""
    groups: list[list[StoredBlock]] = []
    for block in run.blocks:
        if groups and _fit(run.geometry, codec.codec, [*groups[-1], block]):
            groups[-1].append(block)
        else:
            groups.append([block])
    return [_coded(run, blocks, codec) for blocks in groups]


def _fit(geometry: KVGeometry, codec: Codec, blocks: Sequence[StoredBlock]) -> bool:
    common = coded_geometry(geometry, codec, [block.length for block in blocks])
    together = sum(common.block_bytes(block.length) for block in blocks)
    return together <= _WASTE * sum(coded_bytes(geometry, codec, block.length) for block in blocks)


def _coded(run: Run, blocks: Sequence[StoredBlock], codec: BlockCodec) -> Run:
    geometry = coded_geometry(run.geometry, codec.codec, [block.length for block in blocks])
    first, end = blocks[0].start - run.start, blocks[-1].end - run.start
    coded = Run(
        id=new_run_id(),
        geometry=geometry,
        namespace=run.namespace,
        tokens=run.tokens[first:end].copy(),
        blocks=tuple(replace(block, ordinal=ordinal) for ordinal, block in enumerate(blocks)),
        data=np.zeros(Layout(geometry, [block.length for block in blocks]).nbytes, np.uint8),
    )
    for layer, shape in enumerate(run.geometry.layers):
        for kv, dim in enumerate((shape.key_dim, shape.value_dim)):
            for block, own in zip(blocks, coded.blocks, strict=True):
                packed = codec.encode(run.rows(layer, kv, (block,)), kv, dim, run.geometry.dtype)
                rows = coded.rows(layer, kv, (own,))
                for head, row in enumerate(packed):
                    rows[head].reshape(-1)[: len(row)] = row  # one head's rows are contiguous, so this is a view
    return coded


def common_geometry(geometries: Sequence[KVGeometry]) -> KVGeometry | None:
    """Return a geometry whose rows hold the rows of all. None when they differ in more than the width of encoded
    rows."""
    first = geometries[0]
    if all(geometry == first for geometry in geometries):
        return first
    kinds = {(each.dtype, tuple((layer.kv_heads, layer.kept) for layer in each.layers)) for each in geometries}
    if not first.is_coded or len(kinds) > 1:
        return None
    layers = (
        replace(same[0], key_dim=max(layer.key_dim for layer in same), value_dim=max(layer.value_dim for layer in same))
        for same in zip(*(geometry.layers for geometry in geometries), strict=True)
    )
    return KVGeometry(tuple(layers), first.dtype)


def widen_rows(rows: Bytes, target: Bytes, places: Iterable[tuple[StoredBlock, int, int]]) -> None:
    """Copy encoded blocks into wider rows; nothing is decoded. Both are `[heads, rows, row bytes]`; `places` gives each
    block's first row and the one after its last."""
    target[...] = 0
    for _, first, last in places:
        for head in range(len(rows)):
            narrow = rows[head, first:last].reshape(-1)
            target[head, first:last].reshape(-1)[: len(narrow)] = narrow


class CodedSink:
    """Takes the rows of whole encoded blocks, and puts their KV up to position `end` into another sink.

    Implements `WindowedSink`. Each layer is decoded when it is committed: after it is read and verified, it is decoded
    directly to where attention reads it.
    """

    def __init__(
        self,
        sink: KVSink,
        coded: KVGeometry,
        raw: KVGeometry,
        blocks: Sequence[StoredBlock],
        end: int,
        codec: BlockCodec,
    ) -> None:
        self.geometry = coded
        self._sink, self._raw, self._blocks, self._end, self._codec = sink, raw, blocks, end, codec
        self._rows: dict[tuple[int, int], Bytes] = {}

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        if (layer, kv) not in self._rows:
            shape = self.geometry.layers[layer].kv_heads, end - start, self.geometry.head_bytes(layer, kv)
            self._rows[layer, kv] = np.empty(shape, np.uint8)
        return self._rows[layer, kv]

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self._rows[layer, kv] = data

    def commit(self, layer: int, start: int, end: int) -> None:
        shape = self._raw.layers[layer]
        for kv, dim in enumerate((shape.key_dim, shape.value_dim)):
            rows = self._rows.pop((layer, kv))
            target = self._sink.view(layer, kv, start, self._end)
            for block in (each for each in self._blocks if each.end > start):
                begin = shape.kept_from(block.start, block.end)
                first, last, count = begin - start, min(block.end, self._end) - start, block.end - begin
                packed = rows[:, first : first + count].reshape(len(rows), -1)
                self._codec.decode(packed, kv, dim, self._raw.dtype, count, target[:, first:last])
        self._sink.commit(layer, start, self._end)

    def needed_from(self, layer: int) -> int:
        """Part of `WindowedSink`."""
        return needed_from(self._sink, layer)

    def defer(self, arriving: Arriving) -> bool:
        """Only whole blocks can be deferred: otherwise the other sink expects another end."""
        return self._blocks[-1].end == self._end and self._sink.defer(arriving)

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> KVSink | None:
        return None


@dataclass(frozen=True)
class Coding:
    """How an archive encodes: the codec, and the model's own KV."""

    codec: BlockCodec
    geometry: KVGeometry

    def sink(self, sink: KVSink, coded: KVGeometry, blocks: Sequence[StoredBlock], end: int) -> KVSink:
        """Return a sink for the rows of encoded blocks. Raises CorruptRun when they have another codec or model."""
        raw, codec = self.geometry, self.codec.codec
        expected = f"{codec.identity}/{raw.dtype}"
        if coded.dtype != expected or [g.kv_heads for g in coded.layers] != [g.kv_heads for g in raw.layers]:
            raise CorruptRun(f"KV is encoded as {coded.dtype}, the model expects {expected}")
        raw = replace(raw, layers=tuple(replace(g, kept=c.kept) for g, c in zip(raw.layers, coded.layers, strict=True)))
        needed = coded_geometry(raw, codec, [block.length for block in blocks])
        for rows, need in zip(coded.layers, needed.layers, strict=True):
            if rows.key_dim < need.key_dim or rows.value_dim < need.value_dim:
                raise CorruptRun(f"rows of {rows.key_dim} and {rows.value_dim} bytes are too short for {coded.dtype}")
        kept = sink.encoded(coded, self.codec, [(block.start, block.length) for block in blocks], end)
        return kept or CodedSink(sink, coded, raw, blocks, end, self.codec)


def bytes_of(geometry: KVGeometry, coding: Coding | None, blocks: Sequence[StoredBlock]) -> int:
    """Upper bound of the bytes of KV that blocks have in the store."""
    geometry = geometry.stored
    if coding is None or geometry.is_state:
        return sum(geometry.block_bytes(block.length) for block in blocks)
    return int(_WASTE * sum(coded_bytes(geometry, coding.codec.codec, block.length) for block in blocks))
