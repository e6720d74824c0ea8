"""What an arena was not given: positions of windowed layers to which nothing attends any more."""

from __future__ import annotations

from dataclasses import dataclass

from keepwarm.core.geometry import KVGeometry


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

    def touches(self, start: int, end: int) -> bool:
        """Whether some of the positions `[start, end)` are lacking."""
        return start < self.end and self.start < end

    def cut(self, length: int) -> Gap:
        """The same once only so many positions are valid, and those behind will be written anew."""
        return self if length > self.start else NO_GAP

    def grown(self, start: int, end: int, geometry: KVGeometry) -> Gap:
        """The same when positions from `start` on are loaded next, for steps that go on at `end`. What is stored may be
        no more than those attend to."""
        windows = [layer.window for layer in geometry.layers if layer.window is not None]
        first = first_attended(min(windows), end) if windows else 0
        return Gap(self.start if self.end else start, first, end) if first > start else self


NO_GAP = Gap()


def first_attended(window: int | None, end: int) -> int:
    """The first position to which a layer attends from `end` on."""
    return 0 if window is None else max(0, end - window + 1)
