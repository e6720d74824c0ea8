"""A sink for KV whose bytes are all written as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from keepwarm.core.codecs import Bytes
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import BlockCodec, KVSink
from keepwarm.core.reads import Arriving


class PlainSink(ABC):
    """What such a sink does as part of `KVSink`, once its `view` tells where bytes belong: nothing is put off, and
    nothing stays encoded."""

    @abstractmethod
    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Part of `KVSink`."""

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        """Part of `KVSink`."""
        self.view(layer, kv, start, start + data.shape[1])[...] = data

    def defer(self, arriving: Arriving) -> bool:
        """Part of `KVSink`."""
        return False

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> KVSink | None:
        """Part of `KVSink`."""
        return None

    def commit(self, layer: int, start: int, end: int) -> None:
        """Part of `KVSink`. The bytes are used when all are in place."""
        return
