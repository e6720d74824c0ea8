"""The KV of one sequence in preallocated memory, as a transformers Cache. Steps append in place, so there is no
concatenation. `runtime.arena.pool` keeps arenas from one request to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache

from keepwarm.core.blocks import TokenIds
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import BlockCodec, Bytes
from keepwarm.core.reads import Arriving
from keepwarm.runtime.arena.arrivals import Arrivals
from keepwarm.runtime.arena.encoded import EncodedRows
from keepwarm.runtime.arena.form import PLAIN, CacheForm
from keepwarm.runtime.arena.gap import NO_GAP, first_attended
from keepwarm.runtime.arena.held import Held
from keepwarm.runtime.arena.in_place import InPlace
from keepwarm.runtime.arena.state_bytes import OwnCache
from keepwarm.runtime.device import DevicePort
from keepwarm.runtime.device.plane import allocate, layout
from keepwarm.runtime.native.places import Region, Sequenced
from keepwarm.runtime.native.reads import Taking
from keepwarm.runtime.waiting import Waiting


@dataclass(frozen=True)
class Staged:
    """Positions `[start, end)` of a layer's keys (0) or values (1) in host memory, to be copied in with their layer."""

    kv: int
    start: int
    end: int
    bytes: torch.Tensor


class ArenaCache(Cache):
    """An arena as transformers sees it."""

    def __init__(self, arena: Arena, layers: Sequence[Any]) -> None:
        super().__init__(layers=list(layers))
        self.arena = arena

    @property
    def own(self) -> OwnCache | None:
        """What the model has in its place."""
        first = next(iter(self.arena.states.layers), None)
        return first if isinstance(first, OwnCache) else None


class Arena:
    """KV of one sequence. Implements `WindowedSink` (loading) and `KVSource` (storing).

    What a RAM hit fills in is not copied at once: the lean decoder reads it in place (`sequenced`), and a step through
    transformers copies each layer when it reaches it. With `keep_encoded` the same goes for what a store encoded,
    wherever it comes from: attention decodes it page by page, and the arena's own memory for it is never touched.

    Who knows what about its content:

    * `layers`: up to where it is valid, and what is copied when a layer is used;
    * `arrivals`: what is on its way from disk;
    * `_in_place`: what is read elsewhere;
    * `_staged`: what is in host memory, on its way to a device;
    * `_held`: whose content it is, for a request that begins alike;
    * `states`: recurrent state of the last position, where layers have some: it is dropped by `seek`, and restored;
    * `gap`: what windowed layers were not given;
    * `pins`: what background readers still need.
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
        """`port` is one to the device of the model's embeddings; `form` says what its layers keep, and where others
        lie. Raises Overloaded when a device has no memory for it."""
        self.geometry = geometry
        self.capacity = capacity
        self.port = port
        self.device = port.device
        self.pins: list[int] = []  # positions below which background readers still need the content
        self._held: Held | None = None
        self.gap = NO_GAP
        self._is_windowed = any(layer.window is not None for layer in geometry.layers)
        self._goes_on = 0  # where steps go on after what is loaded
        self.nbytes = self.size(geometry, capacity)
        with torch.inference_mode(mode=False):  # usable in and out of it, wherever the first request came from
            self._ports = form.ports(len(geometry.layers), port)
            self.memories, planes = allocate(self._ports, geometry, capacity, huge=not keep_encoded, touch=touch)
        self._waiting = Waiting()
        kv = [
            {"planes": each, "waiting": self._waiting, "window": layer.window}
            for each, layer in zip(planes, geometry.layers, strict=True)
        ]
        self.layers, cached, self.states = form.layers(kv, self.device)
        self.cache = ArenaCache(self, cached)
        self._length = 0  # where no layer tells
        self._keep_encoded = keep_encoded
        self.arrivals = Arrivals(self.layers, self._waiting)
        self._in_place = InPlace(2 * len(self.layers))
        self._staged: dict[int, list[Staged]] = {}  # by layer

    @staticmethod
    def size(geometry: KVGeometry, capacity: int) -> int:
        """Bytes of an arena of so many positions."""
        return layout(geometry, capacity)[1][-1]

    def free(self) -> None:
        """Give the memory back, now and not when the garbage is collected. The arena cannot be used any more; memory
        that something else reads or writes still goes when that is done."""
        self.seek(0)
        for layer in self.layers:
            layer.planes = None
        for memory, _ in self.memories:
            memory.free()
        self.memories.clear()

    def seek(self, length: int) -> None:
        """Take the first `length` positions as valid; the next step appends there. Forgets what lies behind."""
        self._waiting.clear()
        self.arrivals.cut(length)
        for number, parts in self._staged.items():  # what lies behind is of a load that failed half-way, or closed now
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
        """Take note that positions up to `length` were written by another hand than `ArenaLayer.update`."""
        for layer in self.layers:
            layer.length = length
        self._in_place.moved()

    def expect(self, end: int) -> None:
        """What lies behind the valid positions is loaded next, and steps go on at `end`: windowed layers need no more
        than they attend to from there."""
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
        """Wait until a layer is in place, verified. Raises CorruptRun, and takes then nothing of the load as there."""
        try:
            self.arrivals.wait(layer)
        except BaseException:
            self.seek(0)
            raise

    def arrive_all(self) -> None:
        """Wait for every layer that is still on its way. Raises as `arrive`."""
        if self.arrivals:
            for layer in range(len(self.layers)):
                self.arrive(layer)
            self._waiting.clear()

    def taking(self) -> Taking | None:
        """See `Arrivals.taking`."""
        return self.arrivals.taking()

    def passed(self, layer: int) -> None:
        """See `Arrivals.passed`."""
        self.arrivals.passed(layer)

    def landed(self) -> None:
        """Return when what was copied in so far is in place."""
        for port in dict.fromkeys(self._ports):
            if not port.is_host:
                port.inbound.record().synchronize()

    @property
    def waited(self) -> float:
        """Seconds that computing waited for what came layer by layer, since the last `seek`."""
        return self._waiting.seconds

    @property
    def is_late(self) -> bool:
        """Whether part of the content is still read, or to be copied, from where it was found."""
        return any(layer.is_late for layer in self.layers)

    @property
    def holds_encoded(self) -> bool:
        """Whether part of the content is read from encoded blocks."""
        return self._in_place.is_encoded

    def materialize(self, start: int = 0) -> None:
        """Copy what was put off: the arena then holds all of its content from `start` on itself, and no other."""
        for layer in self.layers:
            layer.materialize(start)
        self._in_place.clear()

    def bring(self, start: int) -> None:
        """See `ArenaLayer.bring`: the arena's own memory can then be read from `start` on."""
        for layer in self.layers:
            layer.bring(start)

    @property
    def length(self) -> int:
        """How many positions hold KV."""
        return min(layer.length for layer in self.layers) if self.layers else self._length

    def check(self, start: int) -> None:
        """Raises RuntimeError when a step cannot go on at a position from what is in place."""
        self.states.check(start)
        if not self.gap.serves(start):
            raise RuntimeError(f"a step at position {start} would attend to what windowed layers lack ({self.gap})")

    def computed(self, length: int) -> None:
        """A step through transformers has ended at a position."""
        self._length = length
        self.states.moved(length)

    @property
    def region(self) -> Region:
        """The arena's own memory as the kernels read it. Only on the host, for layers of one shape."""
        keys, values = self.layers[0].plane(0), self.layers[0].plane(1)
        return Region.even(keys.address, values.address - keys.address, keys.head_stride)

    def sequenced(self) -> Sequenced:
        """Where each page lies: in the arena itself, or where it is kept. Pages that lie across are moved here. Nothing
        of windowed layers is read elsewhere, since a page is whole."""
        if self._is_windowed and self.is_late:
            self.materialize()
        return self._in_place.sequenced(self.region, self.capacity)

    def hold(self, held: Held | None) -> None:
        """Say what the arena now holds, from position 0 on, but for its `gap`."""
        self._held = None if held is None else replace(held, gap=self.gap)

    def take_over(self, other: Arena, length: int) -> None:
        """Copy the first `length` positions of what `other` holds."""
        other.materialize()
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for kv in (0, 1):
                mine.plane(kv).put(0, theirs.plane(kv).tensor()[:, :length])
        self._held = other._held and other._held.cut(length)
        self.gap = other.gap.cut(length)

    @property
    def held_tokens(self) -> int:
        """How many leading positions hold KV that a request may find."""
        return len(self._held.tokens) if self._held is not None else 0

    @property
    def held_blocks(self) -> int:
        """The same in blocks."""
        return self._held.blocks if self._held is not None else 0

    def resident(self, wanted: Held) -> int:
        """How many leading tokens of a prompt are in place."""
        return self._held.common(wanted) if self._held is not None else 0

    def beside(self, wanted: Held) -> TokenIds:
        """Whose KV is in place, as far as a prompt may know of it."""
        return self._held.beside(wanted) if self._held is not None else wanted.tokens[:0]

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        plane = self.layers[layer].plane(kv)
        if plane.array is not None:
            return plane.array[:, start:end]
        staged = plane.stage(end - start)
        self._staged.setdefault(layer, []).append(Staged(kv, start, end, staged))
        data: Bytes = staged.numpy()
        return data

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        plane = self.layers[layer].plane(kv)

        def write(first: int, last: int) -> None:
            plane.fill(start + first, data[:, first:last])

        self.layers[layer].fill_late(start, start + data.shape[1], write)
        if plane.array is not None and not self._is_windowed:  # for the lean decoder alone, on the host
            self._in_place.fill(2 * layer + kv, start, data)

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> EncodedRows | None:
        return EncodedRows(self, rows, codec, blocks, end) if self._keep_encoded else None

    def map(self, start: int, end: int, region: Region) -> None:
        """See `InPlace.map`."""
        self._in_place.map(start, end, region)

    def commit(self, layer: int, start: int, end: int) -> None:
        for part in self._staged.pop(layer, ()):
            self.layers[layer].plane(part.kv).load(part.start, part.bytes)

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return self.layers[layer].plane(kv).save(start, end)
