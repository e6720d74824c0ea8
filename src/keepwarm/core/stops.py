"""Strings that end an answer, looked for in a text that grows: in time linear in both, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence


class StopString:
    """One of them, by the algorithm of Knuth, Morris and Pratt."""

    def __init__(self, text: str) -> None:
        """`text` must not be empty."""
        self.text = text
        self.held = 0  # characters at the end of what was read that may begin it
        self._borders = [0]  # of each beginning, the longest that is also its end; as far as they were needed

    def read(self, piece: str) -> int:
        """Read on. Characters of `piece` up to the end of the first occurrence; -1 while there is none."""
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
        """`char` is `text[held]`: learn the border of the beginning that ends with it."""
        if self.held < len(self._borders):
            return
        border = self._borders[self.held - 1]
        while border and self.text[border] != char:
            border = self._borders[border - 1]
        self._borders.append(border + (self.text[border] == char))


class StopStrings:
    """All of an answer's."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._each = [StopString(text) for text in dict.fromkeys(texts) if text]

    def read(self, piece: str) -> int | None:
        """Read on. Where, counted from the beginning of `piece`, the first of them begins (below 0: in what was read
        before); None while there is none."""
        ends = [(stop.read(piece), len(stop.text)) for stop in self._each]
        return min((end - size for end, size in ends if end >= 0), default=None)

    @property
    def held(self) -> int:
        """Characters at the end of what was read that may begin one."""
        return max((stop.held for stop in self._each), default=0)
