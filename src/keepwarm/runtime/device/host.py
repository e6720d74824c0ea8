"""The processor, whose memory is the host's. Work is done when the call returns."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from keepwarm.core.memory import private_memory
from keepwarm.runtime.device.common import OneStreamPort
from keepwarm.runtime.device.copies import Copies
from keepwarm.runtime.device.port import Event, Memory, Stream


@dataclass(frozen=True)
class HostEvent:
    """An event that is past at once, so there is nothing to wait for."""

    at: float  # seconds of `time.perf_counter`

    def synchronize(self) -> None:
        return

    def is_past(self) -> bool:
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, HostEvent)
        return self.at - earlier.at


@dataclass(frozen=True)
class HostStream:
    """The calling thread itself. All host streams are equal."""

    def record(self, *, timed: bool = False) -> HostEvent:
        return HostEvent(time.perf_counter() if timed else 0.0)

    def wait(self, event: Event) -> None:
        return


class HostMemory:
    """Memory that Keepwarm maps itself. Views keep it alive."""

    def __init__(self, nbytes: int, huge: bool) -> None:
        self._mapped = private_memory(nbytes, huge=huge)
        self._tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    @property
    def owner(self) -> object:
        return self._mapped

    def used_by(self, stream: Stream) -> None:
        return

    def free(self) -> None:
        with suppress(AttributeError):
            del self._mapped, self._tensor


class HostPort(OneStreamPort):
    """See `DevicePort`."""

    kind = "cpu"
    is_host = True

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(torch.device("cpu") if device is None else device, HostStream())

    def copy_all(self, copies: Copies, stream: Stream, pinned: object = None) -> None:
        for source, target, size in zip(copies.sources, copies.targets, copies.sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))

    def _allocate(self, nbytes: int, huge: bool) -> Memory:
        return HostMemory(nbytes, huge)
