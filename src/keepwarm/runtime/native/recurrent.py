"""Tells the kernels where the states of sequences are, and which states along a step are to be kept (`recurrent.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.runtime.native.places import Recurrent, Sequenced

_RUN = np.dtype([("row", "<i4"), ("rows", "<i4"), ("keep", "<i4"), ("keeps", "<i4"), ("state", "<i8")])
_KEEP = np.dtype([("row", "<i8"), ("state", "<i8")])


class Runs:
    """The rows of a step, sequence by sequence, with their states. It holds what the kernels read."""

    def __init__(
        self, starts: Sequence[int], ends: Sequence[int], sequences: Sequence[Sequenced], sizes: Sequence[int]
    ):
        """Sequence i runs positions `[starts[i], ends[i])`. `sizes` are the numbers in each layer's state. Raises
        RuntimeError for a sequence without states of these sizes."""
        self._held: list[npt.NDArray[np.int64]] = []
        runs: list[tuple[int, ...]] = []
        keeps: list[tuple[int, ...]] = []
        row = 0
        for start, end, sequence in zip(starts, ends, sequences, strict=True):
            state = _checked(sequence.state, sizes)
            kept = sorted(at for at in state.kept if start < at < end)
            runs.append((row, end - start, len(keeps), len(kept), self._addresses(state.layers)))
            keeps += [(row + at - start - 1, self._addresses(state.kept[at])) for at in kept]
            row += end - start
        self.runs: npt.NDArray[Any] = np.array(runs, _RUN)
        self.keeps: npt.NDArray[Any] = np.array(keeps, _KEEP)

    def _addresses(self, layers: Sequence[torch.Tensor]) -> int:
        self._held.append(np.array([layer.data_ptr() for layer in layers], np.int64))
        return int(self._held[-1].ctypes.data)


def _checked(state: Recurrent | None, sizes: Sequence[int]) -> Recurrent:
    for layers in () if state is None else (state.layers, *state.kept.values()):
        if [layer.numel() for layer in layers] != [*sizes] or not all(map(_is_plain, layers)):
            raise RuntimeError("a sequence's states are not those of this model's layers")
    if state is None:
        raise RuntimeError("a sequence without states, and a model whose layers have some")
    return state


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu"
