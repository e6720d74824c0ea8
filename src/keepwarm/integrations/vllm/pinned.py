"""Pinned host memory for transfers, used again and again: pinning takes longer than copying."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from keepwarm.core.ports import Bytes
from keepwarm.runtime.device import Copies, DevicePort, Event

KEPT = 1 << 30  # bytes kept for later transfers
_LEAST = 1 << 20  # bytes of the smallest block

Copying = Sequence[tuple[Event, Copies]]  # copies that may still run; their plans live as long


@dataclass(eq=False)
class Block:
    """A piece of pinned memory."""

    tensor: torch.Tensor
    memory: Bytes
    copying: list[tuple[Event, Copies]] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return all(event.is_past() for event, _ in self.copying)


class PinnedPool:
    """Blocks of pinned memory. A block is taken again only when no copy from it or to it can still run. Safe for use
    from several threads."""

    def __init__(self, port: DevicePort, kept: int = KEPT) -> None:
        self._port = port
        self._kept = kept
        self._free: list[Block] = []  # the smallest first
        self._used: list[tuple[Event, Block]] = []  # blocks live as long as copies may run, whoever lets go of them
        self._lock = threading.Lock()

    def note(self, block: Block, event: Event) -> None:
        """Note copies from a block or to it, which are done at an event."""
        with self._lock:
            self._used = [(other, held) for other, held in self._used if not other.is_past()]
            self._used.append((event, block))

    def drain(self) -> None:
        """Wait for all copies."""
        with self._lock:
            used, self._used = self._used, []
        for event, _ in used:
            event.synchronize()

    def take(self, size: int) -> Block:
        """Return a block of at least `size` bytes. Raises what the device does if there is no memory."""
        with self._lock:
            fit = next((block for block in self._free if len(block.memory) >= size and block.is_idle), None)
            if fit is not None:
                self._free.remove(fit)
                fit.copying.clear()
                return fit
        tensor = self._port.pinned(max(_LEAST, 1 << (size - 1).bit_length()))
        return Block(tensor, tensor.numpy())

    def give(self, block: Block, copying: Copying) -> None:
        """Take a block back. It is let go only when its copies are done."""
        block.copying = list(copying)
        with self._lock:
            self._free.append(block)
            self._free.sort(key=lambda block: len(block.memory))
            idle = [block for block in self._free if block.is_idle]
            while idle and sum(len(block.memory) for block in self._free) > self._kept:
                self._free.remove(idle.pop(0))
