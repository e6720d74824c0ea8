"""What is stored behind a beginning: the rest of another prompt, or what a prompt was answered with."""

from __future__ import annotations

import numpy as np

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds
from keepwarm.core.ports import BlockIndex

_BLOCKS = 512  # that are followed
_BRANCHES = 64  # blocks to check after each: an answer does not wait for thousands
_NEWEST = 4  # blocks to check where a step of an answer waits
_MOST = 1024  # tokens that are recalled: each page of them takes some queries


def followed(
    beginning: TokenIds,
    names: PrefixNames,
    index: BlockIndex,
    least: int,
    *,
    branches: int = _BRANCHES,
    here: bool = False,
) -> TokenIds:
    """Return a stored prompt that has this beginning, up to `least` tokens or its end. `names` are those of a prompt
    under the same salts. `here`: no remote tier is asked."""
    known = beginning
    for _ in range(_BLOCKS):
        if len(known) >= least:
            break
        refs = index.children(names.of(known).opening(len(known)), inside=here, most=branches)
        parts = [tokens for ref in refs if (tokens := index.token_ids(ref)) is not None and len(tokens)]
        if not parts:
            break
        known = np.concatenate([known, max(parts, key=len)])
    return known


def recalled(prompt: TokenIds, blocks: Chain, names: PrefixNames, page: int, index: BlockIndex, most: int) -> TokenIds:
    """Return at most `most` tokens that are stored behind a prompt in pages of `page` tokens, here and not in a remote
    tier. `blocks` and `names` are the prompt's. In a page that the prompt ends inside, it is the block that shares most
    with the prompt; behind that, the longest of the newest."""
    end = len(prompt) + min(most, _MOST)
    known = prompt if len(prompt) % page == 0 else _page_completed(prompt, blocks, names, index)
    if len(prompt) % page == 0 or len(known) > len(prompt):
        known = followed(known, names, index, end, branches=_NEWEST, here=True)
    return known[len(prompt) : end]


def _page_completed(prompt: TokenIds, blocks: Chain, names: PrefixNames, index: BlockIndex) -> TokenIds:
    """Return a prompt and what is stored of its last page beyond it."""
    last = blocks[-1]
    found = index.continuing(last, names.keys.get(last.start, b""))
    if found is None or found[1] < len(last.tokens):
        return prompt
    ref = found[0][-1]
    stored, at = index.token_ids(ref), ref.start
    if stored is None or at + len(stored) <= len(prompt) or not np.array_equal(stored[: len(prompt) - at], prompt[at:]):
        return prompt
    return np.concatenate([prompt[:at], stored])
