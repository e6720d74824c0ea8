"""Proves for a loaded model that a row's bits depend on the tokens at and before it, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.lora import Lora
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.native.decoder import LeanDecoder
from keepwarm.runtime.native.places import UNIT

_ROWS = 43  # this is no multiple of any tile's rows
_SPLITS = ((1, 2, 3), (9, 33), (16, 17, 40))  # the last three of the rows are always decoded one by one
_FARTHEST = 256  # positions; the longest step passes the end of windows up to this length
_BEHIND = 9  # so many of its rows follow the end of the longest such window, or of the first unit
_HOST = HostPort()


def variance(lean: LeanDecoder, geometry: KVGeometry, vocabulary: int, lora: Lora | None = None) -> str:
    """Return what changes a row's logits, keys or values although it must not; empty if nothing that was tried does.
    All rows have the adapter `lora`.

    One step runs all rows, past a unit of positions and past the end of short windows. It is compared with steps that
    end elsewhere, with tokens one by one, with other numbers of threads, and with another sequence in the same step.
    """
    windows = [layer.window for layer in geometry.layers if layer.window and layer.window <= _FARTHEST]
    count = max([UNIT, *windows]) + _BEHIND
    tokens = token_ids([i * 7919 % vocabulary for i in range(count)])
    threads = torch.get_num_threads()
    every = [(number, split) for number in sorted({1, 2, threads}) for split in _SPLITS]
    try:
        logits, kept = _run(lean, geometry, tokens, [count], lora)
        for number, split in every:
            lean.threads = number
            ends = [*split, *range(_ROWS - 3, _ROWS + 1), *([count] if (number, split) == every[-1] else [])]
            again, there = _run(lean, geometry, tokens[: ends[-1]], ends, lora)
            if not torch.equal(logits[: ends[-1]], again) or not all(map(_begins_with, kept, there)):
                return f"steps that end at {split}, with {number} threads"
        if not torch.equal(logits[:_ROWS], _together(lean, geometry, tokens[:_ROWS], lora)):
            return "another sequence in the same step"
    finally:
        lean.threads = None
    return ""


def _begins_with(whole: torch.Tensor, part: torch.Tensor) -> bool:
    return torch.equal(whole[:, :, : part.shape[2]], part)


def _run(
    lean: LeanDecoder, geometry: KVGeometry, tokens: TokenIds, ends: Sequence[int], lora: Lora | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of every row, and the keys and values of every layer."""
    arena = Arena(geometry, len(tokens), _HOST)
    arena.lora = lora
    rows = [lean.step([tokens[a:b]], [a], [arena.sequenced()], range(b - a)) for a, b in pairwise([0, *ends])]
    return torch.cat(rows), [tensor.clone() for tensor in _planes(arena)]


def _planes(arena: Arena) -> Iterator[torch.Tensor]:
    for layer in arena.layers:
        assert layer.keys is not None
        assert layer.values is not None
        yield layer.keys
        yield layer.values


def _together(lean: LeanDecoder, geometry: KVGeometry, tokens: TokenIds, lora: Lora | None) -> torch.Tensor:
    arenas = [Arena(geometry, len(tokens), _HOST) for _ in range(2)]
    for arena in arenas:
        arena.lora = lora
    other = tokens[::-1].copy()
    places = [arena.sequenced() for arena in arenas]
    return lean.step([other, tokens], [0, 0], places, range(len(tokens), 2 * len(tokens)))
