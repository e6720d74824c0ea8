"""A device that does everything as late, and in memory as hostile, as a real one is allowed to.

It is the CPU behind another port, so that tests find on every machine what otherwise only a GPU shows:

- Its memory is its own: the host cannot see it. It begins as NaN, and is NaN again as soon as it is freed.
- A copy is done only when something waits for an event after it, together with all that its stream was given before
  it. Until then its target is unchanged. Pinned memory begins as NaN, too.
- What a thread computes goes to a stream of that thread, as inside `torch.cuda.stream(...)`. A copy that was not told
  to wait for the stream that wrote its bytes copies NaN, since they may not be there yet. `faults` says where.
- A device may also copy at once. So it is a fault, too, if bytes of the host change before their copy, which is NaN,
  or if they are copied by address and are not pinned, or registered, which is one here.
- Memory of somebody else (`adopt`) is copied to and from by address, and `use` says what is computed over it. There it
  is a fault, too, to write over what a stream reads without waiting for that stream.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter

import numpy as np
import torch

from keepwarm.core.ports import Bytes
from keepwarm.runtime.device.common import TensorMemory
from keepwarm.runtime.device.copies import Copies
from keepwarm.runtime.device.port import DevicePort, Memory, Stream
from keepwarm.runtime.device.registered import Registered
from keepwarm.testing.late_streams import STREAM_BITS, LateStream, join

_NAN = 0xFF  # in every byte: NaN in every floating dtype
_ROOM = 16 << 30  # bytes that it says it has where it has no bound


class LateMemory(TensorMemory):
    """Memory that begins as NaN, and notes for each byte which stream wrote it and when."""

    def __init__(self, port: AdversarialPort, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.nbytes = tensor.nbytes  # that it takes
        self.written = torch.from_numpy(np.zeros(self.nbytes, np.int64))  # takes memory only where it is written
        self.read: dict[int, torch.Tensor] = {}  # when each byte was last read, by stream
        port.memories[tensor.untyped_storage().data_ptr()] = self

    def reading(self, stream: LateStream) -> torch.Tensor:
        """Return when the stream read each byte."""
        if stream.number not in self.read:
            self.read[stream.number] = torch.from_numpy(np.zeros(self.nbytes, np.int64))
        return self.read[stream.number]

    def free(self) -> None:
        if self._tensor is not None:
            self._tensor.fill_(_NAN)
            self.nbytes = 0
        super().free()


class AdversarialPort(DevicePort):
    """See `DevicePort`."""

    kind = "cpu"
    is_host = False
    goes_ahead = True

    def __init__(self, device: torch.device | None = None, *, room: int | None = None, slowness: float = 0.0) -> None:
        """`room`: bytes that the device has, unlimited by default. `slowness`: seconds of its own clock that a copy or
        a write takes."""
        self.device = torch.device("cpu") if device is None else device
        self.room, self._slowness = room, slowness
        self.lock = threading.RLock()
        self.memories: weakref.WeakValueDictionary[int, LateMemory] = weakref.WeakValueDictionary()
        self.faults: list[str] = []  # copies that did not wait for what they read
        self._locked: dict[int, int] = {}  # bytes of pinned memory, by address
        self._registered = Registered(self._lock_pages, lambda address: self._locked.pop(address) > 0)
        self._time = self._streams = 0
        self._made_streams: weakref.WeakSet[LateStream] = weakref.WeakSet()
        self._local = threading.local()
        self.inbound, self.outbound = self.stream(), self.stream()

    def now(self) -> int:
        """Count what is done now, and return its number."""
        self._time += 1
        return self._time

    def seen(self, known: dict[int, int]) -> None:
        """Note that the calling thread saw that an event is past: what it queues from now on comes after that."""
        join(self.host_knows(), known)

    def host_knows(self) -> dict[int, int]:
        """Return what the calling thread saw, by stream."""
        if not hasattr(self._local, "known"):
            self._local.known = {}
        found: dict[int, int] = self._local.known
        return found

    def clock(self) -> float:
        """Seconds, as events tell them."""
        return time.perf_counter() + self._slowness * self._time

    def current(self) -> Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = self._made(prompt=True)
        found: Stream = self._local.stream
        return found

    def stream(self) -> Stream:
        return self._made(prompt=False)

    def _made(self, *, prompt: bool) -> LateStream:
        with self.lock:
            self._streams += 1
            made = LateStream(self, self._streams, prompt=prompt)
            self._made_streams.add(made)
            return made

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, LateStream)
        before, self._local.stream = self.current(), stream
        try:
            with stream.computing():
                yield
        finally:
            self._local.stream = before

    def _allocate(self, nbytes: int, huge: bool) -> Memory:
        taken = self._taken()
        if self.room is not None and taken + nbytes > self.room:
            raise torch.OutOfMemoryError(f"out of memory. Tried to allocate {nbytes} bytes beside {taken}")
        tensor = torch.full((nbytes,), _NAN, dtype=torch.uint8)
        memory = LateMemory(self, tensor)
        weakref.finalize(memory, tensor.fill_, _NAN)
        return memory

    def free_memory(self) -> int:
        return max(0, (_ROOM if self.room is None else self.room) - self._taken())

    def _taken(self) -> int:
        return sum(memory.nbytes for memory in list(self.memories.values()))

    def adopt(self, tensor: torch.Tensor) -> LateMemory:
        """Take all of a tensor's storage, which somebody else allocated, as this device's memory. It is that as long as
        the result lives."""
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return LateMemory(self, whole)

    def use(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """Note that the calling thread's stream computes with part of an adopted memory: it reads, or writes, too."""
        stream, memory = self.current(), self._memory(tensor)
        assert isinstance(stream, LateStream)
        with self.lock:
            join(stream.known, self.host_knows())
            self._ordered(_each(memory.written, tensor), stream, "computed with")
            if writes:
                self._unread(memory, lambda marks: _each(marks, tensor), stream, "computed anew")
            mark = stream.tick()
            _each(memory.reading(stream), tensor).fill_(mark >> STREAM_BITS)
            if writes:
                _each(memory.written, tensor).fill_(mark)

    def busy(self) -> list[LateStream]:
        """Return the streams whose work was put off, in the order in which they were made."""
        return sorted((stream for stream in self._made_streams if stream.is_busy), key=lambda stream: stream.number)

    def pinned(self, nbytes: int) -> torch.Tensor:
        made = np.full(nbytes, _NAN, np.uint8)
        self._lock_pages(made.ctypes.data, nbytes)
        weakref.finalize(made, self._locked.pop, made.ctypes.data, None)
        return torch.from_numpy(made)

    def register(self, data: Bytes) -> None:
        self._registered.add(data)

    def holds(self, rows: Bytes) -> bool:
        return self._registered.holds(rows)

    def _lock_pages(self, address: int, nbytes: int) -> bool:
        self._locked[address] = nbytes
        return True

    def _is_locked(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + own for start, own in list(self._locked.items()))

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, LateStream)
        memory, given = self._memory(target), _sum(source)

        def land() -> None:
            written = _like(memory.written, target)
            if self._ordered(written, stream, "written over") & self._unchanged(given, _sum(source)):
                target.copy_(source)
            else:
                target.fill_(_NAN)
            written.fill_(stream.tick())

        stream.give(land)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, LateStream)
        memory = self._memory(source)

        def land() -> None:
            if self._ordered(_like(memory.written, source), stream, "copied out"):
                target.copy_(source)
            stream.tick()

        stream.give(land)

    @property
    def copies_by_address(self) -> bool:
        return True

    def copy_all(self, copies: Copies, stream: Stream, pinned: object = None) -> None:
        assert isinstance(stream, LateStream)
        late, held = stream, [pinned]
        plan = list(zip(copies.sources.tolist(), copies.targets.tolist(), copies.sizes.tolist(), strict=True))
        if copies.inward and not all(self._is_locked(source, size) for source, _, size in plan):
            self.faults.append("bytes of the host are copied by address and are not pinned")
        given = [_sum_at(source, size) if copies.inward else 0 for source, _, size in plan]

        def land() -> None:
            mark = late.tick()
            for before, (source, target, size) in zip(given, plan, strict=True):
                memory, part = self._at(target if copies.inward else source, size)
                written = memory.written[part]
                what = "copied over" if copies.inward else "copied out"
                good = self._ordered(written, late, what)
                if copies.inward:
                    good &= self._unread(memory, itemgetter(part), late, what)
                    good &= self._unchanged(before, _sum_at(source, size))
                    written.fill_(mark)
                    ctypes.memmove(target, source, size) if good else ctypes.memset(target, _NAN, size)
                else:
                    memory.reading(late)[part] = mark >> STREAM_BITS
                    ctypes.memmove(target, source, size)
            held.clear()

        stream.give(land)

    def _at(self, address: int, size: int) -> tuple[LateMemory, slice]:
        """Return the memory that has the bytes at an address, and where they are in it."""
        for base, memory in list(self.memories.items()):
            if base <= address and address + size <= base + memory.nbytes:
                return memory, slice(address - base, address - base + size)
        raise AssertionError(f"{size} bytes at {address:#x} are not this device's")

    def _unchanged(self, given: int, found: int) -> bool:
        """Whether bytes of the host are those that they were when their copy was queued."""
        if given != found:
            self.faults.append("bytes of the host changed before their copy was done")
        return given == found

    def _unread(
        self, memory: LateMemory, part: Callable[[torch.Tensor], torch.Tensor], stream: LateStream, what: str
    ) -> bool:
        """Whether a stream has waited for all others that read part of a memory."""
        late = any(
            int(part(marks).max()) > stream.known.get(number, 0)
            for number, marks in memory.read.items()
            if number != stream.number
        )
        if late:
            self.faults.append(f"bytes were {what} without waiting for who reads them")
        return not late

    def write(self, target: torch.Tensor, rows: torch.Tensor, at: torch.Tensor | None = None) -> None:
        super().write(target, rows, at)
        stream = self.current()
        assert isinstance(stream, LateStream)
        with self.lock:
            written = _like(self._memory(target).written, target)
            mark = stream.tick()
            if at is None:
                written.fill_(mark)
            else:
                written.index_fill_(1, at, mark)

    def _memory(self, tensor: torch.Tensor) -> LateMemory:
        return self.memories[tensor.untyped_storage().data_ptr()]

    def _ordered(self, written: torch.Tensor, stream: LateStream, what: str) -> bool:
        marks = written.flatten().unique_consecutive().unique()  # far sooner done than sorting all
        late = [mark for mark in marks.tolist() if not stream.knows(mark)]
        if late:
            self.faults.append(f"{tuple(written.shape)} rows were {what} without waiting for who wrote them")
        return not late


def _sum(source: torch.Tensor) -> int:
    return zlib.crc32(source.contiguous().numpy().data)


def _sum_at(address: int, size: int) -> int:
    return zlib.crc32((ctypes.c_char * size).from_address(address))


def _each(marks: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the marks of the first byte of each number in part of a memory."""
    size = tensor.itemsize
    return marks.as_strided(tensor.shape, [stride * size for stride in tensor.stride()], tensor.storage_offset() * size)


def _like(written: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the marks of each row's first byte in part of a memory, `[heads, n]`."""
    size = tensor.itemsize
    strides = [stride * size for stride in tensor.stride()[:-1]]
    return written.as_strided(tensor.shape[:-1], strides, tensor.storage_offset() * size)
