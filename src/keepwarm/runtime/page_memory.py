"""The bytes of all pages, on the host or on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.core.ports import Bytes
from keepwarm.runtime.device import DevicePort
from keepwarm.runtime.device.plane import Turns
from keepwarm.runtime.native.places import Region


class PageMemory:
    """Rows of every layer's keys and values, `[heads, rows, row_bytes]` of each in turn, allocated once and zeroed.
    They are written by kernels, at their addresses."""

    def __init__(self, port: DevicePort, shapes: Sequence[tuple[int, int]], rows: int) -> None:
        """`shapes` are the heads and bytes of a row of keys and values of each layer in turn."""
        self._port = port
        sizes = [heads * rows * width for heads, width in shapes]
        self._memory = port.allocate(sum(sizes))
        self._turns = Turns(port, self._memory)
        self._turns.take()
        self._memory.tensor.zero_()  # touched now, not within a request's time
        parts = self._memory.tensor[: sum(sizes)].split(sizes)
        self._planes = [part.view(heads, rows, width) for part, (heads, width) in zip(parts, shapes, strict=True)]
        places = [(plane.data_ptr(), plane.stride(0)) for plane in self._planes]
        self.region = Region.of(places, set(shapes))
        self._arrays: list[Bytes] | None = [plane.numpy() for plane in self._planes] if port.is_host else None

    @property
    def is_host(self) -> bool:
        return self._arrays is not None

    def take_turn(self) -> None:
        """Order the calling thread's next computations after all that used the memory so far."""
        self._turns.take()

    def read(self, plane: int, rows: npt.NDArray[np.int64]) -> Bytes:
        """Return a copy of some rows of a plane, `[heads, rows, row_bytes]`, from any thread. They must not change
        meanwhile."""
        if self._arrays is not None:
            taken: Bytes = self._arrays[plane].take(rows, axis=1)
            return taken
        outbound = self._port.outbound
        self._turns.follow(outbound)
        self._memory.used_by(outbound)
        parts = []
        for first, count in _runs(rows):
            source = self._planes[plane][:, first : first + count]
            parts.append(self._port.pinned(source.numel()).view(source.shape))
            self._port.copy_out(source, parts[-1], outbound)
        outbound.record().synchronize()
        copied: Bytes = torch.cat(parts, dim=1).numpy()
        return copied


def _runs(rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the first row and the length of each run of consecutive rows."""
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        yield int(run[0]), len(run)
