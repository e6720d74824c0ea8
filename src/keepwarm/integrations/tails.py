"""Shows the store the part of an engine's state that cannot be cut at a position: a snapshot."""

from __future__ import annotations

import numpy as np

from keepwarm.core.geometry import STATE_BYTES, KVGeometry, LayerGeometry
from keepwarm.core.ports import Bytes
from keepwarm.core.sinks import PlainSink
from keepwarm.errors import CorruptRun


class Tail:
    """The part of a state that cannot be cut at a position, as one row. Implements `KVSource`."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._half = len(data) - len(data) // 2
        self.geometry = KVGeometry((LayerGeometry(1, self._half, len(data) // 2),), STATE_BYTES)

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return (self._data[self._half :] if kv else self._data[: self._half])[None, None]


class TailSink(PlainSink):
    """Receives a tail of any size. Implements `OpenSink`."""

    def __init__(self) -> None:
        self.geometry = KVGeometry((), STATE_BYTES)
        self.data: Bytes = np.empty(0, np.uint8)

    def take_form(self, geometry: KVGeometry) -> None:
        if geometry.dtype != STATE_BYTES or len(geometry.layers) != 1:
            raise CorruptRun(f"it holds {geometry.dtype}, a state was expected")
        self.geometry = geometry
        self.data = np.empty(geometry.bytes_per_token, np.uint8)

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        half = self.geometry.layers[0].key_dim
        return (self.data[half:] if kv else self.data[:half])[None, None]
