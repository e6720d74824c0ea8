"""The KV of one sequence in preallocated memory, as a transformers Cache. Steps append in place, so there is no
concatenation. `runtime.arenas` keeps arenas from one request to the next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from keepwarm.core.blocks import Block
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.memory import private_memory
from keepwarm.core.ports import BlockCodec, BlockRef, Bytes
from keepwarm.core.reads import Arriving, Reads
from keepwarm.errors import StoreStalled
from keepwarm.runtime.encoded import EncodedRows
from keepwarm.runtime.native.places import MOVE, NO_MOVES, PAGE, Region, Sequenced
from keepwarm.runtime.native.reads import CachedReads, Taking

_ALIGN = 4096  # bytes; every tensor of an arena starts on a page


@dataclass(frozen=True)
class Late:
    """Positions `[start, end)` that are put in place when they are needed; `write` takes how many of them."""

    start: int
    end: int
    write: Callable[[int], object]

    def cut(self, end: int) -> Late:
        return self if self.end <= end else replace(self, end=end)


class ArenaLayer(CacheLayerMixin):
    """One layer's KV: keys `[1, kv_heads, capacity, key_dim]`, values alike; `length` positions are valid.

    With a `window`, a step is shown the last `window - 1` positions before it, as transformers' own layer does.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.is_sliding = window is not None
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.length = 0
        self._late: list[Late] = []
        self.arrive: Callable[[], None] | None = None  # waits for what is still on its way

    def fill_late(self, start: int, end: int, write: Callable[[int], object]) -> None:
        """Have `write` put the first so many of the positions `[start, end)` in place, when the layer is used.

        Attention reads the layer's keys and values right after, and finds them in the processor's cache.
        """
        self._late.append(Late(start, end, write))

    @property
    def is_late(self) -> bool:
        """Whether something is put off still."""
        return bool(self._late)

    def settle(self, start: int = 0) -> None:
        """Do what was put off, at least for positions from `start` on; the rest is forgotten."""
        if self.arrive is not None:
            self.arrive()
        for part in self._late:
            if part.end > start:
                part.write(part.end - part.start)
        self._late.clear()

    def seek(self, length: int) -> None:
        """Take the first `length` positions as valid."""
        self.length = length
        if self._late:
            self._late = [part.cut(length) for part in self._late if part.start < length]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        self.settle()
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            raise IndexError(f"arena holds {self.keys.shape[-2]} positions, step ends at {end}")
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        first = self._first_shown()
        self.length = end
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def _first_shown(self) -> int:
        return 0 if self.window is None else max(0, self.length - self.window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_shown()
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.seek(0)


@dataclass(frozen=True)
class Mapped:
    """Positions `[start, end)` that are read where they are kept: in a run in RAM, or in an encoded block."""

    start: int
    end: int
    region: Region


class ArenaCache(Cache):
    """An arena as transformers sees it."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(layers=list(arena.layers))
        self.arena = arena


class Arena:
    """KV of one sequence. Implements `KVSink` (loading) and `KVSource` (storing).

    What a RAM hit fills in is not copied at once: the lean decoder reads it in place (`sequenced`), and a step through
    transformers copies each layer when it reaches it. With `keep_encoded` the same goes for what a store encoded,
    wherever it comes from: attention decodes it page by page, and the arena's own memory for it is never touched.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        capacity: int,
        device: torch.device,
        *,
        touch: bool = False,
        keep_encoded: bool = False,
    ) -> None:
        self.geometry = geometry
        self.capacity = capacity
        self.device = device
        self.reads: CachedReads | None = None  # the quickest way to read what the system has in memory
        self.lost = False  # something may write into it still, and always will be able to: nobody may use it again
        self.waited = 0.0  # seconds, for what came layer by layer since the last `seek`
        self.pins: list[int] = []  # positions below which background readers still need the content
        self._resident: list[BlockRef] = []
        dtype = getattr(torch, geometry.dtype)
        shapes, offsets = _planes(geometry, capacity)
        self.nbytes = offsets[-1]
        self.memory: object  # lives as long as anything reads or writes the arena's bytes
        with torch.inference_mode(mode=False):  # usable in and out of it, wherever the first request came from
            self.memory, buffer = allocate(self.nbytes, device, huge=not keep_encoded)
            if touch:
                buffer.zero_()
            tensors = [
                buffer[offset : offset + math.prod(shape) * geometry.itemsize].view(dtype).view(shape)
                for offset, shape in zip(offsets, shapes, strict=False)
            ]
        windows = [layer.window for layer in geometry.layers]
        self.layers = [ArenaLayer(k, v, w) for k, v, w in zip(tensors[::2], tensors[1::2], windows, strict=True)]
        self.cache = ArenaCache(self)
        self._keep_encoded = keep_encoded
        self._arriving: list[Arriving] = []
        self._joined: Reads  # of the step under way
        self._mapped: list[Mapped] = []
        self._sequenced: Sequenced | None = None
        self._filling: list[tuple[int, int]] = []  # of the span being filled: address and head stride per plane
        self._bytes = [t.view(torch.uint8)[0] for t in tensors]  # [heads, capacity, head_bytes]
        self._arrays: list[Bytes] = [each.numpy() for each in self._bytes] if device.type == "cpu" else []
        self._staged: dict[int, list[tuple[int, int, int, torch.Tensor]]] = {}

    @staticmethod
    def size(geometry: KVGeometry, capacity: int) -> int:
        """Bytes of an arena of so many positions."""
        return _planes(geometry, capacity)[1][-1]

    def free(self) -> None:
        """Give the memory back, now and not when the garbage is collected. The arena cannot be used any more; memory
        that something else reads or writes still goes when that is done."""
        self.seek(0)
        for layer in self.layers:
            layer.keys = layer.values = None
        self._bytes.clear()
        self._arrays.clear()
        del self.memory

    def seek(self, length: int) -> None:
        """Take the first `length` positions as valid; the next step appends there. Forgets what lies behind."""
        self.waited = 0.0
        self._sequenced = None
        for arriving in [each for each in self._arriving if each.end > length]:
            self._arriving.remove(arriving)
            self._close(arriving)
        if not self._arriving:
            self._arrived()
        self._staged.clear()  # of a load that failed half-way
        self._filling.clear()
        self._mapped = [replace(part, end=min(part.end, length)) for part in self._mapped if part.start < length]
        for layer in self.layers:
            layer.seek(length)
        self._resident = [ref for ref in self._resident if ref.end <= length]

    def advance(self, length: int) -> None:
        """Take note that positions up to `length` were written by another hand than `ArenaLayer.update`."""
        for layer in self.layers:
            layer.length = length
        if self._sequenced is not None:
            self._sequenced = replace(self._sequenced, moves=NO_MOVES)

    def defer(self, arriving: Arriving) -> bool:
        self._arriving.append(arriving)
        for number, layer in enumerate(self.layers):
            layer.arrive = partial(self.arrive, number)
        return True

    @property
    def is_arriving(self) -> bool:
        """Whether layers are still on their way from disk."""
        return bool(self._arriving)

    def arrive(self, layer: int) -> None:
        """Wait until a layer is in place, verified. Raises CorruptRun, and takes then nothing of the load as there."""
        started = time.perf_counter()
        try:
            for arriving in self._arriving:
                arriving.ready(layer, self.reads)
        except BaseException as error:
            self.lost = self.lost or isinstance(error, StoreStalled)
            self.seek(0)
            raise
        self.layers[layer].arrive = None
        self.waited += time.perf_counter() - started
        if layer == len(self.layers) - 1:
            self._arrived()

    def taking(self) -> Taking | None:
        """All that is on its way, for the threads of a step to bring; None when they cannot."""
        reads = [found for arriving in self._arriving if (found := arriving.reads()) is not None]
        if self.reads is None or len(reads) < len(self._arriving):
            return None
        self._joined = Reads.joined(reads)
        return self.reads.taking(self._joined)

    def passed(self, layer: int) -> None:
        """A step's threads have brought everything before this layer, and not this one."""
        self.waited += int(self._joined.spent[0]) / 1e9 / torch.get_num_threads()
        for arriving in self._arriving:
            arriving.passed(layer)
        for each in self.layers[:layer]:
            each.arrive = None
        if layer == len(self.layers):
            self._arrived()

    def arrive_all(self) -> None:
        """Wait for every layer that is still on its way. Raises as `arrive`."""
        if self._arriving:
            for layer in range(len(self.layers)):
                self.arrive(layer)
            self.waited = 0.0

    def _arrived(self) -> None:
        self._arriving.clear()
        for layer in self.layers:
            layer.arrive = None

    def _close(self, arriving: Arriving) -> None:
        try:
            arriving.close()
        except StoreStalled:
            self.lost = True

    @property
    def is_late(self) -> bool:
        """Whether part of the content is still read, or to be copied, from where it was found."""
        return any(layer.is_late for layer in self.layers)

    @property
    def holds_encoded(self) -> bool:
        """Whether part of the content is read from encoded blocks."""
        return any(part.region.is_encoded for part in self._mapped)

    def settle(self, start: int = 0) -> None:
        """Copy what was put off: the arena then holds all of its content from `start` on itself, and no other."""
        for layer in self.layers:
            layer.settle(start)
        self._mapped.clear()
        self._sequenced = None

    @property
    def region(self) -> Region:
        """The arena's own memory as the kernels read it. Only for layers of one shape."""
        memory = self._bytes[0]
        plane = self._bytes[1].data_ptr() - memory.data_ptr()
        return Region.even(memory.data_ptr(), plane, memory.stride(0))

    def sequenced(self) -> Sequenced:
        """Where each page lies: in the arena itself, or where it is kept. Pages that lie across are moved here."""
        if self._sequenced is None:
            pages = np.arange(0, self.capacity, PAGE, dtype=np.int64)
            regions = [self.region]
            moves = []
            for part in self._mapped:
                number = len(regions) << 32
                first, last = -(-part.start // PAGE), part.end // PAGE  # whole pages
                for start, end in ((part.start, min(first * PAGE, part.end)), (max(last * PAGE, part.start), part.end)):
                    if start < end:
                        moves.append((number | start - part.start, start, end - start))
                if first < last:
                    pages[first:last] = number | np.arange(first, last, dtype=np.int64) * PAGE - part.start
                regions.append(part.region)
            self._sequenced = Sequenced(tuple(regions), pages, np.array(moves, MOVE))
        return self._sequenced

    def set_resident(self, blocks: Sequence[Block], ids: Sequence[bytes]) -> None:
        """Name what the arena now holds, from position 0 on without a gap."""
        self._resident = [
            BlockRef(id=name, prefix=block.prefix, run_id="", ordinal=i, start=block.start, length=block.length,
                     tier="device")
            for i, (block, name) in enumerate(zip(blocks, ids, strict=True))
        ]  # fmt: skip

    def take_over(self, other: Arena, kept: Sequence[BlockRef]) -> None:
        """Copy what `other` holds of `kept`, its leading blocks."""
        length = kept[-1].end
        other.settle()
        for mine, theirs in zip(self._bytes, other._bytes, strict=True):
            mine[:, :length] = theirs[:, :length]
        self._resident = list(kept)

    @property
    def resident_blocks(self) -> int:
        """How many blocks are in place."""
        return len(self._resident)

    def resident(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """The longest leading part of `ids` that is in place."""
        found: list[BlockRef] = []
        for wanted, ref in zip(ids, self._resident, strict=False):
            if wanted != ref.id:
                break
            found.append(ref)
        return tuple(found)

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        if self._arrays:
            return self._arrays[2 * layer + kv][:, start:end]
        memory = self._bytes[2 * layer + kv]
        staging = torch.empty(memory.shape[0], end - start, memory.shape[2], dtype=torch.uint8)
        self._staged.setdefault(layer, []).append((kv, start, end, staging))
        staged: Bytes = staging.numpy()
        return staged

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self.layers[layer].fill_late(
            start, start + data.shape[1], partial(self._copy, self._bytes[2 * layer + kv], start, data)
        )
        if layer == kv == 0:
            self._filling.clear()
        self._filling.append((data.__array_interface__["data"][0], data.strides[0]))
        if len(self._filling) == len(self._bytes):
            self._map(start, data)

    @staticmethod
    def _copy(plane: torch.Tensor, start: int, data: Bytes, count: int) -> None:
        plane[:, start : start + count].copy_(torch.from_numpy(data[:, :count]))

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> EncodedRows | None:
        return EncodedRows(self, rows, codec, blocks, end) if self._keep_encoded else None

    def map(self, start: int, end: int, region: Region) -> None:
        """Read the positions `[start, end)` in a region, from its row 0 on."""
        self._mapped.append(Mapped(start, end, region))
        self._sequenced = None

    def commit(self, layer: int, start: int, end: int) -> None:
        for kv, first, last, staging in self._staged.pop(layer, ()):
            self._bytes[2 * layer + kv][:, first:last].copy_(staging)

    def _map(self, start: int, data: Bytes) -> None:
        """Note a filled span whose planes lie at equal distances, as a run's do."""
        addresses, heads = zip(*self._filling, strict=True)
        steps = {b - a for a, b in pairwise(addresses)}
        if len(steps) == 1 and len(set(heads)) == 1 and data.strides[1:] == (data.shape[2], 1):
            self.map(start, start + data.shape[1], Region.even(addresses[0], steps.pop(), heads[0], data))

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        if self._arrays:
            return self._arrays[2 * layer + kv][:, start:end]
        data: Bytes = self._bytes[2 * layer + kv][:, start:end].cpu().numpy()
        return data


def _planes(geometry: KVGeometry, capacity: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Shapes of keys and values per layer, where each begins in the buffer, and the buffer's size."""
    shapes: list[tuple[int, ...]] = [
        (1, layer.kv_heads, capacity, dim) for layer in geometry.layers for dim in (layer.key_dim, layer.value_dim)
    ]
    sizes = (-(-math.prod(shape) * geometry.itemsize // _ALIGN) * _ALIGN for shape in shapes)
    return shapes, list(accumulate(sizes, initial=0))


def allocate(size: int, device: torch.device, *, huge: bool = True) -> tuple[object, torch.Tensor]:
    """`size` bytes, and what owns them; on the CPU in `huge` pages where the system has them."""
    if device.type != "cpu":
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer, buffer
    memory = private_memory(size, huge=huge)
    return memory, torch.frombuffer(memory, dtype=torch.uint8)
