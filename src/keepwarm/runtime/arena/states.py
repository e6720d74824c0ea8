"""Recurrent state: what layers keep of a sequence that is no key or value of a token. It cannot be cut at a position,
so it is kept as a snapshot at some.

Whether a state that was put back goes on as the one that was taken is for the probe at load to find out
(`runtime.probe`). What its bytes are: `runtime.arena.state_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from keepwarm.runtime.arena.state_bytes import attributes, encoded, restore


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

    def take_form(self, geometry: KVGeometry) -> None:
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
    devices: Sequence[torch.device]  # of each
    outlines: Sequence[Mapping[str, Any] | None]  # of each as it was seen; None: of any form
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
            for name in [name for name in attributes(layer) if not hasattr(fresh, name)]:
                delattr(layer, name)
            for name in attributes(fresh):
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
        return Snapshot(self.position, tuple(encoded(layer) for layer in self.layers))

    def disown(self) -> None:
        """Have tensors that may be changed in place outside inference mode, too: others compute what follows."""
        if self.layers and self.position:
            with torch.inference_mode(mode=False):
                self.put(self.take())

    def put(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot. Raises CorruptRun when it is of other layers."""
        if len(snapshot.layers) != len(self.layers):
            raise CorruptRun(f"a state of {len(snapshot.layers)} layers, the model has {len(self.layers)} with some")
        for layer, data, device, seen in zip(self.layers, snapshot.layers, self.devices, self.outlines, strict=True):
            restore(layer, data, device, seen)
        self.position = snapshot.position
