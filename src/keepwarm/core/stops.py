"""Search for strings that end an answer, in a growing text, in time linear in both."""

from __future__ import annotations

from collections.abc import Sequence


class StopString:
    """One stop string, found by the algorithm of Knuth, Morris and Pratt."""

    def __init__(self, text: str) -> None:
        """`text` must not be empty."""
        self.text = text
        self.held = 0  # last characters read that may be its beginning
        self._borders = [0]  # for each beginning, the length of the longest one that is also its end; filled on demand

    def read(self, piece: str) -> int:
        """Read on. Return the characters of `piece` up to the end of the first occurrence; -1 while there is none."""
        at = 0
        while at < len(piece):
            if not self.held:
                at = piece.find(self.text[0], at)
                if at < 0:
                    return -1
            char = piece[at]
            at += 1
            while self.held and self.text[self.held] != char:
                self.held = self._borders[self.held - 1]
            if self.text[self.held] == char:
                self._note_border(char)
                self.held += 1
                if self.held == len(self.text):
                    return at
        return -1

    def _note_border(self, char: str) -> None:
        """Compute the border of the beginning that ends with `char`, which is `text[held]`."""
        if self.held < len(self._borders):
            return
        border = self._borders[self.held - 1]
        while border and self.text[border] != char:
            border = self._borders[border - 1]
        self._borders.append(border + (self.text[border] == char))


class StopStrings:
    """All stop strings of an answer."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._each = [StopString(text) for text in dict.fromkeys(texts) if text]

    def read(self, piece: str) -> int | None:
        """Read on. Return where the first stop string begins, counted from the beginning of `piece` (below 0: in an
        earlier piece); None while there is none."""
        ends = [(stop.read(piece), len(stop.text)) for stop in self._each]
        return min((end - size for end, size in ends if end >= 0), default=None)

    @property
    def held(self) -> int:
        """Number of last characters read that may be the beginning of one."""
        return max((stop.held for stop in self._each), default=0)
