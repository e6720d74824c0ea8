"""Which tile a product takes, and that all of them give the same bits where they are used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keepwarm.runtime.gpu_kernels import tile_check, tiles
from keepwarm.runtime.gpu_kernels.launch import Launch
from keepwarm.runtime.gpu_kernels.tile_check import checked
from keepwarm.runtime.gpu_kernels.tiles import Tile, Tiles

CPU = torch.device("cpu")
H100 = Tiles(Tile(64, 32, 64), 64, tiles._FASTEST, busy=237)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_check, "_SHAPE", (36, 272, 208))
    monkeypatch.setattr(tile_check, "_COMPILED", 1)  # the interpreter serves one thread


@pytest.mark.parametrize(
    ("rows", "columns", "weights", "size"),
    [
        (1, 1024, 1, (16, 16, 512)),
        (1, 4096, 1, (16, 32, 256)),
        (1, 151_936, 1, (16, 32, 256)),
        (1, 12_288, 2, (16, 32, 128)),
        (32, 4096, 1, (64, 32, 128)),
        (32, 151_936, 1, (64, 64, 128)),
        (256, 4096, 1, (64, 64, 128)),
        (256, 12_288, 1, (64, 128, 64)),
        (2048, 1024, 1, (64, 128, 64)),
        (2048, 4096, 1, (128, 256, 64)),
        (2048, 12_288, 2, (128, 128, 64)),
    ],
)
def test_the_fastest_tile_is_taken(rows: int, columns: int, weights: int, size: tuple[int, int, int]) -> None:
    found = H100.of_rows(rows, columns, weights)
    assert (found.rows, found.columns, found.depth) == size


def test_tiles_have_as_many_stages_as_fit() -> None:
    large = Tile(128, 256, 64)
    assert large.within(227 << 10, 1, 2) == large
    assert large.within(99 << 10, 1, 2) == replace(large, stages=2)
    assert large.within(64 << 10, 1, 2) is None


def launch(*sizes: Tile) -> Launch:
    base = Tiles.of(torch.float32, 1).base
    every = (*sizes, *[base] * (5 - len(sizes)))
    return Launch(torch.float32, False, Tiles(base, 16, (every, every)))


@pytest.mark.parametrize("gated", [True, False])
def test_tiles_with_the_same_bits_are_kept(gated: bool) -> None:
    made = launch(replace(launch().tiles.base, rows=32))
    assert checked(made, "silu", CPU, gated=gated) == made


def test_a_bit_that_differs_ends_all_choice(caplog: pytest.LogCaptureFixture) -> None:
    made = launch(replace(launch().tiles.base, depth=32))
    found = checked(made, "silu", CPU)
    assert found.tiles == replace(made.tiles, sizes=None)
    assert found.tiles.of_rows(500, 64) == found.tiles.of_rows(1, 64)
    assert "other bits" in caplog.text


def test_a_tile_that_does_not_run_makes_way_for_the_base() -> None:
    made = launch(replace(launch().tiles.base, rows=48))  # Triton takes powers of two alone
    found = checked(made, "silu", CPU)
    assert found.tiles.sizes == launch().tiles.sizes
