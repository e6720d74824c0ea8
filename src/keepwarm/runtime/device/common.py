"""What several devices share: torch's events and memory, and ports with a single stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from keepwarm.runtime.device.port import DevicePort, Event, Stream


@dataclass(frozen=True)
class NativeEvent:
    """One of torch's events."""

    native: Any  # torch.cuda.Event, torch.mps.event.Event

    def synchronize(self) -> None:
        self.native.synchronize()

    def is_past(self) -> bool:
        return bool(self.native.query())

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, NativeEvent)
        earlier.synchronize()
        self.synchronize()
        return float(earlier.native.elapsed_time(self.native)) / 1e3


class TensorMemory:
    """A tensor of bytes. `free` returns it to torch's allocator."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "the memory was freed"
        return self._tensor

    @property
    def owner(self) -> object:
        return self

    def used_by(self, stream: Stream) -> None:
        return

    def free(self) -> None:
        self._tensor = None


class OneStreamPort(DevicePort):
    """A device that works in the order of the calls. Copies are done when the call returns."""

    def __init__(self, device: torch.device, stream: Stream) -> None:
        self.device = device
        self.inbound = self.outbound = stream

    def current(self) -> Stream:
        return self.inbound

    def stream(self) -> Stream:
        return self.inbound

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)
