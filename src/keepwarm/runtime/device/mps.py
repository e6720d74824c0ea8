"""Apple's devices, through torch: one stream for everything, and memory that processor and device share.

Copies are not put off: torch has no way to tell when one is over but to wait for all work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from keepwarm.runtime.device.port import DevicePort, Event, Memory, Stream


@dataclass(frozen=True)
class MpsEvent:
    native: Any  # torch.mps.event.Event

    def synchronize(self) -> None:
        self.native.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, MpsEvent)
        earlier.synchronize()
        self.synchronize()
        return float(earlier.native.elapsed_time(self.native)) / 1e3


@dataclass(frozen=True)
class MpsStream:
    """The only one: all are equal, and nothing in it overtakes anything."""

    def record(self, *, timed: bool = False) -> MpsEvent:
        event = torch.mps.event.Event(enable_timing=timed)
        event.record()
        return MpsEvent(event)

    def wait(self, event: Event) -> None:
        return


class MpsMemory:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._tensor: torch.Tensor | None = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor

    @property
    def owner(self) -> object:
        return self

    def used_by(self, stream: Stream) -> None:
        return

    def free(self) -> None:
        self._tensor = None


class MpsPort(DevicePort):
    """See `DevicePort`."""

    kind = "mps"
    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inbound = self.outbound = MpsStream()

    def current(self) -> Stream:
        return self.inbound

    def stream(self) -> Stream:
        return self.inbound

    def _allocate(self, nbytes: int, huge: bool) -> Memory:
        return MpsMemory(nbytes, self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        target.copy_(source)

    def reclaim(self) -> None:
        torch.mps.empty_cache()
