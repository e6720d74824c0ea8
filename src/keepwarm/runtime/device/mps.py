"""Apple's devices, through torch: one stream for everything, and memory that processor and device share.

Copies are not put off: torch has no way to tell when one is over but to wait for all work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keepwarm.runtime.device.common import NativeEvent, OneStreamPort, TensorMemory
from keepwarm.runtime.device.port import Event, Memory


@dataclass(frozen=True)
class MpsStream:
    """The only one: all are equal, and nothing in it overtakes anything."""

    def record(self, *, timed: bool = False) -> NativeEvent:
        event = torch.mps.event.Event(enable_timing=timed)
        event.record()
        return NativeEvent(event)

    def wait(self, event: Event) -> None:
        return


class MpsPort(OneStreamPort):
    """See `DevicePort`."""

    kind = "mps"
    is_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, MpsStream())

    def _allocate(self, nbytes: int, huge: bool) -> Memory:
        return TensorMemory(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def reclaim(self) -> None:
        torch.mps.empty_cache()
