"""Apple's devices, through torch: one stream for everything, and memory shared by processor and device.

Copies are synchronous: torch can tell that one is done only by waiting for all work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from keepwarm.runtime.device.common import NativeEvent, OneStreamPort, TensorMemory
from keepwarm.runtime.device.port import Event, Memory


@dataclass(frozen=True)
class MpsStream:
    """The only stream; all objects are equal. It keeps the order of work."""

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
    has_addresses = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, MpsStream())

    def _allocate(self, nbytes: int, huge: bool) -> Memory:
        return TensorMemory(torch.empty(nbytes, dtype=torch.uint8, device=self.device))

    def reclaim(self) -> None:
        torch.mps.empty_cache()

    def free_memory(self) -> int | None:
        """Return what is left of the system's advice. Processor and device share their memory, so nothing is free for
        one of them alone."""
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
