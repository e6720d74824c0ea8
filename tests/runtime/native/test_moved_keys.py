"""Chunks are put in place by a compiled kernel: the same as torch and the reference say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keepwarm.core.rope import Rotary
from keepwarm.runtime.blend import rope

HEADS, ROWS, DIM, CAPACITY = 3, 37, 32, 100
FULL = Rotary(DIM, tuple((10_000.0 ** (-np.arange(0, DIM, 2) / DIM)).tolist()))


def plane(memory: torch.Tensor) -> Any:
    """One layer's keys in the host's memory, as an arena has them."""
    stride = memory.stride(0) * memory.itemsize
    return SimpleNamespace(array=memory, address=memory.data_ptr(), head_stride=stride)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary", [FULL, Rotary(DIM, FULL.frequencies[:5], attention_factor=1.3)])
def test_rows_are_moved_and_keys_turned(dtype: torch.dtype, rotary: Rotary) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(HEADS, ROWS + 5, DIM, generator=generator).to(dtype)
    raw = stored.view(torch.uint8).numpy()[:, 5:]  # as a run's view: heads further apart than their rows take
    turn = rope.Turn(rotary, 41, torch.device("cpu"))
    arena = torch.zeros(2, HEADS, CAPACITY, DIM, dtype=dtype)
    assert rope._moved([(raw, plane(arena[0]), 20, turn), (raw, plane(arena[1]), 7, None)], dtype)
    by_torch = turn(stored[:, 5:])
    reference = torch.from_numpy(rotary.rerotate(stored[:, 5:].float().numpy(), 41))
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(arena[0, :, 20 : 20 + ROWS], by_torch, **tolerance)
    torch.testing.assert_close(arena[0, :, 20 : 20 + ROWS].float(), reference, **tolerance)
    assert torch.equal(arena[1, :, 7 : 7 + ROWS], stored[:, 5:])
    arena[0, :, 20 : 20 + ROWS] = 0
    arena[1, :, 7 : 7 + ROWS] = 0
    assert not arena.any(), "nothing else is written"


def test_interleaved_keys_are_left_to_torch() -> None:
    turn = rope.Turn(Rotary(DIM, FULL.frequencies, interleaved=True), 3, torch.device("cpu"))
    raw = np.zeros((HEADS, ROWS, DIM * 4), np.uint8)
    assert not rope._moved([(raw, plane(torch.zeros(HEADS, ROWS, DIM)), 0, turn)], torch.float32)
