"""The KV of one sequence in preallocated memory, as a transformers Cache. Steps append in place, without concatenation.
`runtime.arena.pool` keeps arenas from one request to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from transformers.cache_utils import Cache

from keepwarm.core.blocks import TokenIds
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.lora import Lora
from keepwarm.core.ports import BlockCodec, Bytes
from keepwarm.core.reads import Arriving
from keepwarm.runtime.arena.arrivals import Arrivals
from keepwarm.runtime.arena.encoded import EncodedRows
from keepwarm.runtime.arena.form import PLAIN, CacheForm
from keepwarm.runtime.arena.gap import NO_GAP, first_attended
from keepwarm.runtime.arena.held import Held, KVCopy
from keepwarm.runtime.arena.in_place import InPlace
from keepwarm.runtime.arena.in_turn import InTurn
from keepwarm.runtime.arena.late import LateLayer, LateRows
from keepwarm.runtime.arena.state_bytes import OwnCache
from keepwarm.runtime.device import DevicePort
from keepwarm.runtime.device.plane import Staged, allocate, fill_all, layout, load, save_all
from keepwarm.runtime.device.port import is_out_of_memory
from keepwarm.runtime.native.places import Region, Sequenced
from keepwarm.runtime.native.reads import Taking
from keepwarm.runtime.stepping import ArrivingLayers
from keepwarm.runtime.waiting import Waiting


class ArenaCache(Cache):
    """An arena as a transformers Cache."""

    def __init__(self, arena: Arena, layers: Sequence[Any]) -> None:
        super().__init__(layers=list(layers))
        self.arena = arena

    @property
    def own(self) -> OwnCache | None:
        """The model's own cache, if it uses one instead."""
        first = next(iter(self.arena.states.layers), None)
        return first if isinstance(first, OwnCache) else None


class Arena:
    """The KV of one sequence. Implements `WindowedSink` (loading) and `KVSource` (storing).

    KV of a RAM hit is not copied at once: the lean decoder reads it in place (`sequenced`), and a step through
    transformers copies each layer when it reaches it. With `keep_encoded`, encoded KV of any tier is treated alike:
    attention decodes it page by page, and the arena's own memory for it is never touched.

    These parts describe its content:

    * `layers`: up to where it is valid, and what is copied when a layer is used;
    * `arrivals`: what is arriving from disk;
    * `_in_place`: what is read elsewhere;
    * `_staged`: what is in host memory, to be copied to a device;
    * `_held`: the tokens it belongs to, for a request that begins alike;
    * `states`: recurrent state at the last position, if layers have any; `seek` drops it, and it can be restored;
    * `gap`: positions that windowed layers lack;
    * `pins`: what background readers still need;
    * `lora`: the adapter with which steps compute, for as long as a request has the arena.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        capacity: int,
        port: DevicePort,
        *,
        touch: bool = False,
        keep_encoded: bool = False,
        form: CacheForm = PLAIN,
    ) -> None:
        """`port` is a port to the device of the model's embeddings. `form` says what its layers keep, and which are on
        other devices. Raises Overloaded when a device has no memory for it."""
        self.geometry = geometry
        self.capacity = capacity
        self.port = port
        self.device = port.device
        self.pins: list[int] = []  # positions below which background readers still need the content
        self.lora: Lora | None = None
        self._held: Held | None = None
        self.gap = NO_GAP
        self._is_windowed = any(layer.window is not None for layer in geometry.layers)
        self._goes_on = 0  # where steps continue after loading
        self.nbytes = self.size(geometry, capacity)
        with torch.inference_mode(mode=False):  # so that tensors can be used in inference mode and outside of it
            self._ports = form.ports(len(geometry.layers), port)
            self.memories, planes = allocate(self._ports, geometry, capacity, huge=not keep_encoded, touch=touch)
        self._waiting = Waiting()
        kv = [
            {"planes": each, "waiting": self._waiting, "window": layer.window}
            for each, layer in zip(planes, geometry.layers, strict=True)
        ]
        self.layers, cached, self.states = form.layers(kv, self.device)
        self.cache = ArenaCache(self, cached)
        self._length = 0  # used if there are no layers
        self._keep_encoded = keep_encoded
        self.arrivals = Arrivals(self.layers, self._waiting)
        self._in_place = InPlace(2 * len(self.layers))
        self._staged: dict[int, list[Staged]] = {}  # by layer

    @staticmethod
    def size(geometry: KVGeometry, capacity: int) -> int:
        """Return the bytes of an arena of `capacity` positions."""
        return layout(geometry, capacity)[1][-1]

    def free(self) -> None:
        """Give the memory back now, not at garbage collection. The arena cannot be used afterwards. Memory that is
        still read or written is freed when that is done."""
        self.seek(0)
        for layer in self.layers:
            layer.planes = None
        for memory, _ in self.memories:
            memory.free()
        self.memories.clear()

    def seek(self, length: int) -> None:
        """Make the first `length` positions the valid ones, where the next step appends. Forget all after them."""
        self._waiting.clear(copies=length <= self.length)  # further on there is what was just loaded
        self.arrivals.cut(length)
        for number, parts in self._staged.items():  # later parts are of a load that failed half-way or was closed now
            self._staged[number] = [part for part in parts if part.end <= length]
        self._in_place.cut(length)
        self.gap = self.gap.cut(length)
        for layer in self.layers:
            layer.seek(length)
        self._length = length
        self.states.drop(length)
        if self._held is not None:
            self._held = self._held.cut(length)

    def advance(self, length: int) -> None:
        """Note that positions up to `length` were written without `ArenaLayer.update`."""
        for layer in self.layers:
            layer.length = length
        self._in_place.moved()
        self.states.moved(length)

    def expect(self, end: int) -> None:
        """Prepare for loading what follows the valid positions, for steps that continue at `end`. Windowed layers need
        only the positions to which they attend from there."""
        self._goes_on = end
        self.gap = self.gap.grown(self.length, end, self.geometry)
        for layer in self.layers:
            layer.clear_before(first_attended(layer.window, end))

    def needed_from(self, layer: int) -> int:
        """Part of `WindowedSink`."""
        return first_attended(self.geometry.layers[layer].window, self._goes_on)

    def defer(self, arriving: Arriving) -> bool:
        self.arrivals.add(arriving)
        for number, layer in enumerate(self.layers):
            layer.arrive = partial(self.arrive, number)
        return True

    def arrive(self, layer: int) -> None:
        """Wait until a layer is in place and verified. Raises CorruptRun; then nothing of the load is valid."""
        try:
            self.arrivals.wait(layer)
        except BaseException:
            self.seek(0)
            raise

    def arrive_all(self) -> None:
        """Wait for every layer that is still arriving, and until all copies to the devices so far are done. Raises what
        `arrive` raises."""
        if self.arrivals:
            for layer in range(len(self.layers)):
                self.arrive(layer)
        for port in dict.fromkeys(self._ports):
            if not port.is_host:
                port.inbound.record().synchronize()
        self._waiting.clear()

    def taking(self) -> Taking | None:
        """See `Arrivals.taking`."""
        return self.arrivals.taking()

    def passed(self, layer: int) -> None:
        """See `Arrivals.passed`."""
        self.arrivals.passed(layer)

    @property
    def waited(self) -> float:
        """Seconds that computing waited for arriving layers, since the last `seek`."""
        return self._waiting.seconds

    @property
    def is_copying(self) -> bool:
        """Whether steps may have to wait for copies that were queued while it was loaded. How long cannot be told from
        what they take, for these run beside other work."""
        return self._waiting.is_copying

    @property
    def is_late(self) -> bool:
        """Whether part of the content is still read in place, or not copied yet."""
        return any(layer.is_late for layer in self.layers)

    @property
    def holds_encoded(self) -> bool:
        """Whether part of the content is read from encoded blocks."""
        return self._in_place.is_encoded

    def materialize(self, start: int = 0) -> None:
        """Copy deferred content. The arena's own memory then holds all content from `start` on, and nothing is read
        elsewhere."""
        for layer in self.layers:
            layer.materialize(start)
        self._in_place.clear()

    def bring(self, start: int) -> None:
        """Make the arena's own memory readable from `start` on (see `ArenaLayer.bring`)."""
        for layer in self.layers:
            layer.bring(start)

    @property
    def length(self) -> int:
        """The number of positions with KV."""
        return min(layer.length for layer in self.layers) if self.layers else self._length

    def check(self, start: int) -> None:
        """Raise RuntimeError when a step cannot continue at a position from what is in place."""
        self.states.check(start)
        if not self.gap.serves(start):
            raise RuntimeError(f"a step at position {start} would attend to what windowed layers lack ({self.gap})")

    def computed(self, length: int) -> None:
        """Note that a step through transformers ended at a position."""
        self._length = length
        self.states.moved(length)

    @property
    def arriving(self) -> ArrivingLayers | None:
        """What a step of ours asks for each layer before it reads or writes it; None if all is in place. On a device
        the layer is then copied there, and the calling thread's further work waits for that."""
        if not self.port.is_host:
            return InTurn(self.layers)
        return self if self.arrivals else None

    def in_turn(self) -> None:
        """Have all layers on the device before what the calling thread computes next. The host reads what lies
        elsewhere where it is."""
        if not self.port.is_host:
            turns = InTurn(self.layers)
            for layer in range(len(self.layers)):
                turns.arrive(layer)

    @cached_property
    def region(self) -> Region:
        """The arena's own memory for the kernels, if all layers are on one device."""
        planes = [layer.plane(kv) for layer in self.layers for kv in (0, 1)]
        return Region.of([(plane.address, plane.head_stride) for plane in planes], {plane.shape for plane in planes})

    def sequenced(self, end: int | None = None) -> Sequenced:
        """Return where each page is: in the arena or elsewhere. A step moves pages that span both into the arena.
        On the host, windowed layers are first copied into the arena, since a page there holds all layers; a device has
        only the arena's own memory, into which `arriving` brings each layer. A step to `end` keeps the
        states that snapshots on its way need."""
        if self._is_windowed and self.is_late and self.port.is_host:
            self.materialize()
        found = self._in_place.sequenced(self.region, self.capacity)
        if self.lora is None and not self.states:
            return found
        return replace(found, lora=self.lora, state=self.states.recurrent(end))

    def hold(self, held: Held | None) -> None:
        """Set what the arena now holds, from position 0 on, except for its `gap`."""
        self._held = None if held is None else replace(held, gap=self.gap)

    def take_over(self, other: Arena, length: int) -> None:
        """Copy the first `length` positions of another arena."""
        other.materialize()
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for kv in (0, 1):
                mine.plane(kv).put(0, theirs.plane(kv).tensor()[:, :length])
        self._held = other._held and other._held.cut(length)
        self.gap = other.gap.cut(length)

    def copy_lent(self, other: Arena, held: Held) -> None:
        """Do what `take_over` does with what is `held` by an arena that another thread may be using: it must not change
        these positions until this returns. That is when they are copied."""
        self.seek(0)
        length = len(held.tokens)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for kv in (0, 1):
                mine.plane(kv).put(0, theirs.plane(kv).shared()[:, :length])
        for port in dict.fromkeys(self._ports):
            port.current().record().synchronize()
        self._held, self.gap = held, held.gap.cut(length)

    def held_to(self, length: int) -> Held | None:
        """Return what it holds up to a position."""
        return self._held and self._held.cut(length)

    def copy_of(self, start: int, end: int) -> KVCopy:
        """Return a copy of some positions, to be stored; by one copy, if the layers are alike."""
        planes = [layer.plane(kv) for layer in self.layers for kv in (0, 1)]
        rows = None
        if planes and (self._ports[0].is_host or self._ports[0].copies_by_address):
            try:
                rows = save_all(planes, start, end)
            except Exception as error:  # the device gathers them first
                if not is_out_of_memory(error):
                    raise
        if rows is None:
            return KVCopy.of(self, start, end)
        return KVCopy(self.geometry, start, tuple(zip(rows[::2], rows[1::2], strict=True)))

    def is_settled(self, length: int) -> bool:
        """Whether the first `length` positions are in the arena's own memory, or copies to it are queued."""
        return not self.arrivals and not any(layer.is_late_before(length) for layer in self.layers)

    def unhold(self, length: int) -> None:
        """Let no request find positions from here on."""
        self._held = self._held and self._held.cut(length)

    @property
    def held_tokens(self) -> int:
        """The number of leading positions whose KV a request may find."""
        return len(self._held.tokens) if self._held is not None else 0

    @property
    def held_blocks(self) -> int:
        """The number of blocks whose KV a request may find."""
        return self._held.blocks if self._held is not None else 0

    def resident(self, wanted: Held) -> int:
        """Return how many leading tokens of a prompt are in place."""
        return self._held.common(wanted) if self._held is not None else 0

    def beside(self, wanted: Held) -> TokenIds:
        """Return the tokens whose KV is in place, as far as a prompt with its salts may see them."""
        return self._held.beside(wanted) if self._held is not None else wanted.tokens[:0]

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        plane = self.layers[layer].plane(kv)
        if plane.array is not None:
            return plane.array[:, start:end]
        staged = plane.stage(end - start)
        self._staged.setdefault(layer, []).append(Staged(plane, start, staged))
        data: Bytes = staged.numpy()
        return data

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        plane = self.layers[layer].plane(kv)
        self.layers[layer].fill_late(LateRows(start, start + data.shape[1], plane, data))
        if plane.array is not None and not self._is_windowed:  # only for the lean decoder, on the host
            self._in_place.fill(2 * layer + kv, start, data)

    def fill_all(self, start: int, data: Bytes) -> bool:
        """See `core.ports.WholeSink`."""
        ports = set(self._ports)
        if self._is_windowed or len(ports) > 1:
            return False
        if not (port := ports.pop()).is_host:
            planes = [layer.plane(kv) for layer in self.layers for kv in (0, 1)]
            for layer in self.layers:
                layer.turn(port.inbound)  # what they wait for is not the copies' time
            began = port.inbound.record(timed=True)
            if queued := fill_all(planes, start, data.reshape(-1, *data.shape[2:])):
                self._waiting.copied(began, port.inbound.record(timed=True))
            return queued
        end = start + data.shape[3]
        for layer, rows in zip(self.layers, data, strict=True):
            layer.fill_late(LateLayer(start, end, (layer.plane(0), layer.plane(1)), rows))
        _, plane, head, *row = data.strides
        if row == [data.shape[4], 1]:
            self._in_place.map(start, end, Region.even(data.__array_interface__["data"][0], plane, head, data))
        return True

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> EncodedRows | None:
        return EncodedRows(self, rows, codec, blocks, end) if self._keep_encoded else None

    def map(self, start: int, end: int, region: Region) -> None:
        """See `InPlace.map`."""
        self._in_place.map(start, end, region)

    def commit(self, layer: int, start: int, end: int) -> None:
        staged = self._staged.pop(layer, [])  # of other runs, too, which may still be read
        self._staged[layer] = [each for each in staged if not start <= each.start < end]
        if done := [each for each in staged if start <= each.start < end]:
            load(done)

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return self.layers[layer].plane(kv).save(start, end)
