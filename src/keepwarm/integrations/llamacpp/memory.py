"""Shows llama.cpp's states to the store: keys and values by token, and the part that cannot be cut as a snapshot."""

from __future__ import annotations

import numpy as np

from keepwarm.core.geometry import STATE_BYTES, KVGeometry, LayerGeometry
from keepwarm.core.ports import Bytes
from keepwarm.core.sinks import PlainSink
from keepwarm.errors import CorruptRun
from keepwarm.integrations.llamacpp.form import Form, State, lay_out, put_rows, rows_of


class StateSource:
    """The keys and values in a state that was read. Implements `KVSource`."""

    def __init__(self, state: State) -> None:
        self.geometry = state.form.geometry
        self._layers = [
            (planes, found.order) for found in state.sections for planes in found.form.by_layer(found.parts)
        ]

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        planes, order = self._layers[layer]
        if len(planes) == 2:
            return rows_of(*planes[kv], start, end, order)[None]
        half, rows = self.geometry.layers[layer].key_dim, rows_of(*planes[0], start, end, order)
        return (rows[:, half:] if kv else rows[:, :half])[None]


class StateSink(PlainSink):
    """A state that is being put together from stored keys and values. Implements `KVSink`."""

    def __init__(self, form: Form, tokens: int, head: bytes, tail: Bytes) -> None:
        self.geometry = form.geometry
        self.data, parts = lay_out(form, tokens, head, tail)
        self._layers = [
            planes for section, each in zip(form.sections, parts, strict=True) for planes in section.by_layer(each)
        ]
        self._turned: dict[int, Bytes] = {}  # by layer, the values that must still be transposed element by element
        self._tokens = tokens

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        planes = self._layers[layer]
        plane, data = planes[kv if len(planes) == 2 else 0]
        if plane.width:
            if layer not in self._turned:
                self._turned[layer] = np.empty(self._tokens * plane.nbytes, np.uint8)
            data = self._turned[layer]
        rows = data.reshape(-1, plane.nbytes)[start:end]
        if len(planes) == 1:
            half = self.geometry.layers[layer].key_dim
            rows = rows[:, half:] if kv else rows[:, :half]
        return rows[None]

    def finish(self) -> Bytes:
        """Return the whole state."""
        for layer, rows in self._turned.items():
            plane, data = self._layers[layer][1]
            put_rows(plane, data, 0, rows.reshape(-1, plane.nbytes))
        self._turned.clear()
        return self.data


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
