"""Rotary tables: a position has the same numbers however the tables grow, and what fails leaves them as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.helpers.models import tiny

from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.tables import RotaryTables

CPU = torch.device("cpu")
PIECE = 4096
Maker = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def turns(frequency: float) -> Maker:
    def make(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * torch.tensor([1.0, 0.5]) * frequency
        return angles.cos(), angles.sin()

    return make


def test_they_grow_by_pieces_to_the_same_numbers() -> None:
    (maker,) = described(tiny("llama")).tables
    dims = 2 * maker(torch.zeros(1, dtype=torch.long))[0].shape[1]
    slowly, at_once = (RotaryTables([maker], [dims], CPU) for _ in range(2))
    assert (slowly.reached, slowly.grow(PIECE)) == (PIECE, False)
    assert slowly.grow(PIECE + 1)
    assert slowly.grow(3 * PIECE)
    assert at_once.grow(4 * PIECE)
    assert slowly.reached == at_once.reached == 4 * PIECE
    assert all(map(torch.equal, slowly.pairs[0], at_once.pairs[0]))
    assert len(slowly.pairs[0][0]) == 4 * PIECE


def test_a_copy_grows_by_itself() -> None:
    tables = RotaryTables([turns(0.1)], [4], CPU)
    other = copy.copy(tables)
    other.grow(PIECE + 1)
    assert (tables.reached, len(tables.pairs[0][0])) == (PIECE, PIECE)


def test_memory_that_runs_out_half_way_leaves_them_as_they_were() -> None:
    full = False

    def maker(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if full and int(positions[0]):
            raise torch.OutOfMemoryError("no room")
        return turns(0.2)(positions)

    tables = RotaryTables([turns(0.1), maker], [4, 4], CPU)
    full = True
    with pytest.raises(torch.OutOfMemoryError):
        tables.grow(PIECE + 1)
    full = False
    tables.grow(PIECE + 1)
    for (cosine, sine), frequency in zip(tables.pairs, (0.1, 0.2), strict=True):
        exact = turns(frequency)(torch.arange(2 * PIECE))
        assert torch.equal(cosine, exact[0])
        assert torch.equal(sine, exact[1])


def test_another_precision_than_at_first_is_refused() -> None:
    """As after `torch.set_float32_matmul_precision("medium")` on processors with bfloat16 units."""
    narrow = False

    def maker(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return turns(0.1)(positions.to(torch.bfloat16).float() if narrow else positions)

    tables = RotaryTables([maker], [4], CPU)
    narrow = True
    with pytest.raises(RuntimeError, match="longer than 4096 tokens, and torch computes positions with another"):
        tables.grow(PIECE + 1)
    narrow = False
    assert tables.grow(PIECE + 1)
