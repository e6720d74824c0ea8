"""Divide content into chunks: spans of tokens that are reused at any position.

There are four ways, all functions of the content alone: `fixed` sizes, `semantic` borders (paragraphs, sentences,
blocks of code), `document` separators, and `content`-defined borders, which an insertion moves only nearby.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import TokenIds
from keepwarm.errors import ConfigError

ChunkerName = Literal["fixed", "semantic", "document", "content"]
Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]  # [n, 2]: the characters that each token covers

_GRAM = 8  # tokens that decide whether a chunk ends after them
_LARGE = 4  # times `size`: longer paragraphs are divided at sentences
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.MULTILINE | re.DOTALL)
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(r"[.!?]['\")\]]*\s+|[\u3002\uff01\uff1f]")
_DOCUMENT = re.compile(r"\f|\n(?:-{3,}|={3,}|\*{3,})[^\S\n]*\n+|</document>\s*|\n(?=#{1,2} )")


@dataclass(frozen=True)
class Text:
    """The text that tokens stand for, and the characters `[n, 2]` that each of them covers."""

    text: str
    offsets: Offsets

    def token_at(self, char: int) -> int:
        """The first token that begins at or after a character."""
        return int(np.searchsorted(self.offsets[:, 0], char))


@dataclass(frozen=True)
class Chunking:
    """How a span is divided. `size` and `least` are in tokens; chunks shorter than `least` are left out.

    `fixed` leaves out a last chunk shorter than `size`, unless `partial`. `content` makes chunks of `size` on average,
    and of at least half of it. The others follow the text, and merge or divide its parts towards `size`.
    """

    name: ChunkerName = "content"
    size: int = 128
    least: int = 32
    partial: bool = False

    def __post_init__(self) -> None:
        if self.name not in get_args(ChunkerName):
            raise ConfigError(f"chunker must be one of {', '.join(get_args(ChunkerName))}, got {self.name!r}")
        if self.size < 2:
            raise ConfigError(f"chunk_size must be at least 2 tokens, got {self.size}")
        if not 1 <= self.least <= self.size:
            raise ConfigError(f"chunk_least must lie between 1 and chunk_size ({self.size}), got {self.least}")

    def divide(self, tokens: TokenIds, start: int, end: int, text: Text | None) -> tuple[Span, ...]:
        """Return the chunks inside `[start, end)`, in order, without overlap, possibly with gaps.

        Without a text (a prompt of token ids) `semantic` and `document` cannot see borders: `semantic` divides like
        `content`, `document` takes the whole span.
        """
        if self.name == "fixed":
            cuts = [*range(start, end, self.size), end]
            least = self.least if self.partial else self.size
            return tuple(span for span in pairwise(cuts) if span[1] - span[0] >= least)
        if self.name == "document":
            cuts = [start, *_cuts(_DOCUMENT, text, start, end), end] if text else [start, end]
        elif self.name == "semantic" and text:
            cuts = self._semantic(text, start, end)
        else:
            cuts = [start, *(start + at for at in content_cuts(tokens[start:end], self.size // 2)), end]
        return tuple(span for span in pairwise(cuts) if span[1] - span[0] >= self.least)

    def _semantic(self, text: Text, start: int, end: int) -> list[int]:
        """Cut at paragraphs and blocks of code. Short ones join the next one; long paragraphs are cut at sentences."""
        first, last = _characters(text, start, end)
        cuts = [start]
        for begin, stop, code in _parts(text.text, first, last):
            borders = [stop]
            if not code and text.token_at(stop) - text.token_at(begin) > _LARGE * self.size:
                borders = [found.end() for found in _SENTENCE.finditer(text.text, begin, stop)] + borders
            for border in borders:
                at = end if border == last else text.token_at(border)
                large = border != stop and at - cuts[-1] < self.size  # sentences are gathered up to the size
                if at - cuts[-1] >= self.least and not large:
                    cuts.append(at)
        if end - cuts[-1] < self.least and len(cuts) > 1:  # a short end joins the chunk before it
            cuts.pop()
        return [*cuts, end] if cuts[-1] < end else cuts


def content_cuts(tokens: TokenIds, reach: int) -> list[int]:
    """Return borders defined by content: after a token whose rolling hash is the unique maximum within `reach` tokens.

    Whether there is a border at a place depends only on `reach + 8` tokens before it and `reach` after it, so an edit
    moves no border further away. Two borders are more than `reach` apart, `2 * reach + 1` on average. The idea is that
    of local-maximum chunking (Bjørner et al., 2010).
    """
    if len(tokens) < 2 or reach < 1:
        return []
    hashes = _rolling(tokens)
    beside = np.zeros(reach, np.uint64)
    padded = np.concatenate([beside, hashes, beside])
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach)
    before, behind = windows[: len(tokens)].max(axis=1), windows[reach + 1 :].max(axis=1)
    largest = (hashes > before) & (hashes > behind)
    return [int(at) + 1 for at in np.flatnonzero(largest) if at + 1 < len(tokens)]


def _rolling(tokens: TokenIds) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of the 8 tokens that end at each position; the same on every machine."""
    with np.errstate(over="ignore"):
        mixed = _mixed(tokens.astype(np.uint64) + np.uint64(1))
        total = mixed.copy()
        for back in range(1, min(_GRAM, len(tokens))):
            total *= np.uint64(0x100000001B3)
            total[back:] += mixed[:-back]
        return _mixed(total)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer: every bit depends on every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _characters(text: Text, start: int, end: int) -> Span:
    return int(text.offsets[start, 0]), int(text.offsets[end - 1, 1])


def _cuts(border: re.Pattern[str], text: Text, start: int, end: int) -> list[int]:
    """Return the tokens inside `[start, end)` that begin right after a border."""
    found = border.finditer(text.text, *_characters(text, start, end))
    return sorted({at for match in found if start < (at := text.token_at(match.end())) < end})


def _parts(text: str, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the adjacent paragraphs and fenced blocks of `text[first:last]`: begin, end, whether it is code."""
    at = first
    for fence in _FENCE.finditer(text, first, last):
        yield from _paragraphs(text, at, fence.start())
        yield fence.start(), fence.end(), True
        at = fence.end()
    yield from _paragraphs(text, at, last)


def _paragraphs(text: str, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
    at = first
    for gap in _PARAGRAPH.finditer(text, first, last):
        if gap.end() > at:
            yield at, gap.end(), False
            at = gap.end()
    if at < last:
        yield at, last, False
