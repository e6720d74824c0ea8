"""Shows mlx-lm's prompt caches to the store: keys and values by token, and the leaves that cannot be cut as a snapshot.

A snapshot is a JSON head with all numbers, and then the bytes of the arrays. Classes are never named by what is stored:
a state is put into the objects that the model makes itself.
"""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.geometry import LayerGeometry
from keepwarm.core.ports import Bytes
from keepwarm.core.sinks import PlainSink
from keepwarm.errors import CorruptRun
from keepwarm.integrations.mlx.form import Caches, Form, Maker, Plane, Unsuitable, arrays_of, leaves_of

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
_HEAD = 8  # bytes that hold the length of the head


def bytes_of(arrays: list[Any]) -> list[Bytes]:
    """Return the bytes of arrays, in place: the last axis has an element's bytes. Computes what is not computed yet."""
    views = [array.view(mx.uint8) for array in arrays]
    mx.eval(views)
    return [np.array(view, copy=False) for view in views]


def _part(planes: list[Bytes], layer: LayerGeometry, kv: int, start: int, end: int) -> Bytes:
    """Return the keys or values of tokens. A layer with one plane has them as two halves of its rows."""
    if len(planes) == 2:
        return planes[kv][:, start:end]
    rows = planes[0][:, start:end]
    return rows[..., layer.key_dim :] if kv else rows[..., : layer.key_dim]


class CacheSource:
    """The keys and values of a prompt cache of this form. Implements `KVSource`."""

    def __init__(self, caches: Caches, form: Form) -> None:
        self.geometry = form.geometry
        arrays = [array for leaf in leaves_of(caches) for array in arrays_of(leaf) if array.shape[3]]
        read = iter(bytes_of(arrays))
        self._layers: list[list[Bytes]] = [
            [next(read)[0] for _ in layer] for leaf in form.leaves for layer in leaf.layers
        ]

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return _part(self._layers[layer], self.geometry.layers[layer], kv, start, end)


class CacheSink(PlainSink):
    """A prompt cache that is being put together from what is stored. Implements `KVSink`."""

    def __init__(self, maker: Maker, tokens: int, tail: Bytes) -> None:
        """Raises CorruptRun if the `tail` is not the state of this model's leaves."""
        self.geometry = maker.form.geometry
        self._maker = maker
        self._tokens = tokens
        self._states = iter(unpack(tail)) if maker.form.has_tail else iter(())
        self._layers = [
            [np.empty((plane.heads, tokens, plane.nbytes), np.uint8) for plane in layer]
            for leaf in maker.form.leaves
            for layer in leaf.layers
        ]

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return _part(self._layers[layer], self.geometry.layers[layer], kv, start, end)

    def finish(self) -> Caches:
        """Return the prompt cache. Raises CorruptRun if a leaf does not take its state."""
        caches, filled = self._maker.make(), iter([plane for layer in self._layers for plane in layer])
        for cache, leaf in zip(leaves_of(caches), self._maker.form.leaves, strict=True):
            if not leaf.planes:
                self._give(cache)
                continue
            arrays = [_array(plane, self._tokens, next(filled) if plane.nbytes else None) for plane in leaf.planes]
            whole = leaf.kind == "KVCache"
            keys, values = (arrays[0], arrays[1]) if whole else (tuple(arrays[::2]), tuple(arrays[1::2]))
            cache.state = (keys, values, self._tokens, *leaf.settings)
        return caches

    def _give(self, cache: Any) -> None:
        try:
            cache.state = next(self._states)
        except (StopIteration, TypeError, ValueError) as error:
            raise CorruptRun(f"a stored state is not that of a {type(cache).__name__}: {error}") from None


def _array(plane: Plane, tokens: int, rows: Bytes | None) -> Any:
    dtype = getattr(mx, plane.dtype)
    if rows is None:
        return mx.zeros((1, plane.heads, tokens, plane.width), dtype)
    return mx.array(rows.view(_UNSIGNED[dtype.size])).view(dtype)[None]


class Placed:
    """Where a finished prompt cache is put, for mlx-lm to take. Implements `Place`."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._caches: Caches | None = None

    def sink(self, tokens: int, tail: Bytes) -> CacheSink:
        return CacheSink(self._maker, tokens, tail)

    def put(self, whole: Caches, tokens: TokenIds) -> bool:
        self._caches = whole
        return True

    def take(self) -> Caches:
        """Return the prompt cache that was put here."""
        caches, self._caches = self._caches, None
        assert caches is not None
        return caches


# ---- states that are kept whole ----


def tail_of(caches: Caches) -> Bytes:
    """Return the leaves that cannot be cut as bytes; empty if there are none. Raises Unsuitable."""
    states = [leaf.state for leaf in leaves_of(caches) if not arrays_of(leaf)]
    return pack(states) if states else np.empty(0, np.uint8)


def pack(states: list[Any]) -> Bytes:
    """Return states as bytes. Raises Unsuitable when they hold something other than arrays, numbers and None."""
    arrays: list[Any] = []
    told = json.dumps([_told(state, arrays) for state in states]).encode()
    parts = [np.frombuffer(len(told).to_bytes(_HEAD, "little") + told, np.uint8)]
    return np.concatenate([*parts, *(data.reshape(-1) for data in bytes_of([_flat(array) for array in arrays]))])


def _flat(array: Any) -> Any:
    """Return an array with an axis, which a single number has not."""
    return array.reshape(-1)


def _told(value: Any, arrays: list[Any]) -> Any:
    """Return a JSON value in which `{"array": ...}` stands for each array. The arrays are appended to `arrays`."""
    if isinstance(value, mx.array):
        name = str(value.dtype).rpartition(".")[2]
        if name not in _DTYPES:
            raise Unsuitable(f"a state holds an array of {name}")
        arrays.append(value)
        return {"array": [name, list(value.shape)]}
    if isinstance(value, (list, tuple)):
        return [_told(each, arrays) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise Unsuitable(f"a state holds a {type(value).__name__}")


def unpack(data: Bytes) -> list[Any]:
    """Return the states that `pack` made bytes of. Raises CorruptRun."""
    try:
        size = int.from_bytes(data[:_HEAD].tobytes(), "little")
        told = json.loads(data[_HEAD : _HEAD + size].tobytes())
        pieces = _Pieces(data[_HEAD + size :])
        states = [pieces.value(each) for each in told]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRun(f"a stored state cannot be read: {error}") from None
    if pieces.left:
        raise CorruptRun(f"a stored state has {pieces.left} bytes too many")
    return states


class _Pieces:
    """Takes arrays from the beginning of bytes."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    @property
    def left(self) -> int:
        return len(self._data)

    def value(self, told: Any) -> Any:
        if isinstance(told, list):
            return [self.value(each) for each in told]
        return self._array(*told["array"]) if isinstance(told, dict) else told

    def _array(self, name: str, shape: list[int]) -> Any:
        if name not in _DTYPES:
            raise ValueError(f"{name!r} is no type of an array")
        dtype = getattr(mx, name)
        count = int(np.prod(shape, dtype=np.int64)) * int(dtype.size)
        if not 0 <= count <= self.left:
            raise ValueError(f"{count} bytes expected, there are {self.left}")
        taken, self._data = self._data[:count], self._data[count:]
        return mx.array(np.ascontiguousarray(taken).view(_UNSIGNED[dtype.size])).view(dtype).reshape(shape)
