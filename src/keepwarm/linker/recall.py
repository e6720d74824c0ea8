"""What followed a prompt when it was answered before: the tokens of blocks that are stored behind it."""

from __future__ import annotations

import numpy as np

from keepwarm.core.blocks import PrefixNames, TokenIds
from keepwarm.core.ports import BlockIndex
from keepwarm.core.schedule import PAGE_TOKENS

_BRANCHES = 4  # blocks looked at behind one beginning: answers to one prompt may differ
_MOST = 1024  # tokens: each page of them takes some queries


def recalled(prompt: TokenIds, names: PrefixNames, index: BlockIndex, most: int) -> TokenIds:
    """Return at most `most` tokens that are stored behind a prompt under invariant arithmetic, of the newest blocks.
    `names` are the prompt's. Remote tiers are not asked."""
    known, most = prompt, min(most, _MOST)
    while len(known) < len(prompt) + most:
        longer = _continued(known, names, index)
        if longer is None:
            break
        known = longer
    return known[len(prompt) : len(prompt) + most]


def _continued(known: TokenIds, names: PrefixNames, index: BlockIndex) -> TokenIds | None:
    """Return these tokens and those of a block that goes on from them: a page that begins with the last ones, or what
    is stored of one from their end on."""
    page, here = len(known) // PAGE_TOKENS * PAGE_TOKENS, names.of(known)
    for start in dict.fromkeys((page, len(known))):
        refs = index.children(here.opening(start), inside=start % PAGE_TOKENS != 0, most=_BRANCHES)
        blocks = [tokens for ref in refs if ref.start == start and (tokens := index.token_ids(ref)) is not None]
        going_on = [
            tokens
            for tokens in blocks
            if start + len(tokens) > len(known) and np.array_equal(tokens[: len(known) - start], known[start:])
        ]
        if going_on:
            return np.concatenate([known[:start], max(going_on, key=len)])
    return None
