"""NVIDIA's devices, through torch: streams, events and pinned memory are CUDA's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from keepwarm.core.ports import Bytes
from keepwarm.runtime.capture import ALONE
from keepwarm.runtime.device.common import NativeEvent, TensorMemory
from keepwarm.runtime.device.copies import Copies
from keepwarm.runtime.device.cuda_copies import is_there, runner
from keepwarm.runtime.device.cuda_host import registered
from keepwarm.runtime.device.port import DevicePort, Event, Memory, Stream

_WIDE = 8  # bytes that a kernel moves at once, if rows allow it


@dataclass(frozen=True)
class CudaStream:
    native: torch.cuda.Stream

    def record(self, *, timed: bool = False) -> NativeEvent:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.native)
        return NativeEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, NativeEvent)
        self.native.wait_event(event.native)


class CudaMemory(TensorMemory):
    """Memory whose allocator knows the streams that use it, and reuses it only when they are done
    (`Tensor.record_stream`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._streams: list[Stream] = []

    def used_by(self, stream: Stream) -> None:
        if self._tensor is not None and stream not in self._streams:
            assert isinstance(stream, CudaStream)
            self._tensor.record_stream(stream.native)
            self._streams.append(stream)


class CudaPort(DevicePort):
    """See `DevicePort`."""

    kind = "cuda"
    is_host = False
    goes_ahead = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.inbound, self.outbound = self.stream(), self.stream()
        self._registered = registered(index)
        self._used: deque[tuple[Event, object]] = deque()  # pinned memory, and when its copies are done
        self._using = threading.Lock()

    def current(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.device))

    def stream(self) -> Stream:
        return CudaStream(torch.cuda.Stream(self.device))

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        assert isinstance(stream, CudaStream)
        return torch.cuda.stream(stream.native)

    def _allocate(self, nbytes: int, huge: bool) -> Memory:
        return CudaMemory(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def pinned(self, nbytes: int) -> torch.Tensor:
        with torch.cuda.device(self.device):  # a thread that has used none would begin with the first one
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register(self, data: Bytes) -> None:
        self.let_go()
        if self._registered is not None:
            self._registered.add(data)

    def holds(self, rows: Bytes) -> bool:
        return self._registered is not None and self._registered.holds(rows)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self._copy(target, source, stream)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        self._copy(target, source, stream)

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        with torch.cuda.device(self.device):
            return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def fetch(self, result: torch.Tensor) -> Callable[[], torch.Tensor]:
        with torch.cuda.device(self.device):
            copied = torch.empty(result.shape, dtype=result.dtype, pin_memory=True).copy_(result, non_blocking=True)
        done = self.current().record()

        def arrived() -> torch.Tensor:
            done.synchronize()
            return copied

        return arrived

    @property
    def copies_by_address(self) -> bool:
        return is_there()

    def copy_all(self, copies: Copies, stream: Stream, pinned: object = None) -> None:
        assert isinstance(stream, CudaStream)
        try:
            with self.on(stream):  # makes this device the current one, too, in a thread that has used none
                runner()(copies, stream.native.cuda_stream)
        finally:  # after an error a part of them may be queued
            if pinned is not None:  # torch's allocator does not know of these copies
                with self._using:
                    self._used.append((stream.record(), pinned))
            self.let_go()

    def let_go(self) -> None:
        done = []
        with self._using:
            while self._used and self._used[0][0].is_past():
                done.append(self._used.popleft())
        del done  # outside of the lock: it may be the last reference to registered memory

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy. Rows of several heads are apart on the device: torch gathers or scatters them there, with one copy."""
        with self.on(stream):
            _widened(target, source).copy_(_widened(source, target), non_blocking=True)

    def reclaim(self) -> None:
        with ALONE:  # some versions of torch refuse this while a thread records
            torch.cuda.empty_cache()

    def free_memory(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.device)[0])


def _widened(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """View bytes as int64 if the layouts of both tensors allow it: a kernel moves number by number."""
    if all(
        each.data_ptr() % _WIDE == each.shape[-1] % _WIDE == 0
        and each.stride(-1) == 1
        and all(stride % _WIDE == 0 for stride in each.stride()[:-1])
        for each in (tensor, other)
    ):
        return tensor.view(torch.int64)
    return tensor
