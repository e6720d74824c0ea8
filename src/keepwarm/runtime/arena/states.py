"""Recurrent state: what layers keep of a sequence that is no key or value of a token. It cannot be cut at a position,
so it is kept as a snapshot at some.

A layer's state is whatever its attributes hold: tensors, and plain values beside them. So no class is known here but
those that keep keys and values, too. Whether a state that was put back goes on as the one that was taken is for the
probe at load to find out (`runtime.probe`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from keepwarm.core.geometry import STATE_BYTES, KVGeometry, LayerGeometry
from keepwarm.core.ports import BlockCodec, Bytes, KVSink
from keepwarm.core.reads import Arriving
from keepwarm.errors import CorruptRun
from keepwarm.runtime.arena.layer import ArenaLayer

_LENGTH = 8  # bytes before a layer's description
# of transformers' linear attention layers: what beside an attention layer's own attributes is state
_LINEAR = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
_PLAIN = (type(None), bool, int, float, str)
_TORCH = (torch.dtype, torch.device)


class StateArenaLayer(ArenaLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]  # they share attributes
    """A layer that has keys and values in an arena, and a recurrent state beside them. Of a window, too: what makes the
    masks takes any other class for one without keys."""

    is_compileable = False
    is_croppable = False

    def __init__(self, kv: Any, states: int) -> None:
        """`kv` are the arguments of `ArenaLayer`."""
        ArenaLayer.__init__(self, **kv)
        device, dtype = self.device, self.dtype
        LinearAttentionLayer.__init__(self, number_of_states=states)
        self.device, self.dtype = device, dtype

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """For keys and values there is nothing to do."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        self.seek(0)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of every layer that has one, at a position. Implements `KVSource`: one token's, in the store's eyes."""

    position: int
    layers: tuple[Bytes, ...]  # 1-D uint8, a description and then the tensors

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.layers))

    @property
    def geometry(self) -> KVGeometry:
        """A layer's bytes in two halves, where keys and values would be."""
        return KVGeometry(tuple(LayerGeometry(1, len(a) - len(a) // 2, len(a) // 2) for a in self.layers), STATE_BYTES)

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        data = self.layers[layer]
        half = len(data) - len(data) // 2
        return (data[half:] if kv else data[:half])[None, None]


class SnapshotSink:
    """Takes a stored snapshot of whatever size. Implements `KVSink`."""

    def __init__(self, position: int) -> None:
        self._position = position
        self.geometry = KVGeometry((), STATE_BYTES)  # of what comes, once that is known
        self._data: list[Bytes] = []

    def expect(self, geometry: KVGeometry) -> None:
        """Raises CorruptRun for what is no state."""
        if geometry.dtype != STATE_BYTES:
            raise CorruptRun(f"it holds {geometry.dtype}, a recurrent state was expected")
        self.geometry = geometry
        self._data = [np.empty(layer.key_dim + layer.value_dim, np.uint8) for layer in geometry.layers]

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        half = self.geometry.layers[layer].key_dim
        return (self._data[layer][half:] if kv else self._data[layer][:half])[None, None]

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self.view(layer, kv, start, start + 1)[...] = data

    def defer(self, arriving: Arriving) -> bool:
        return False

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> KVSink | None:
        return None

    def commit(self, layer: int, start: int, end: int) -> None:
        return

    @property
    def snapshot(self) -> Snapshot:
        """What came."""
        return Snapshot(self._position, tuple(self._data))


@dataclass
class States:
    """The state of one arena's sequence: that of its last position, and snapshots on the way there."""

    layers: Sequence[Any]  # of the cache, those that have some
    fresh: Callable[[], Sequence[Any]]  # the same layers as they are before the first token
    device: torch.device
    position: int | None = 0  # of which it is the state; None: of none that is known
    wanted: frozenset[int] = frozenset()  # positions to take a snapshot at
    taken: dict[int, Snapshot] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.layers)

    def drop(self, length: int) -> None:
        """The sequence goes on at a position: with the state of none, or, at 0, with that of the beginning."""
        if not self.layers:
            return
        for layer, fresh in zip(self.layers, self.fresh(), strict=True):
            for name in [name for name in _names(layer) if not hasattr(fresh, name)]:
                delattr(layer, name)
            for name in _names(fresh):
                setattr(layer, name, getattr(fresh, name))
        self.position = None if length else 0
        self.taken.clear()
        self.wanted = frozenset()

    def check(self, start: int) -> None:
        """Raises RuntimeError when what is computed next does not follow the state."""
        if self.layers and self.position != start:
            raise RuntimeError(f"a step at position {start} would follow the recurrent state of {self.position}")

    def moved(self, position: int) -> None:
        """A step has moved it."""
        if self.layers:
            self.position = position
            if position in self.wanted:
                self.taken[position] = self.take()

    def take(self) -> Snapshot:
        """A copy."""
        assert self.position is not None
        return Snapshot(self.position, tuple(_encoded(layer) for layer in self.layers))

    def disown(self) -> None:
        """Have tensors that may be changed in place outside inference mode, too: others compute what follows."""
        if self.layers and self.position:
            with torch.inference_mode(mode=False):
                self.put(self.take())

    def put(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot. Raises CorruptRun when it is of other layers."""
        if len(snapshot.layers) != len(self.layers):
            raise CorruptRun(f"a state of {len(snapshot.layers)} layers, the model has {len(self.layers)} with some")
        for layer, data in zip(self.layers, snapshot.layers, strict=True):
            _restore(layer, data, self.device)
        self.position = snapshot.position


def state_bytes(layers: Iterable[Any]) -> int:
    """What a snapshot of some layers weighs as they are now."""
    return sum(len(_encoded(layer)) for layer in layers)


def _names(layer: Any) -> Iterator[str]:
    """Attributes that hold a layer's state."""
    if isinstance(layer, LinearAttentionLayer):
        yield from _LINEAR
    else:
        yield from (name for name, value in vars(layer).items() if _is_state(value))


def _is_state(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int) for key in value) and all(map(_is_state, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_state, value))
    return isinstance(value, (*_PLAIN, *_TORCH, torch.Tensor))


def _encoded(layer: Any) -> Bytes:
    tensors: list[Bytes] = []

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().cpu()
            tensors.append(raw.reshape(-1).view(torch.uint8).numpy() if raw.numel() else np.empty(0, np.uint8))
            return {"t": [str(value.dtype).removeprefix("torch."), [*value.shape]]}
        if isinstance(value, Mapping):
            return {"d": [[key, described(item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return {"l" if isinstance(value, list) else "u": [*map(described, value)]}
        if isinstance(value, torch.device):
            return {"device": None}
        return {"dtype": str(value)} if isinstance(value, torch.dtype) else {"v": value}

    text = json.dumps({name: described(getattr(layer, name)) for name in _names(layer)}).encode()
    head = np.frombuffer(len(text).to_bytes(_LENGTH, "little") + text, np.uint8)
    return np.concatenate([head, *tensors])


def _restore(layer: Any, data: Bytes, device: torch.device) -> None:
    """Raises CorruptRun for what is no state of such a layer."""
    at = _LENGTH + int.from_bytes(data[:_LENGTH].tobytes(), "little")

    def value_of(found: Any) -> Any:
        nonlocal at
        ((kind, value),) = found.items()
        if kind == "t":
            dtype, shape = getattr(torch, value[0]), value[1]
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            if at + size > len(data):
                raise ValueError("it ends early")
            raw, at = data[at : at + size].copy(), at + size
            return (
                (torch.from_numpy(raw).view(dtype) if size else torch.empty(0, dtype=dtype)).reshape(shape).to(device)
            )
        if kind == "d":
            return {key: value_of(item) for key, item in value}
        if kind in ("l", "u"):
            return (list if kind == "l" else tuple)(map(value_of, value))
        if kind == "device":
            return device
        return getattr(torch, value.removeprefix("torch.")) if kind == "dtype" else value

    try:
        found = json.loads(data[_LENGTH:at].tobytes())
        values = {name: value_of(item) for name, item in found.items()}
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes too many")
        if isinstance(layer, LinearAttentionLayer) and set(values) != set(_LINEAR):
            raise ValueError(f"it has {sorted(values)}")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CorruptRun(f"a recurrent state cannot be read: {error}") from error
    for name, value in values.items():
        setattr(layer, name, value)
    if isinstance(layer, LinearAttentionLayer):
        setattr(layer, "device", device)  # noqa: B010  # transformers declares it None
