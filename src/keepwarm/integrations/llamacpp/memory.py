"""Shows the keys and values in llama.cpp's states to the store, by token."""

from __future__ import annotations

import numpy as np

from keepwarm.core.ports import Bytes
from keepwarm.core.sinks import PlainSink
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
