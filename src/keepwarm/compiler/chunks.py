"""Parts of a compiled prompt that may be reused at any position: declared segments, and chunks inside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.core.chunking import Chunking, Text
from keepwarm.core.spans import Segment, SegmentKind

_UNDECLARED = frozenset({SegmentKind.PROMPT, SegmentKind.TAIL})
_WHOLE = frozenset({SegmentKind.DOCUMENT, SegmentKind.SEGMENT, SegmentKind.TOOLS, SegmentKind.SYSTEM})


@dataclass(frozen=True)
class Candidate:
    """Positions `[start, end)` that may be a chunk. `learn`: the chunk is worth computing if it is not stored."""

    start: int
    end: int
    learn: bool


def candidates(prompt: CompiledPrompt, chunking: Chunking) -> tuple[Candidate, ...]:
    """Return candidates in order of preference: whole declared segments, then the chunks of each segment.

    Tokens at a segment's borders that depend on its neighbours are left out: whitespace, and the token before its end,
    which could merge with other text after it. A message is learnt in pieces, everything else as a whole.
    """
    whole: list[Candidate] = []
    pieces: list[Candidate] = []
    for segment in prompt.segments:
        start, end = _inner(prompt, segment)
        if end - start < chunking.least:
            continue
        declared = segment.kind not in _UNDECLARED
        if declared:
            whole.append(Candidate(start, end, segment.kind in _WHOLE))
        for first, last in chunking.divide(prompt.tokens, start, end, _text(prompt)):
            if not declared or (first, last) != (start, end):
                pieces.append(Candidate(first, last, segment.kind not in _WHOLE))
    kept = len(prompt.tokens) if prompt.keep is None else prompt.keep
    return tuple(replace(each, learn=each.learn and each.end <= kept) for each in (*whole, *pieces))


def _text(prompt: CompiledPrompt) -> Text | None:
    return None if prompt.offsets is None else Text(prompt.text, prompt.offsets)


def _inner(prompt: CompiledPrompt, segment: Segment) -> tuple[int, int]:
    """Return the tokens of a segment that are the same wherever its text occurs."""
    start, end, text = segment.start, segment.end, _text(prompt)
    if text is None:
        return start, end
    first, last = prompt.contents.get(end, (0, len(text.text) + 1))
    first = max(first, int(text.offsets[start, 0]))
    while first < len(text.text) and text.text[first].isspace():
        first += 1
    while first < last <= len(text.text) and text.text[last - 1].isspace():
        last -= 1
    start = max(start, text.token_at(first))
    while end > start and text.offsets[end - 1, 1] >= last:
        end -= 1
    return start, max(start, end)
