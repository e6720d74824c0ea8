"""What an arena was not given: positions of windowed layers to which nothing attends any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import BlockRef


@dataclass(frozen=True)
class Gap:
    """Positions `[start, end)` that some layers lack. Steps go on at `start` or before it, or at `whole` or behind it:
    only there do all layers have what they attend to. What is stored of the arena lies outside of the positions."""

    start: int = 0
    end: int = 0
    whole: int = 0

    def serves(self, length: int) -> bool:
        """Whether steps can go on at a position."""
        return length <= self.start or length >= self.whole

    def cut(self, length: int) -> Gap:
        """The same once only so many positions are valid, and those behind will be written anew."""
        return self if length > self.start else NO_GAP

    def and_not(self, blocks: Sequence[BlockRef], geometry: KVGeometry, end: int) -> Gap:
        """The same, when more blocks are loaded for steps that go on at `end`."""
        start, last, whole = blocks[0].start if blocks else 0, self.end, self.whole
        for window in {layer.window for layer in geometry.layers} - {None}:
            skipped = [ref.end for ref in blocks if ref.end <= first_attended(window, end)]
            if skipped and window is not None:
                last, whole = max(last, skipped[-1]), max(whole, skipped[-1] + window - 1)
        return Gap(self.start if self.end else start, last, whole)


NO_GAP = Gap()


def first_attended(window: int | None, end: int) -> int:
    """The first position to which a layer attends from `end` on."""
    return 0 if window is None else max(0, end - window + 1)
