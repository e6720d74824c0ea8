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
from keepwarm.runtime.native.description import Description, LayerParts, Linear
from keepwarm.runtime.native.packing import LANES
from keepwarm.runtime.native.structures import AdapterLayerRecord, AdaptersRecord, NarrowingRecord, WideningRecord

_RANKS = 4  # as in adapters.h: ranks whose sums are taken at once
_SUMMED = 1024  # as in adapters.h: columns that are summed apart
_OPERANDS = {"attention": ("q", "k", "v"), "o": ("out",), "mlp": ("gate", "up"), "down": ("last",)}


@dataclass(frozen=True)
class Low:
    """What an adapter adds to one module: `scale * b @ a`. `a` is `[rank, in]`, `b` `[out, rank]`, both float32."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class _Place:
    """The rows of a module that are one of a layer's weights; some modules have several of them."""

    module: str
    first: int
    rows: int


class Places:
    """Where a model's modules stand in its description."""

    def __init__(self, model: nn.Module, parts: Description) -> None:
        self._modules = sorted(_weights(model), key=lambda found: found[0])
        self._layers = [{name: self._of(linear) for name, linear in _linears(layer).items()} for layer in parts.layers]
        self.width = max(each.weight.shape[-1] for layer in parts.layers for each in _linears(layer).values())

    @property
    def layers(self) -> Sequence[Mapping[str, _Place]]:
        """Each layer's weights, by their names in adapters.h."""
        return self._layers

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape `[out, in]` of every module that an adapter may change."""
        known = {place.module for layer in self._layers for place in layer.values()}
        return {name: shape for _, _, name, shape in self._modules if name in known}

    def _of(self, linear: Linear) -> _Place:
        """Raises ConfigError for a weight that is not a module's own, or some rows of it."""
        at, row = _whereabouts(linear.weight)
        for start, width, name, (out, _) in self._modules:
            first, rest = divmod(at - start, row)
            # rows of another width: a module that lies behind this one, whose end would be counted wrongly
            if width == row and not rest and first >= 0 and first + len(linear.weight) <= out:
                return _Place(name, first, len(linear.weight))
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


def _linears(layer: LayerParts) -> dict[str, Linear]:
    """Return the weights that an adapter may change, by their names in adapters.h. Not those of experts, nor the MLP
    beside them."""
    attention, mlp = layer.attention, None if layer.experts else layer.mlp
    found = {}
    if attention is not None:
        found = {"q": attention.q, "k": attention.k, "v": attention.v, "out": attention.o}
    if mlp is not None:
        found |= {"up": mlp.up, "last": mlp.down} | ({"gate": mlp.gate} if mlp.gate else {})
    return found


class PackedLora:
    """One adapter. The records hold addresses; this holds what lies there."""

    def __init__(self, changes: Mapping[str, Low], places: Places) -> None:
        """`changes` are by module, each of a shape in `Places.shapes`."""
        self._held: list[torch.Tensor] = []
        self.ranks = 0  # the most of one operand
        self.width = places.width
        self.records = (AdapterLayerRecord * len(places.layers))(
            *(self._layer(layer, changes) for layer in places.layers)
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.records)

    def _layer(self, layer: Mapping[str, _Place], changes: Mapping[str, Low]) -> AdapterLayerRecord:
        record = AdapterLayerRecord()
        for operand, names in _OPERANDS.items():
            there = {name: layer[name] for name in names if name in layer and layer[name].module in changes}
            if not there:
                continue
            modules = [*dict.fromkeys(place.module for place in there.values())]
            ranks = [len(changes[module].a) for module in modules]
            firsts = dict(zip(modules, accumulate([0, *ranks]), strict=False))
            setattr(record, operand, self._narrowing([changes[module] for module in modules]))
            for name, place in there.items():
                setattr(record, name, self._widening(changes[place.module].b, place, firsts[place.module]))
        return record

    def _narrowing(self, lows: Sequence[Low]) -> NarrowingRecord:
        weight = torch.cat([low.a for low in lows])
        scale = torch.cat([torch.full((len(low.a),), low.scale) for low in lows])
        more = -len(weight) % _RANKS
        weight, scale = nn.functional.pad(weight, (0, 0, 0, more)), nn.functional.pad(scale, (0, more))
        self.ranks = max(self.ranks, len(weight))
        return NarrowingRecord(self._floats(weight), self._floats(scale), len(weight))

    def _widening(self, b: torch.Tensor, place: _Place, first: int) -> WideningRecord:
        own = b[place.first : place.first + place.rows]
        packed = own.unflatten(0, (-1, LANES)).transpose(1, 2)  # [out / 16, rank, 16]
        return WideningRecord(self._floats(packed), first, b.shape[1])

    def _floats(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor.detach().float().contiguous())
        return self._held[-1].data_ptr()


class Chosen:
    """Which adapter each row of a step has, and the room for what they give."""

    def __init__(self, loras: Sequence[Lora], counts: Sequence[int]) -> None:
        """`loras[i]` is that of the next `counts[i]` rows."""
        each: list[PackedLora] = [*dict.fromkeys(lora.packed for lora in loras)]
        numbers = np.array([each.index(lora.packed) for lora in loras], dtype=np.int32)
        ranks, rows = max(packed.ranks for packed in each), int(np.sum(counts))
        parts = -(-max(packed.width for packed in each) // _SUMMED)
        room = torch.empty(parts + 1, rows, ranks)
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
