"""Proves for a loaded model that a row's bits depend on the tokens at and before it, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.lora import Lora
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.form import PLAIN, CacheForm
from keepwarm.runtime.device import DevicePort
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.native.places import PAGE, UNIT
from keepwarm.runtime.stepping import Decoder

_ROWS = 43  # this is no multiple of any tile's rows
_SPLITS = ((1, 2, 3), (9, 33), (16, 17, 40))  # the last three of the rows are always decoded one by one
_FARTHEST = 256  # positions; the longest step passes the end of windows up to this length
_SCREENED = 4  # as in screen.h: of so many rows the largest logits may be computed alone
_BEHIND = 9  # so many of its rows follow the end of the longest such window, or of the first unit


def variance(
    lean: Decoder,
    geometry: KVGeometry,
    vocabulary: int,
    lora: Lora | None = None,
    form: CacheForm = PLAIN,
    port: DevicePort | None = None,
    least: int = 0,
) -> str:
    """Return what changes a row's logits, keys, values or the state behind it although it must not; empty if nothing
    that was tried does. All rows have the adapter `lora`. `form` says which layers have a state. `port` is a
    port to the device that computes; None: the host. At least so many rows are run, the last ones one by one.

    One step runs all rows, past a unit of positions and past the end of short windows. It is compared with steps that
    end elsewhere, with tokens one by one, with other numbers of threads if threads compute, and with another sequence
    in the same step; on a device also with its pages apart. Where the largest logits may be computed alone, they must
    be those among all.
    """
    windows = [layer.window for layer in geometry.layers if layer.window and layer.window <= _FARTHEST]
    count = max([UNIT, *windows]) + _BEHIND
    farther = [least - 2, least - 1] if count < least else []
    count = max(count, least)
    tokens = token_ids([i * 7919 % vocabulary for i in range(count)])
    numbers = sorted({1, 2, torch.get_num_threads()}) if lean.is_threaded else [1]
    every = [(number, split) for number in numbers for split in _SPLITS]
    compared = frozenset(end for split in _SPLITS for end in _ends(split))  # a state may take many megabytes
    made = _Sequences(lean, geometry, replace(form, kernel_states=lean.states), lora, port or HostPort())
    try:
        logits, kept = made.run(tokens, [count], compared)
        for number, split in every:
            lean.threads = number
            ends = [*_ends(split), *([*farther, count] if (number, split) == every[-1] else [])]
            again, there = made.run(tokens[: ends[-1]], ends)
            if not torch.equal(logits[: ends[-1]], again) or not _begins_with(kept, there):
                return f"steps that end at {split}, with {number} threads"
        for number in numbers if lean.screens else ():
            lean.threads = number
            if not made.finds_largest(tokens, logits):
                return f"the largest logits alone, with {number} threads"
        if not torch.equal(logits[:_ROWS], made.together(tokens[:_ROWS])):
            return "another sequence in the same step"
        if least and not torch.equal(logits, made.apart(tokens)):
            return "pages that lie apart"
    finally:
        lean.threads = None
    return ""


def _ends(split: tuple[int, ...]) -> list[int]:
    return [*split, *range(_ROWS - 3, _ROWS + 1)]


@dataclass(frozen=True)
class _Kept:
    """Keys and values of every layer, and the states behind some tokens, by position."""

    planes: list[torch.Tensor]
    states: dict[int, tuple[torch.Tensor, ...]]


def _begins_with(whole: _Kept, part: _Kept) -> bool:
    planes = all(torch.equal(a[:, :, : b.shape[2]], b) for a, b in zip(whole.planes, part.planes, strict=True))
    both = whole.states.keys() & part.states.keys()
    return planes and all(all(map(torch.equal, whole.states[at], part.states[at])) for at in both)


@dataclass(frozen=True)
class _Sequences:
    """Runs sequences in arenas of their own."""

    lean: Decoder
    geometry: KVGeometry
    form: CacheForm
    lora: Lora | None
    port: DevicePort

    def run(
        self, tokens: TokenIds, ends: Sequence[int], inside: frozenset[int] = frozenset()
    ) -> tuple[torch.Tensor, _Kept]:
        """Return the logits of every row, and what is kept of the sequence, with the states at the ends of steps and at
        positions `inside` them."""
        arena = self._arena(len(tokens))
        states: dict[int, tuple[torch.Tensor, ...]] = {}
        arena.states.wanted = inside
        rows = []
        for start, end in pairwise([0, *ends]):
            sequence = arena.sequenced(end)
            rows.append(self.lean.step([tokens[start:end]], [start], [sequence], range(end - start), arena.arriving))
            if sequence.state is not None:
                states |= dict(sequence.state.kept) | {end: tuple(layer.clone() for layer in sequence.state.layers)}
            arena.advance(end)
        return torch.cat(rows), _Kept([tensor.clone() for tensor in _planes(arena)], states)

    def together(self, tokens: TokenIds) -> torch.Tensor:
        """Return the logits of every row, with another sequence in the same step."""
        other = tokens[::-1].copy()
        arenas = [self._arena(len(tokens)) for _ in range(2)]  # they keep the memory that the step uses
        for arena in arenas:
            arena.in_turn()
        places = [arena.sequenced() for arena in arenas]
        return self.lean.step([other, tokens], [0, 0], places, range(len(tokens), 2 * len(tokens)))

    def apart(self, tokens: TokenIds) -> torch.Tensor:
        """Return the logits of every row, with no page of the sequence behind the one before it."""
        arena = self._arena(-(-len(tokens) // PAGE) * PAGE)
        arena.in_turn()
        place = arena.sequenced()
        place = replace(place, pages=place.pages[::-1].copy())
        return self.lean.step([tokens], [0], [place], range(len(tokens)))

    def finds_largest(self, tokens: TokenIds, logits: torch.Tensor) -> bool:
        """Whether the first rows' largest logits, when they are computed alone, are those among all `logits`."""
        lean = self.lean.apart()  # the model's own one learns from real requests alone where this pays
        for count in range(1, _SCREENED + 1):
            arena = self._arena(count)
            arena.in_turn()
            found = lean.step([tokens[:count]], [0], [arena.sequenced()], range(count), largest=True)
            every, there = logits[:count], found != -torch.inf
            if not torch.equal(found.argmax(1), every.argmax(1)) or not torch.equal(found[there], every[there]):
                return False
        return True

    def _arena(self, length: int) -> Arena:
        arena = Arena(self.geometry, length, self.port, form=self.form)
        arena.lora = self.lora
        return arena


def _planes(arena: Arena) -> Iterator[torch.Tensor]:
    for layer in arena.layers:
        assert layer.keys is not None
        assert layer.values is not None
        yield layer.keys
        yield layer.values
