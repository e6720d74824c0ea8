"""Brings a step's numbers to a device, in one copy for which the host does not wait."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_PADDING = np.zeros(1, np.int64)  # every array begins at 16 bytes, so that kernels are compiled once


class Upload:
    """Collects arrays of int64, then copies them together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[npt.NDArray[np.int64]] = []
        self._length = 0

    def add(self, array: npt.ArrayLike) -> slice:
        """Add an array. Its numbers will be at this place."""
        flat = np.ascontiguousarray(array, dtype=np.int64).ravel()
        begin = self._length
        self._arrays += [flat, _PADDING[: len(flat) % 2]]
        self._length += len(flat) + len(flat) % 2
        return slice(begin, begin + len(flat))

    def sent(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return all numbers on the device: in new memory, or in place of those in `into`, which are as many. torch
        reuses the pinned memory between only once the copy is done."""
        is_host = self._device.type == "cpu"
        held = torch.empty(self._length, dtype=torch.int64, pin_memory=not is_host)
        np.concatenate(self._arrays, out=held.numpy())
        if into is not None:
            return into.copy_(held, non_blocking=True)
        return held if is_host else held.to(self._device, non_blocking=True)
