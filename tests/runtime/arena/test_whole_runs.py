"""Runs in RAM whose layers are alike are given to an arena at once, all others layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import Bytes
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device import port_to
from keepwarm.store.runfile.giving import give
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, prompt

EVEN = KVGeometry.uniform(3, 2, 8, "float32")
KEYS_WIDER = replace(EVEN, layers=tuple(replace(layer, value_dim=4) for layer in EVEN.layers))
WINDOWED = replace(EVEN, layers=tuple(replace(layer, window=20) for layer in EVEN.layers))
START, END = 32, 75  # in blocks of 16 tokens: from the beginning of one into another one


class ByLayer:
    """An arena that takes runs only layer by layer."""

    def __init__(self, arena: Arena) -> None:
        self.geometry, self._arena = arena.geometry, arena

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self._arena.fill(layer, kv, start, data)

    def commit(self, layer: int, start: int, end: int) -> None:
        self._arena.commit(layer, start, end)


def given(geometry: KVGeometry, *, by_layer: bool) -> tuple[Arena, MemoryKV]:
    """An arena with the positions `[START, END)` of a run that begins before them."""
    kv = MemoryKV.random(geometry, 96)
    run = make_run(kv, blocks_of(prompt(96), 16)[1:])
    arena = Arena(geometry, 128, port_to(torch.device("cpu")))
    arena.seek(START)
    sink: Any = ByLayer(arena) if by_layer else arena
    give(run, [block for block in run.blocks if START <= block.start < END], END, sink)
    arena.seek(END)
    return arena, kv


@pytest.mark.parametrize("geometry", [EVEN, KEYS_WIDER, UNEVEN], ids=["even", "keys_wider", "uneven"])
@pytest.mark.parametrize("cut", [END, END - 9])
def test_every_byte_arrives(geometry: KVGeometry, cut: int) -> None:
    arena, kv = given(geometry, by_layer=False)
    assert arena.is_late  # nothing is copied before it is needed
    arena.seek(cut)
    arena.bring(cut - 3)
    for layer in range(len(geometry.layers)):
        for number in (0, 1):
            last = arena.read(layer, number, cut - 3, cut)
            assert np.array_equal(last, kv.read(layer, number, cut - 3, cut))
    arena.materialize()
    for layer in range(len(geometry.layers)):
        for number in (0, 1):
            assert np.array_equal(arena.read(layer, number, START, cut), kv.read(layer, number, START, cut))


@pytest.mark.host_memory("kernels of a device read the arena alone")
def test_attention_reads_the_run_where_it_lies() -> None:
    """Each arena's pages are compared with its run's own addresses, which differ between two runs."""
    together, apart = (given(EVEN, by_layer=by_layer)[0].sequenced() for by_layer in (False, True))
    assert np.array_equal(together.pages, apart.pages)
    assert np.array_equal(together.moves, apart.moves)
    (own, there), (_, other) = together.regions, apart.regions
    assert there.base != own.base
    distances = [(region.value, region.layer, region.heads) for region in (there, other)]
    assert distances[0] == distances[1]


def test_windowed_layers_are_filled_one_by_one() -> None:
    arena = Arena(WINDOWED, 128, port_to(torch.device("cpu")))
    assert not arena.fill_all(0, np.zeros((3, 2, 2, 16, 32), np.uint8))
    assert not arena.is_late
