"""What an edited prompt shares with its earlier version after the edit: content at another position."""

from __future__ import annotations

from collections.abc import Sequence

from keepwarm.core.blocks import Block, TokenIds, common_length
from keepwarm.linker.chunk import Chunk

_GRAM = 16  # tokens; where they occur once in the earlier prompt, both prompts are aligned


def shared_chunks(tokens: TokenIds, base: TokenIds, blocks: Sequence[Block], least: int) -> list[Chunk]:
    """Return stretches of at least `least` tokens that both prompts contain after their first difference, in order.

    `blocks` are those of `base`, an earlier prompt. A stretch is a chunk whose KV depends on all of `base` before it.
    """
    at = common_length(tokens, base)
    places = _places(base, at)
    found: list[Chunk] = []
    reached = at  # the end of the last stretch
    text, size = tokens.tobytes(), tokens.itemsize
    while at + _GRAM <= len(tokens):
        place = places.get(text[at * size : (at + _GRAM) * size], -1)
        if place < 0:
            at += 1
            continue
        back = common_length(tokens[reached:at][::-1], base[:place][::-1])
        ahead = common_length(tokens[at:], base[place:])
        if back + ahead >= least:
            own = tuple(block for block in blocks if block.start < place + ahead)
            found.append(Chunk(at - back, at + ahead, base[: place + ahead], own, learn=False, of_a_prompt=True))
            reached = at + ahead
        at += ahead
    return found


def _places(base: TokenIds, start: int) -> dict[bytes, int]:
    """Return where each stretch of 16 tokens begins that occurs once in `base[start:]`; -1 if it occurs repeatedly."""
    text, size = base.tobytes(), base.itemsize
    places: dict[bytes, int] = {}
    for at in range(start, len(base) - _GRAM + 1):
        gram = text[at * size : (at + _GRAM) * size]
        places[gram] = -1 if gram in places else at
    return places
