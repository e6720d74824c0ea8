"""The bytes of all pages, on the host or on a device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.core.ports import Bytes
from keepwarm.runtime.device import DevicePort
from keepwarm.runtime.device.plane import Turns


class PageMemory:
    """Rows of every layer's keys and values, `[planes, heads, rows, row_bytes]`, allocated once and zeroed. They are
    written by kernels, at their address."""

    def __init__(self, port: DevicePort, planes: int, heads: int, rows: int, row_bytes: int) -> None:
        self._port = port
        self._memory = port.allocate(planes * heads * rows * row_bytes)
        self._bytes = self._memory.tensor.view(planes, heads, rows, row_bytes)
        self._turns = Turns(port, self._memory)
        self._turns.take()
        self._bytes.zero_()  # touched now, not within a request's time
        self.address = self._bytes.data_ptr()
        self._array: Bytes | None = self._bytes.numpy() if port.is_host else None

    @property
    def is_host(self) -> bool:
        return self._array is not None

    def take_turn(self) -> None:
        """Order the calling thread's next computations after all that used the memory so far."""
        self._turns.take()

    def read(self, plane: int, rows: npt.NDArray[np.int64]) -> Bytes:
        """Return a copy of some rows of a plane, `[heads, rows, row_bytes]`, from any thread. They must not change
        meanwhile."""
        if self._array is not None:
            taken: Bytes = self._array[plane].take(rows, axis=1)
            return taken
        outbound = self._port.outbound
        self._turns.follow(outbound)
        self._memory.used_by(outbound)
        parts = []
        for first, count in _runs(rows):
            source = self._bytes[plane, :, first : first + count]
            parts.append(self._port.pinned(source.numel()).view(source.shape))
            self._port.copy_out(source, parts[-1], outbound)
        outbound.record().synchronize()
        copied: Bytes = torch.cat(parts, dim=1).numpy()
        return copied


def _runs(rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the first row and the length of each run of consecutive rows."""
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        yield int(run[0]), len(run)
