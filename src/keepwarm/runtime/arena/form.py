"""What each layer of a model's cache keeps, and how to make the layers that keep it in an arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from keepwarm.runtime.arena.indexed import IndexedArenaLayer
from keepwarm.runtime.arena.layer import ArenaLayer
from keepwarm.runtime.arena.state_bytes import KernelState, OwnCache, outline
from keepwarm.runtime.arena.states import StateArenaLayer, States
from keepwarm.runtime.device import DevicePort

Fresh = Callable[[], Sequence[Any]]  # makes the layers of transformers' own cache, before the first token


class LayerForm(NamedTuple):
    """One layer of the cache. With neither keys nor state it keeps nothing, or reads what another layer keeps."""

    kv: int | None = None  # number of the geometry's layer with its keys and values
    index_keys: int | None = None  # number of the geometry's layer with its index keys
    states: int | None = None  # number of recurrent states besides keys and values; 0: all that it keeps is state
    position_rows: int = 0  # rows of the positions kept with index keys
    device: torch.device | None = None  # that computes it; None: the device of the embeddings


@dataclass(frozen=True)
class CacheForm:
    """All layers of the cache. Without any, each layer of the geometry is one layer of the cache."""

    each: tuple[LayerForm, ...] = ()
    fresh: Fresh = tuple
    state_bytes: int = 0  # of all layers' recurrent state at a position, approximately
    outlines: tuple[Mapping[str, Any], ...] = ()  # of those layers' states
    own: OwnCache | None = None  # the model's own cache, if it does not use transformers'
    others: Mapping[torch.device, DevicePort] = field(default_factory=dict)  # ports to the layers' devices
    kernel_states: tuple[int, ...] = ()  # numbers in each layer's state, where the compiled kernels keep it

    @property
    def has_states(self) -> bool:
        return self.own is not None or any(layer.states is not None for layer in self.each)

    def ports(self, count: int, home: DevicePort) -> list[DevicePort]:
        """Return a port for each of the geometry's `count` layers. `home` is the port to the embeddings' device."""
        found = [home] * count
        for layer in self.each:
            if layer.device is not None:
                for at in (layer.kv, layer.index_keys):
                    if at is not None:
                        found[at] = self.others[layer.device]
        return found

    def layers(
        self, kv: Sequence[Mapping[str, Any]], device: torch.device
    ) -> tuple[list[ArenaLayer], list[Any], States]:
        """Make the arena's layers, in the geometry's order, from the arguments of each. Return them, the cache's
        layers, and their states."""
        if self.own is not None:
            name, shape = self.own.name, self.own.shape
            return [], [], States([OwnCache(name, shape)], lambda: [OwnCache(name, shape)], [device], self._seen(1))
        made: dict[int, ArenaLayer] = {}
        cached: list[Any] = []
        stateful: list[int] = []
        fresh = self.fresh() if self.each else ()
        for number, form in enumerate(self.each or tuple(LayerForm(at) for at in range(len(kv)))):
            if form.states is not None:
                stateful.append(number)
            if form.kv is None:
                cached.append(fresh[number])
                continue
            if form.index_keys is not None:
                made[form.index_keys] = ArenaLayer(**kv[form.index_keys])
                layer: ArenaLayer = IndexedArenaLayer(kv[form.kv], made[form.index_keys], form.position_rows)
            elif form.states is not None:
                layer = StateArenaLayer(kv[form.kv], form.states)
            else:
                layer = ArenaLayer(**kv[form.kv])
            made[form.kv] = layer
            cached.append(layer)

        if self.kernel_states:
            return [made[at] for at in sorted(made)], cached, self._of_kernels()

        def anew() -> list[Any]:
            layers = self.fresh()
            return [layers[number] for number in stateful]

        devices = [self.each[at].device or device for at in stateful]
        return (
            [made[at] for at in sorted(made)],
            cached,
            States([cached[at] for at in stateful], anew, devices, self._seen(len(stateful))),
        )

    def _of_kernels(self) -> States:
        def anew() -> list[Any]:
            return [*map(KernelState, self.kernel_states)]

        layers = anew()
        return States(layers, anew, [torch.device("cpu")] * len(layers), [*map(outline, layers)])

    def _seen(self, count: int) -> Sequence[Mapping[str, Any] | None]:
        return self.outlines or [None] * count


PLAIN = CacheForm()
