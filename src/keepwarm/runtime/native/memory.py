"""Memory for packed weights and for the results inside a step, in huge pages where the system has them.

A step reads every weight once, so with small pages it looks up an address every 4 KiB. Most weights are smaller than a
huge page. So many of them share one mapping.
"""

from __future__ import annotations

import mmap

import torch

from keepwarm.core.memory import private_memory

_SHARED = 64 << 20  # bytes of a mapping for many weights; what none of them takes is not touched
_ALIGN = 64  # bytes; a line of the processor's cache


class WeightMemory:
    """The packed weights of one model. They live as long as this object."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)  # of the mapping that weights share
        self._held: list[torch.Tensor] = []

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of the weights, by address."""
        return {held.data_ptr(): held.nbytes for held in self._held}

    def add(self, weight: torch.Tensor) -> int:
        """Copy a weight, contiguously, and return its address. Raises MemoryError."""
        return self.room(weight.nbytes).view(weight.dtype).view(weight.shape).copy_(weight).data_ptr()

    def room(self, size: int) -> torch.Tensor:
        """Return so many zeros, uint8. Raises MemoryError."""
        self._held.append(self._bytes(size))
        return self._held[-1]

    def _bytes(self, size: int) -> torch.Tensor:
        if size > _SHARED:
            return _mapped(size)
        if size > len(self._left):
            self._left = _mapped(_SHARED)
        taken, self._left = self._left[:size], self._left[-(-size // _ALIGN) * _ALIGN :]
        return taken


def _mapped(size: int) -> torch.Tensor:
    return torch.frombuffer(pages(size), dtype=torch.uint8)


def pages(size: int) -> mmap.mmap:
    """Return zeros, in huge pages if the system has them. Raises MemoryError."""
    try:
        return private_memory(size)
    except OSError as error:
        raise MemoryError(f"the system has no memory for {size} bytes more ({error})") from error
