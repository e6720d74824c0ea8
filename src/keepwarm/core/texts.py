"""Texts that were tokenized before: which of them has the same beginning as a new one, and how far they agree.

Characters are compared before anything is tokenized, since texts can be joined and tokens cannot.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import TokenIds

GRID = 256  # characters between two places at which a text's beginning is hashed
LEAST_SHARE = 0.8  # of a stored text that must agree before its ids are kept as generated

_Value = TypeVar("_Value")


class Outcome(StrEnum):
    """How a text relates to a stored one."""

    EXACT = "exact"  # the same: all tokens except the last can be reused
    EXTEND = "extend"  # it begins with the whole stored text
    DIVERGE = "diverge"  # it differs before the stored text's end
    NEW = "new"  # no stored text has its beginning


@dataclass(frozen=True)
class TextMatch:
    """Comparison of a new text with a stored one, by characters."""

    outcome: Outcome = Outcome.NEW
    stored: int = 0  # characters of the stored text
    matched: int = 0  # leading characters that agree
    kept: int = 0  # leading tokens whose ids were taken from it
    as_generated: bool = False  # these ids were really run; tokenizing the whole text may give others

    @classmethod
    def of(cls, stored: str, text: str, matched: int, kept: int = 0) -> TextMatch:
        if not matched:
            return cls(stored=len(stored), kept=kept)
        if matched < len(stored):
            return cls(Outcome.DIVERGE, len(stored), matched, kept)
        return cls(Outcome.EXACT if len(text) == matched else Outcome.EXTEND, len(stored), matched, kept)

    @property
    def share(self) -> float:
        """The share of the stored text that agrees."""
        return self.matched / self.stored if self.stored else 0.0


NO_MATCH = TextMatch()


@dataclass(frozen=True, eq=False)
class StoredText:
    """A text, the ids `[n]` as which it was run, and the characters `[n, 2]` that each id covers."""

    text: str
    ids: TokenIds
    offsets: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.offsets.shape != (len(self.ids), 2):
            raise ValueError(f"{len(self.ids)} ids need offsets [{len(self.ids)}, 2], got {list(self.offsets.shape)}")


class TextIndex(Generic[_Value]):
    """Finds, among many texts, one with a long common beginning; the time does not depend on their number.

    A rolling hash of the beginning is computed at each place of a fixed grid; the text that was used last owns it. A
    search walks along the new text until no text has its beginning. The common beginning of the found text is at most
    `GRID` characters shorter than the longest one. Callers compare the characters: equal hashes are only a hint. Beyond
    `capacity` characters the least recently used texts are evicted. Threads may share it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, _Value] = OrderedDict()  # the last one used is the last
        self._owners: dict[int, str] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._texts)

    def put(self, text: str, value: _Value) -> None:
        """Enter a text, or note its use."""
        with self._lock:
            if self._texts and next(reversed(self._texts)) == text:  # it owns its beginnings already
                self._texts[text] = value
                return
            if text not in self._texts:
                self._size += len(text)
            self._texts[text] = value
            self._texts.move_to_end(text)
            for beginning in _beginnings(text):
                self._owners[beginning] = text
            while self._size > self._capacity:
                self._drop(next(iter(self._texts)))

    def find(self, text: str) -> _Value | None:
        """Return the value of the text found; None when no text shares the first `GRID` characters."""
        with self._lock:
            owner = None
            for beginning in _beginnings(text):
                if beginning not in self._owners:
                    break
                owner = self._owners[beginning]
            return None if owner is None else self._texts[owner]

    def clear(self) -> None:
        with self._lock:
            self._texts.clear()
            self._owners.clear()
            self._size = 0

    def _drop(self, text: str) -> None:
        """Evict the least recently used text. Beginnings that it shares with others are owned by a later one."""
        del self._texts[text]
        self._size -= len(text)
        for beginning in _beginnings(text):
            if self._owners.get(beginning) == text:
                del self._owners[beginning]


def _beginnings(text: str) -> Iterator[int]:
    """Hashes of the text's beginnings that end on the grid; they never leave the process."""
    last = 0
    for end in range(GRID, len(text) + 1, GRID):
        last = hash((last, text[end - GRID : end]))
        yield last
