"""Keys and values in a device's memory: one plane for each layer's keys and one for its values. All reads and writes of
an arena's memory go through this module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import Bytes
from keepwarm.runtime.device.copies import Copies, Numbers
from keepwarm.runtime.device.port import DevicePort, Memory, Stream

_ALIGN = 4096  # bytes; every plane starts on a page


class Turns:
    """Keeps streams that use the same memory in order: each uses it after the work queued in those before."""

    def __init__(self, port: DevicePort, memory: Memory) -> None:
        self._port, self._memory = port, memory
        self._last: Stream | None = None

    def take(self, stream: Stream | None = None) -> None:
        """Order the further work of a stream (None: the calling thread's) after all work so far. It may write.

        Only one thread at a time may call this: the memory belongs to the caller.
        """
        if self._port.is_host:
            return
        mine = self._port.current() if stream is None else stream
        if mine != self._last:
            self._memory.used_by(mine)
            self.follow(mine)
            self._last = mine

    def follow(self, stream: Stream) -> None:
        """Order the further work of a stream that only reads after all work so far, from any thread. No stream waits
        for it: the caller must keep what it reads unchanged until it is read."""
        last = self._last
        if last is not None and last != stream:
            stream.wait(last.record())


class Plane:
    """One layer's keys, or its values: `[kv_heads, capacity, dim]`."""

    def __init__(self, port: DevicePort, memory: Memory, turns: Turns, tensor: torch.Tensor) -> None:
        self.port, self.turns = port, turns
        self.dtype = tensor.dtype
        self._memory, self._tensor = memory, tensor
        self._bytes = tensor.view(torch.uint8)
        self.array: Bytes | None = self._bytes.numpy() if port.is_host else None  # for the host to work in place

    @property
    def memory(self) -> Memory:
        """The memory that it is a part of."""
        return self._memory

    def rows(self, planes: int, apart: int, start: int, end: int) -> torch.Tensor:
        """Return the bytes of positions of this plane and of those behind it, so many bytes apart, `[planes, kv_heads,
        end - start, head_bytes]`."""
        shape, width = (planes, self.shape[0], end - start, self.head_bytes), self.head_bytes
        begin = self._bytes.storage_offset() + start * width
        return self._bytes.as_strided(shape, (apart, self.head_stride, width, 1), begin)

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def head_bytes(self) -> int:
        """Bytes of one head at one position."""
        return self._bytes.shape[2]

    @property
    def address(self) -> int:
        """The address of its first byte, for kernels of its device. Raises ValueError if the device has none."""
        if not self.port.has_addresses:
            raise ValueError(f"memory of {self.port.device} has no address here")
        return self._tensor.data_ptr()

    @property
    def head_stride(self) -> int:
        """Bytes from one head to the next."""
        return self._bytes.stride(0)

    def tensor(self) -> torch.Tensor:
        """Return the whole plane, for the calling thread's next computations to read. Write it only with the methods
        below."""
        self.turns.take()
        return self._tensor

    def shared(self) -> torch.Tensor:
        """Return the whole plane like `tensor`, from any thread, for reading what does not change until the calling
        thread's computations are done."""
        stream = self.port.current()
        self._memory.used_by(stream)
        self.turns.follow(stream)
        return self._tensor

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Write rows that the calling thread computed, `[kv_heads, n, dim]`, at the positions `start ...`."""
        self.extend(start, rows, start)

    def extend(self, start: int, rows: torch.Tensor, shown: int) -> torch.Tensor:
        """Write rows as `put` does. Return the positions from `shown` to the last one written, `[kv_heads, n, dim]`,
        like `tensor`."""
        end = start + rows.shape[1]
        self.turns.take()
        self.port.write(self._tensor[:, start:end], rows)
        return self._tensor[:, shown:end]

    def scatter(self, at: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows as `put` does, at the positions `at`, `[n]`."""
        self.turns.take()
        self.port.write(self._tensor, rows, at)

    def stage(self, count: int) -> torch.Tensor:
        """Return pinned host memory for `count` positions, bytes `[kv_heads, count, head_bytes]`, to fill and `load`.

        The load is ordered after all that was computed before this call, not after what is computed later.
        """
        self.turns.take(self.port.inbound)
        heads, width = self.shape[0], self.head_bytes
        return self.port.pinned(heads * count * width).view(heads, count, width)

    def load(self, start: int, staged: torch.Tensor) -> None:
        """Queue a copy of staged bytes to the positions `start ...`. They must not change until it is done."""
        self.turns.take(self.port.inbound)
        self.port.copy_in(self._bytes[:, start : start + staged.shape[1]], staged, self.port.inbound)

    def fill(self, start: int, data: Bytes) -> None:
        """Copy any bytes `[kv_heads, n, head_bytes]` to the positions `start ...`; they may change right after."""
        if self.array is not None:
            self._bytes[:, start : start + data.shape[1]].copy_(torch.from_numpy(data))
        else:
            fill([Rows(self, start, data)])

    def addresses(self, start: int) -> Numbers:
        """Return the address of each head's bytes at a position."""
        return self.address + start * self.head_bytes + self.head_stride * np.arange(self.shape[0], dtype=np.int64)

    def save(self, start: int, end: int) -> Bytes:
        """Return bytes `[kv_heads, end - start, head_bytes]` of the positions `[start, end)`, from any thread: in place
        on the host, elsewhere a copy. They must not change meanwhile."""
        if self.array is not None:
            return self.array[:, start:end]
        part, outbound = self._bytes[:, start:end], self.port.outbound
        self.turns.follow(outbound)
        self._memory.used_by(outbound)
        target = self.port.pinned(part.numel()).view(part.shape)
        self.port.copy_out(part, target, outbound)
        outbound.record().synchronize()
        copied: Bytes = target.numpy()
        return copied


def save_all(planes: Sequence[Plane], start: int, end: int) -> Bytes | None:
    """Return a copy of the positions `[start, end)` of all planes of a device or of the host, `[planes, kv_heads,
    end - start, head_bytes]`, which is made by one copy; None if they are not alike, or not at even distances. See
    `Plane.save`."""
    first, port = planes[0], planes[0].port
    if any(plane.shape != first.shape or plane.memory is not first.memory for plane in planes):
        return None
    apart = {after.address - before.address for before, after in pairwise(planes)}
    if len(apart) != 1 or min(apart) <= 0:
        return None
    part = first.rows(len(planes), apart.pop(), start, end)
    if port.is_host:
        target = part.clone(memory_format=torch.contiguous_format)
    else:
        for plane in planes[::2]:  # keys and values have one turn
            plane.turns.follow(port.outbound)
        first.memory.used_by(port.outbound)
        target = port.pinned(part.numel()).view(part.shape)
        port.copy_out(part, target, port.outbound)
        port.outbound.record().synchronize()
    copied: Bytes = target.numpy()
    return copied


@dataclass(frozen=True)
class Rows:
    """Bytes `[kv_heads, n, head_bytes]` in the host's memory that belong at the positions `start ...` of a plane."""

    plane: Plane
    start: int
    bytes: Bytes


def fill(parts: Sequence[Rows]) -> None:
    """Copy rows of one layer to its device together: from where they lie if it can, and they must not change then;
    otherwise through pinned memory, and they may change right after."""
    port = parts[0].plane.port
    if port.copies_by_address and all(port.holds(part.bytes) for part in parts):
        _queue(port, parts)
        return
    memory = port.pinned(sum(part.bytes.nbytes for part in parts))
    staged, at = [], 0
    for part in parts:
        held = memory[at : at + part.bytes.nbytes].view(part.bytes.shape)
        if part.bytes.flags.writeable:
            held.copy_(torch.from_numpy(part.bytes))  # by all threads
        else:  # of these torch warns
            held.numpy()[...] = part.bytes
        staged.append(Staged(part.plane, part.start, held))
        at += part.bytes.nbytes
    load(staged)


def fill_all(planes: Sequence[Plane], start: int, data: Bytes) -> bool:
    """Queue copies of rows, `[planes, kv_heads, n, head_bytes]`, to the positions `start ...` of planes of one device,
    as one, from where they lie. They must not change until that is done. Return False if the device cannot do that."""
    port = planes[0].port
    if not port.copies_by_address or not port.holds(data.reshape(-1, *data.shape[2:])):
        return False
    _queue(port, [Rows(plane, start, rows) for plane, rows in zip(planes, data, strict=True)])
    return True


@dataclass(frozen=True)
class Staged:
    """Pinned bytes, `[kv_heads, n, head_bytes]`, that belong at the positions `start ...` of a plane."""

    plane: Plane
    start: int
    bytes: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.bytes.shape[1]


def load(parts: Sequence[Staged]) -> None:
    """Queue the copies of staged bytes of one layer to its device, as one where the device takes them by address. They
    must not change until that is done."""
    port = parts[0].plane.port
    if not port.copies_by_address:
        for part in parts:
            part.plane.load(part.start, part.bytes)
        return
    _queue(port, [Rows(part.plane, part.start, part.bytes.numpy()) for part in parts])


def _queue(port: DevicePort, parts: Sequence[Rows]) -> None:
    """Queue copies from addresses of the host to such of the device."""
    there, here, sizes = [], [], []
    for part in parts:
        part.plane.turns.take(port.inbound)
        heads, count, width = part.bytes.shape
        there.append(part.plane.addresses(part.start))
        here.append(part.bytes.__array_interface__["data"][0] + part.bytes.strides[0] * np.arange(heads))
        sizes.append(np.full(heads, count * width))
    plan = Copies.between(*map(np.concatenate, (there, here, sizes)), inward=True)
    port.copy_all(plan, port.inbound, [part.bytes for part in parts])


def layout(geometry: KVGeometry, capacity: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return the shapes of the planes, alternating keys and values; and each one's offset in memory, then the size."""
    shapes = [(layer.kv_heads, capacity, dim) for layer in geometry.layers for dim in (layer.key_dim, layer.value_dim)]
    sizes = (-(-math.prod(shape) * geometry.itemsize // _ALIGN) * _ALIGN for shape in shapes)
    return shapes, list(accumulate(sizes, initial=0))


def allocate(
    ports: Sequence[DevicePort], geometry: KVGeometry, capacity: int, *, huge: bool, touch: bool = False
) -> tuple[list[tuple[Memory, int]], list[tuple[Plane, Plane]]]:
    """Allocate each layer's planes in memory of its port. Return the memories with the bytes of their planes, and the
    planes.

    Raises Overloaded when a device has no room.
    """
    memories: list[tuple[Memory, int]] = []
    planes: dict[int, tuple[Plane, Plane]] = {}
    try:
        for port in dict.fromkeys(ports):
            numbers = [number for number, each in enumerate(ports) if each is port]
            part = replace(geometry, layers=tuple(geometry.layers[number] for number in numbers))
            nbytes = layout(part, capacity)[1][-1]
            memory = port.allocate(max(nbytes, 1), huge=huge)
            memories.append((memory, nbytes))
            if touch and port.is_host:
                memory.tensor.zero_()
            planes.update(zip(numbers, make_planes(port, memory, part, capacity), strict=True))
    except BaseException:
        for memory, _ in memories:
            memory.free()
        raise
    return memories, [planes[number] for number in range(len(ports))]


def make_planes(port: DevicePort, memory: Memory, geometry: KVGeometry, capacity: int) -> list[tuple[Plane, Plane]]:
    """Make each layer's planes in memory of the size that `layout` returns."""
    shapes, offsets = layout(geometry, capacity)
    dtype = getattr(torch, geometry.dtype)
    tensors = [
        memory.tensor[offset : offset + math.prod(shape) * geometry.itemsize].view(dtype).view(shape)
        for offset, shape in zip(offsets, shapes, strict=False)
    ]
    made = []
    for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
        turns = Turns(port, memory)  # one per layer, so that the next layer is copied while this one is used
        made.append((Plane(port, memory, turns, keys), Plane(port, memory, turns, values)))
    return made
