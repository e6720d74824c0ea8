"""Encoded blocks that stay encoded: their rows are in memory as in the store, and attention reads them there.

When attention needs them, the compiled kernels decode the pages of 64 positions at a time, into memory that stays in a
core's own cache. So KV in full precision exists only for what a request computes itself, never for the reused prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import BlockCodec, Bytes
from keepwarm.core.reads import Arriving
from keepwarm.runtime.arena.late import LateBlock
from keepwarm.runtime.arena.layer import ArenaLayer
from keepwarm.runtime.native.places import Region
from keepwarm.store.runfile.layout import Layout


class Taker(Protocol):
    """The arena that receives encoded rows; the part of its interface that they use."""

    geometry: KVGeometry
    layers: list[ArenaLayer]

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes: ...

    def commit(self, layer: int, start: int, end: int) -> None: ...

    def map(self, start: int, end: int, region: Region) -> None: ...

    def defer(self, arriving: Arriving) -> bool: ...


class EncodedRows:
    """Receives the rows of encoded blocks for an arena and keeps them encoded. Implements `KVSink`.

    Rows in RAM are used in place; rows from elsewhere are read into new memory of their size.
    """

    def __init__(
        self, arena: Taker, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> None:
        self.geometry = rows
        self._arena, self._codec, self._blocks, self._end = arena, codec, blocks, end
        self._planes: dict[tuple[int, int], Bytes] = {}

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        if not self._planes:
            layout = Layout(self.geometry, [end - start])
            memory = np.empty(layout.nbytes, np.uint8)
            for each in range(len(self.geometry.layers)):
                for part in (0, 1):
                    first, shape = layout.offset(each, part), layout.shape(each, part)
                    self._planes[each, part] = memory[first : first + np.prod(shape)].reshape(shape)
            self._map()
        return self._planes[layer, kv]

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self._planes[layer, kv] = data
        if len(self._planes) == 2 * len(self.geometry.layers):
            self._map()

    def defer(self, arriving: Arriving) -> bool:
        """Defer the load only if it ends with a whole block: the arena asks for nothing after its end."""
        return sum(self._blocks[-1]) == self._end and self._arena.defer(arriving)

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> EncodedRows | None:
        return None

    def commit(self, layer: int, start: int, end: int) -> None:
        """Register the layer to be decoded in case something other than the kernels needs it."""
        for kv in (0, 1):
            for at, length in self._blocks:
                write = partial(self._decode, layer, kv, at, length)
                self._arena.layers[layer].fill_late(LateBlock(at, min(at + length, self._end), write))
        self._arena.commit(layer, start, self._end)

    def _decode(self, layer: int, kv: int, start: int, length: int, first: int, count: int) -> None:
        """Decode the first `count` positions of a block into the arena. A block is decoded from its beginning."""
        geometry, at = self._arena.geometry, start - self._blocks[0][0]
        packed = self._planes[layer, kv][:, at : at + length].reshape(self.geometry.layers[layer].kv_heads, -1)
        dim = (geometry.layers[layer].key_dim, geometry.layers[layer].value_dim)[kv]
        target = self._arena.view(layer, kv, start, start + count)
        self._codec.decode(packed, kv, dim, geometry.dtype, length, target)

    def _map(self) -> None:
        """Tell the arena where each block is. Layers of a run have one shape and lie at equal distances."""
        keys, values = self._planes[0, 0], self._planes[0, 1]
        layer = len(keys) * (keys.strides[0] + values.strides[0])
        last = len(self.geometry.layers) - 1
        if _address(self._planes[last, 0]) != _address(keys) + last * layer:
            raise ValueError("the layers of encoded rows do not lie at equal distances")
        for start, length in self._blocks:
            first = start - self._blocks[0][0]
            base = _address(keys) + first * keys.strides[1]
            value = _address(values) + first * values.strides[1] - base
            coding = self._codec.codec.coding(length)
            region = Region(base, value, layer, (keys.strides[0], values.strides[0]), coding, keys)
            self._arena.map(start, min(start + length, self._end), region)


def _address(plane: Bytes) -> int:
    return int(plane.__array_interface__["data"][0])
