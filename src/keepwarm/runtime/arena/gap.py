"""What an arena lacks: positions of windowed layers to which no further step attends."""

from __future__ import annotations

from dataclasses import dataclass

from keepwarm.core.geometry import KVGeometry


@dataclass(frozen=True)
class Gap:
    """Positions `[start, end)` that some layers lack. Steps may continue up to `start`, or from `whole` on: only there
    do all layers have what they attend to. The arena's content that is stored lies outside of these positions."""

    start: int = 0
    end: int = 0
    whole: int = 0

    def serves(self, length: int) -> bool:
        """Whether steps can continue at a position."""
        return length <= self.start or length >= self.whole

    def touches(self, start: int, end: int) -> bool:
        """Return whether some of the positions `[start, end)` are missing."""
        return start < self.end and self.start < end

    def cut(self, length: int) -> Gap:
        """Return the gap when only `length` positions stay valid and later ones will be written again."""
        return self if length > self.start else NO_GAP

    def grown(self, start: int, end: int, geometry: KVGeometry) -> Gap:
        """Return the gap when positions from `start` on are loaded next, for steps that continue at `end`. The stored
        KV may be only what those steps attend to."""
        windows = [layer.window for layer in geometry.layers if layer.window is not None]
        first = first_attended(min(windows), end) if windows else 0
        return Gap(self.start if self.end else start, first, end) if first > start else self


NO_GAP = Gap()


def first_attended(window: int | None, end: int) -> int:
    """Return the first position to which a layer attends from `end` on."""
    return 0 if window is None else max(0, end - window + 1)
