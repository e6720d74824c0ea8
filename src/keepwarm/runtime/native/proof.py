"""Proves for a loaded model that a row's bits depend on the tokens at and before it, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.native.decoder import LeanDecoder
from keepwarm.runtime.native.places import UNIT

_ROWS = 43  # no multiple of any tile
_SPLITS = ((), (1, 2, 3), (9, 33), (16, 17, 40))  # besides the last three, which are always decoded one by one
_FARTHEST = 256  # positions: the longest window whose end the longer steps pass
_BEHIND = 9  # positions behind the end of that window, or of the first unit
_HOST = HostPort()


def variance(lean: LeanDecoder, geometry: KVGeometry, vocabulary: int) -> str:
    """What changes a row's logits, keys or values that must not; empty when nothing tried does.

    Tried: steps that end elsewhere, tokens one by one, another number of threads, another sequence in the same step;
    and so many rows at once that they reach past a unit of positions and past a near window.
    """
    tokens = _tokens(_ROWS, vocabulary)
    threads = torch.get_num_threads()
    try:
        logits, kept = _run(lean, geometry, tokens, _SPLITS[0])
        for count in sorted({1, 2, threads}):
            lean.threads = count
            for split in _SPLITS[1:]:
                again, there = _run(lean, geometry, tokens, split)
                if not torch.equal(logits, again) or not all(map(torch.equal, kept, there)):
                    return f"steps that end at {split}, with {count} threads"
        if not torch.equal(logits, _together(lean, geometry, tokens)):
            return "another sequence in the same step"
        if longer := _longer(lean, geometry, vocabulary):
            return longer
    finally:
        lean.threads = None
    return ""


def _tokens(count: int, vocabulary: int) -> TokenIds:
    return token_ids([i * 7919 % vocabulary for i in range(count)])


def _longer(lean: LeanDecoder, geometry: KVGeometry, vocabulary: int) -> str:
    """Compare one long step with two short ones, of which the second goes on past a unit and a window."""
    windows = [layer.window for layer in geometry.layers if layer.window and layer.window <= _FARTHEST]
    tokens = _tokens(max([UNIT, *windows]) + _BEHIND, vocabulary)
    logits, kept = _run(lean, geometry, tokens, ())
    again, there = _run(lean, geometry, tokens, (_ROWS,))
    same = torch.equal(logits, again) and all(map(torch.equal, kept, there))
    return "" if same else f"a step of {len(tokens)} rows in two"


def _run(
    lean: LeanDecoder, geometry: KVGeometry, tokens: TokenIds, split: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of every row, and the keys and values of every layer."""
    arena = Arena(geometry, len(tokens), _HOST)
    ends = [0, *split, *range(len(tokens) - 3, len(tokens) + 1)]
    rows = [lean.step([tokens[a:b]], [a], [arena.sequenced()], range(b - a)) for a, b in pairwise(ends)]
    return torch.cat(rows), [tensor.clone() for tensor in _planes(arena)]


def _planes(arena: Arena) -> Iterator[torch.Tensor]:
    for layer in arena.layers:
        assert layer.keys is not None
        assert layer.values is not None
        yield layer.keys
        yield layer.values


def _together(lean: LeanDecoder, geometry: KVGeometry, tokens: TokenIds) -> torch.Tensor:
    arenas = [Arena(geometry, len(tokens), _HOST) for _ in range(2)]
    other = tokens[::-1].copy()
    places = [arena.sequenced() for arena in arenas]
    return lean.step([other, tokens], [0, 0], places, range(len(tokens), 2 * len(tokens)))
