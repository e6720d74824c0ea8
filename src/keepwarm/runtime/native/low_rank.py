"""LoRA adapters as the compiled kernels read them (`adapters.h`): packed once, and chosen row by row in a step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from keepwarm.core.lora import Lora
from keepwarm.errors import ConfigError
from keepwarm.runtime.native.blocks import Blocks
from keepwarm.runtime.native.description import Attention, Description, LayerParts, Linear
from keepwarm.runtime.native.packing import LANES
from keepwarm.runtime.native.structures import AdapterLayerRecord, AdaptersRecord, NarrowingRecord, WideningRecord

_RANKS = 4  # as in adapters.h: ranks whose sums are taken at once
_SUMMED = 1024  # as in adapters.h: columns that are summed apart
_READS, _GATES = "reads", "gates"  # a layer's first products, one under the other, and attention's gate
_ROWS = {"o": ("out",), "mlp": ("gate", "up"), "down": ("last",)}  # the other weights, by what they read


@dataclass(frozen=True)
class Low:
    """What an adapter adds to one module: `scale * b @ a`. `a` is `[rank, in]`, `b` `[out, rank]`, both float32."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class _Place:
    """The outputs of a module that are one of a layer's weights, by number, and its inputs in the weight's order."""

    module: str
    outputs: torch.Tensor
    inputs: torch.Tensor | None = None


class Places:
    """Where a model's modules stand in its description."""

    def __init__(self, model: nn.Module, parts: Description) -> None:
        self._modules = sorted(_weights(model), key=lambda found: found[0])
        linears = [_linears(layer) for layer in parts.layers]
        self._layers = [{name: [*map(self._of, each)] for name, each in layer.items()} for layer in linears]
        every = [linear for layer in linears for each in layer.values() for linear in each]
        self.width = max(linear.weight.shape[-1] for linear in every)

    @property
    def layers(self) -> Sequence[Mapping[str, Sequence[_Place]]]:
        """Each layer's weights, by their names in adapters.h."""
        return self._layers

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape `[out, in]` of every module that an adapter may change."""
        known = {place.module for layer in self._layers for places in layer.values() for place in places}
        return {name: shape for _, _, name, shape in self._modules if name in known}

    def _of(self, linear: Linear) -> _Place:
        """Raises ConfigError for a weight that is not a module's own, or some rows of it."""
        weight = linear.order.weight if linear.order else linear.weight
        at, row = _whereabouts(weight)
        for start, width, name, (out, _) in self._modules:
            first, rest = divmod(at - start, row)
            # rows of another width: a module that lies behind this one, whose end would be counted wrongly
            if width == row and not rest and first >= 0 and first + len(weight) <= out:
                outputs = torch.arange(first, first + len(weight))
                if linear.order is None:
                    return _Place(name, outputs)
                chosen = linear.order.outputs
                return _Place(name, outputs if chosen is None else outputs[chosen], linear.order.inputs)
        raise ConfigError("adapters cannot be used with this model: a layer's weight is not that of a module")


def _weights(model: nn.Module) -> Iterator[tuple[int, int, str, tuple[int, int]]]:
    """Yield address, bytes of a row, name and shape of every linear module's weight, as the families read it."""
    for name, module in model.named_modules():
        held = getattr(module, "blocks", None) or getattr(module, "weight", None)
        if isinstance(held, Blocks) and len(held.shape) == 2:  # others are experts
            yield *_whereabouts(held), name, (len(held), held.columns)
        elif isinstance(held, torch.Tensor) and held.dim() == 2:
            yield *_whereabouts(held), name, (held.shape[0], held.shape[1])


def _whereabouts(weight: torch.Tensor | Blocks) -> tuple[int, int]:
    """Return the address of a weight, and the bytes from one row to the next."""
    raw = weight.raw if isinstance(weight, Blocks) else weight
    return raw.data_ptr(), raw.stride(0) * raw.element_size()


def _linears(layer: LayerParts) -> dict[str, tuple[Linear, ...]]:
    """Return the weights that an adapter may change, by their names in adapters.h. Not those of experts, nor the MLP
    beside them."""
    mixer, mlp = layer.mixer, None if layer.experts else layer.mlp
    found: dict[str, tuple[Linear, ...]] = {_READS: tuple(mixer.reads), "out": (mixer.o,)}
    if isinstance(mixer, Attention) and mixer.gate is not None:
        found[_GATES] = (mixer.gate,)
    if mlp is not None:
        found |= {"up": (mlp.up,), "last": (mlp.down,)} | ({"gate": (mlp.gate,)} if mlp.gate else {})
    return found


class PackedLora:
    """One adapter. The records hold addresses; this holds what lies there."""

    def __init__(self, changes: Mapping[str, Low], places: Places) -> None:
        """`changes` are by module, each of a shape in `Places.shapes`."""
        self._weights: list[torch.Tensor] = []
        self._held: list[Any] = []
        self.ranks = 0  # the most of one operand
        self.width = places.width
        self.records = (AdapterLayerRecord * len(places.layers))(
            *(self._layer(layer, changes) for layer in places.layers)
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.records)

    def _layer(self, layer: Mapping[str, Sequence[_Place]], changes: Mapping[str, Low]) -> AdapterLayerRecord:
        record = AdapterLayerRecord()
        firsts = self._narrowing(record, "first", [*layer[_READS], *layer.get(_GATES, ())], changes)
        for name in (_READS, _GATES):
            if firsts and name in layer:
                setattr(record, name, self._panels(layer[name], changes, firsts))
        for operand, names in _ROWS.items():
            places = {name: layer[name][0] for name in names if name in layer}
            firsts = self._narrowing(record, operand, [*places.values()], changes)
            for name, place in places.items():
                if place.module in firsts:
                    setattr(record, name, self._widening(changes[place.module].b, place, firsts[place.module]))
        return record

    def _narrowing(
        self, record: AdapterLayerRecord, operand: str, places: Sequence[_Place], changes: Mapping[str, Low]
    ) -> dict[str, int]:
        """Set the A of all modules that read an operand. Return each adapted module's first rank."""
        inputs = {place.module: place.inputs for place in places if place.module in changes}
        if not inputs:
            return {}
        lows = [changes[module] for module in inputs]
        ordered = zip(lows, inputs.values(), strict=True)
        weight = torch.cat([low.a if at is None else low.a[:, at] for low, at in ordered])
        scale = torch.cat([torch.full((len(low.a),), low.scale, dtype=torch.float32) for low in lows])
        more = -len(weight) % _RANKS
        weight, scale = nn.functional.pad(weight, (0, 0, 0, more)), nn.functional.pad(scale, (0, more))
        self.ranks = max(self.ranks, len(weight))
        setattr(record, operand, NarrowingRecord(self._floats(weight), self._floats(scale), len(weight)))
        return dict(zip(inputs, accumulate([0, *(len(low.a) for low in lows)]), strict=False))

    def _widening(self, b: torch.Tensor, place: _Place, first: int) -> WideningRecord:
        packed = b[place.outputs].unflatten(0, (-1, LANES)).transpose(1, 2)  # [out / 16, rank, 16]
        return WideningRecord(self._floats(packed), first, b.shape[1])

    def _panels(self, places: Sequence[_Place], changes: Mapping[str, Low], firsts: Mapping[str, int]) -> int:
        """Pack B of weights that lie one under the other. Return the address of a record for each 16 of their outputs,
        which may be those of several modules."""
        ends = [*accumulate(len(place.outputs) for place in places)]
        panels = (WideningRecord * -(-ends[-1] // LANES))()
        packed: list[torch.Tensor] = []
        for number, panel in enumerate(panels):
            begin, found = number * LANES, []
            for place, end in zip(places, ends, strict=True):
                start = end - len(place.outputs)
                some = place.outputs[max(begin - start, 0) : max(begin + LANES - start, 0)]
                if place.module in firsts and len(some):
                    found.append((max(start - begin, 0), firsts[place.module], changes[place.module].b[some]))
            if found:
                panel.first = min(first for _, first, _ in found)
                panel.rank = max(first + b.shape[1] for _, first, b in found) - panel.first
                packed.append(torch.zeros(panel.rank, LANES, dtype=torch.float32))
            for at, first, b in found:
                packed[-1][first - panel.first :][: b.shape[1], at : at + len(b)] = b.t()
        address = self._floats(torch.cat(packed)) if packed else 0
        for panel in panels:
            if panel.rank:
                panel.weight, address = address, address + panel.rank * LANES * 4
        self._held.append(panels)
        return ctypes.addressof(panels)

    def _floats(self, tensor: torch.Tensor) -> int:
        self._weights.append(tensor.detach().float().contiguous())
        return self._weights[-1].data_ptr()


class Chosen:
    """Which adapter each row of a step has, and the room for what they give."""

    def __init__(self, loras: Sequence[Lora], counts: Sequence[int]) -> None:
        """`loras[i]` is that of the next `counts[i]` rows."""
        each: list[PackedLora] = [*dict.fromkeys(lora.packed for lora in loras)]
        numbers = np.array([each.index(lora.packed) for lora in loras], dtype=np.int32)
        ranks, rows = max(packed.ranks for packed in each), int(np.sum(counts))
        parts = -(-max(packed.width for packed in each) // _SUMMED)
        room = torch.empty(parts + 1, rows, ranks, dtype=torch.float32)
        addresses, of = np.array([packed.address for packed in each], dtype=np.int64), np.repeat(numbers, counts)
        self._held: tuple[Any, ...] = (each, addresses, of, room)
        self._record = AdaptersRecord(
            adapter=int(addresses.ctypes.data),
            of=int(of.ctypes.data),
            sums=room.data_ptr(),
            narrow=room[parts].data_ptr(),
            ranks=ranks,
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._record)
