"""What followed a prompt when it was answered before: the tokens of blocks that are stored behind it."""

from __future__ import annotations

import numpy as np

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds
from keepwarm.core.ports import BlockIndex

_BRANCHES = 4  # blocks looked at behind one beginning: answers to one prompt may differ
_MOST = 1024  # tokens: each page of them takes some queries


def recalled(prompt: TokenIds, blocks: Chain, names: PrefixNames, page: int, index: BlockIndex, most: int) -> TokenIds:
    """Return at most `most` tokens that are stored behind a prompt in pages of `page` tokens, here and not in a remote
    tier. `blocks` and `names` are the prompt's. In a page that the prompt ends inside, it is the block that shares most
    with the prompt; behind that, the newest of the longest."""
    known = prompt if len(prompt) % page == 0 else _page_completed(prompt, blocks, names, index)
    end = len(prompt) + min(most, _MOST)
    while len(known) % page == 0 and len(prompt) <= len(known) < end:
        longer = _continued(known, names, index)
        if longer is None:
            break
        known = longer
    return known[len(prompt) : end]


def _page_completed(prompt: TokenIds, blocks: Chain, names: PrefixNames, index: BlockIndex) -> TokenIds:
    """Return a prompt and what is stored of its last page beyond it."""
    last = blocks[-1]
    found = index.continuing(last, names.keys.get(last.start, b""))
    if found is None or found[1] < len(last.tokens):
        return prompt
    ref = found[0][-1]
    stored = index.token_ids(ref)
    return prompt if stored is None else _joined(prompt, ref.start, stored)


def _continued(known: TokenIds, names: PrefixNames, index: BlockIndex) -> TokenIds | None:
    """Return these tokens, which end with a page, and those of a block behind them."""
    at = len(known)
    refs = index.children(names.of(known).opening(at), inside=True, most=_BRANCHES)
    blocks = [tokens for ref in refs if ref.start == at and (tokens := index.token_ids(ref)) is not None]
    longest = max(blocks, key=len, default=known[:0])
    return _joined(known, at, longest) if len(longest) else None


def _joined(known: TokenIds, at: int, stored: TokenIds) -> TokenIds:
    """Return `known` and what a block that begins at a position has beyond it; `known` alone if they differ."""
    agrees = at + len(stored) > len(known) and np.array_equal(stored[: len(known) - at], known[at:])
    return np.concatenate([known[:at], stored]) if agrees else known
