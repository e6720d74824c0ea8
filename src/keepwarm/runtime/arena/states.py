"""Recurrent state: what layers keep of a sequence besides keys and values. It cannot be cut at a position, so snapshots
are kept for some positions.

The probe at load (`runtime.probe`) finds out whether a restored state continues like the original. For its bytes see
`runtime.arena.state_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from keepwarm.core.geometry import STATE_BYTES, KVGeometry, LayerGeometry
from keepwarm.core.ports import Bytes
from keepwarm.core.sinks import PlainSink
from keepwarm.errors import CorruptRun
from keepwarm.runtime.arena.layer import ArenaLayer
from keepwarm.runtime.arena.state_bytes import KernelState, attributes, encoded, restore
from keepwarm.runtime.native.places import Recurrent


class StateArenaLayer(ArenaLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]  # they share attributes
    """A layer with keys and values in an arena, and a recurrent state besides. It serves windowed layers, too: the code
    that makes the masks treats any other class as one without keys."""

    is_compileable = False
    is_croppable = False

    def __init__(self, kv: Any, states: int) -> None:
        """`kv` are the arguments of `ArenaLayer`."""
        ArenaLayer.__init__(self, **kv)
        device, dtype = self.device, self.dtype
        LinearAttentionLayer.__init__(self, number_of_states=states)
        self.device, self.dtype = device, dtype

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the state; for keys and values there is nothing to do."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        self.seek(0)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of every layer that has one, at a position. Implements `KVSource`: the store sees one token's KV."""

    position: int
    layers: tuple[Bytes, ...]  # 1-D uint8: a description, then the tensors

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.layers))

    @property
    def geometry(self) -> KVGeometry:
        """Each layer's bytes in two halves, in place of keys and values."""
        return KVGeometry(tuple(LayerGeometry(1, len(a) - len(a) // 2, len(a) // 2) for a in self.layers), STATE_BYTES)

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        data = self.layers[layer]
        half = len(data) - len(data) // 2
        return (data[half:] if kv else data[:half])[None, None]


class SnapshotSink(PlainSink):
    """Receives a stored snapshot of any size. Implements `KVSink`."""

    def __init__(self, position: int) -> None:
        self._position = position
        self.geometry = KVGeometry((), STATE_BYTES)  # of the stored snapshot, once that is known
        self._data: list[Bytes] = []

    def take_form(self, geometry: KVGeometry) -> None:
        """Take the geometry of the stored snapshot. Raises CorruptRun if it is no state."""
        if geometry.dtype != STATE_BYTES:
            raise CorruptRun(f"it holds {geometry.dtype}, a recurrent state was expected")
        self.geometry = geometry
        self._data = [np.empty(layer.key_dim + layer.value_dim, np.uint8) for layer in geometry.layers]

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        half = self.geometry.layers[layer].key_dim
        return (self._data[layer][half:] if kv else self._data[layer][:half])[None, None]

    @property
    def snapshot(self) -> Snapshot:
        """The received snapshot."""
        return Snapshot(self._position, tuple(self._data))


@dataclass
class States:
    """The recurrent state of one arena's sequence at its last position, and snapshots at earlier ones."""

    layers: Sequence[Any]  # the cache's layers that have state
    fresh: Callable[[], Sequence[Any]]  # makes these layers as they are before the first token
    devices: Sequence[torch.device]  # of each layer
    outlines: Sequence[Mapping[str, Any] | None]  # the form of each layer's state; None: any
    position: int | None = 0  # the state's position; None: unknown
    wanted: frozenset[int] = frozenset()  # positions for snapshots
    taken: dict[int, Snapshot] = field(default_factory=dict)
    _coming: dict[int, Sequence[KernelState]] = field(default_factory=dict)  # what a step of the kernels keeps

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def of_kernels(self) -> bool:
        """Whether the compiled kernels keep the state, and not transformers' own code."""
        return all(isinstance(layer, KernelState) for layer in self.layers)

    def drop(self, length: int) -> None:
        """Drop the state, as the sequence now continues at `length`. At 0 the initial state is right; elsewhere it is
        unknown."""
        if not self.layers:
            return
        for layer, fresh in zip(self.layers, self.fresh(), strict=True):
            for name in [name for name in attributes(layer) if not hasattr(fresh, name)]:
                delattr(layer, name)
            for name in attributes(fresh):
                setattr(layer, name, getattr(fresh, name))
        self.position = None if length else 0
        self.taken.clear()
        self._coming.clear()
        self.wanted = frozenset()

    def lose(self) -> None:
        """Note that a step failed, which may have moved the state of some layers."""
        self.drop(1)

    @property
    def is_lost(self) -> bool:
        """Whether no step can continue: the state's position is unknown."""
        return bool(self.layers) and self.position is None

    def check(self, start: int) -> None:
        """Raise RuntimeError when a step at `start` would not continue the state."""
        if self.layers and self.position != start:
            raise RuntimeError(f"a step at position {start} would follow the recurrent state of {self.position}")

    def recurrent(self, end: int | None) -> Recurrent | None:
        """Return what a step of the compiled kernels to `end` reads and writes; None without states. It keeps those of
        the positions on its way for which snapshots are wanted. With None it keeps none."""
        if not self.layers:
            return None
        start = self.position or 0
        self._coming = {at: [*self.fresh()] for at in self.wanted if end is not None and start < at < end}
        kept = {at: _numbers(layers) for at, layers in self._coming.items()}
        return Recurrent(_numbers(self.layers), kept)

    def moved(self, position: int) -> None:
        """Note that a step moved the state to a position. Take a snapshot if one is wanted there, and those of what the
        step kept on its way."""
        if self.layers:
            self.position = position
            coming, self._coming = self._coming, {}
            for at, layers in coming.items():
                self.taken[at] = Snapshot(at, tuple(map(encoded, layers)))
            if position in self.wanted:
                self.taken[position] = self.take()

    def take(self) -> Snapshot:
        """Return a copy of the state."""
        assert self.position is not None
        return Snapshot(self.position, tuple(encoded(layer) for layer in self.layers))

    def disown(self) -> None:
        """Replace the tensors by ones that may be changed in place outside inference mode, for other callers."""
        if self.layers and self.position:
            with torch.inference_mode(mode=False):
                self.put(self.take())

    def put(self, snapshot: Snapshot) -> None:
        """Restore a snapshot. Raises CorruptRun when it belongs to other layers."""
        if len(snapshot.layers) != len(self.layers):
            raise CorruptRun(f"a state of {len(snapshot.layers)} layers, the model has {len(self.layers)} with some")
        for layer, data, device, seen in zip(self.layers, snapshot.layers, self.devices, self.outlines, strict=True):
            restore(layer, data, device, seen)
        self.position = snapshot.position


def _numbers(layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(layer.numbers for layer in layers)
