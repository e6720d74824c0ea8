"""Chunk policy: stored content anywhere in the rest of a prompt, in any order, with gaps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepwarm.core.blocks import Block, TokenIds, chain
from keepwarm.core.identity import Namespace
from keepwarm.core.plan import Relocate
from keepwarm.core.ports import BlockIndex, BlockRef


@dataclass(frozen=True, eq=False)
class Chunk:
    """Content with the names of its KV, which was computed after a neutral start, as a small prompt of its own.

    `blocks` are those of start and content. Their ids are prefix names, which depend on the start, the tokens, the
    model and the salt, but not on position or arithmetic. Content `of_a_prompt` was computed as part of a whole prompt,
    which is its start: its ids are that prompt's own, and its last block may reach beyond the content. The names of a
    `foreign` chunk have another purpose: its KV depends on what came before the content in some request.
    """

    start: int  # position in the prompt
    end: int
    tokens: TokenIds  # the start, then the content
    blocks: tuple[Block, ...]
    learn: bool = True
    of_a_prompt: bool = False
    foreign: bool = False

    @property
    def ids(self) -> tuple[bytes, ...]:
        return tuple(block.exact if self.of_a_prompt else block.prefix for block in self.blocks)

    @property
    def content(self) -> dict[bytes, Block]:
        """The blocks that hold content, in order, by id."""
        return {name: block for name, block in zip(self.ids, self.blocks, strict=True) if block.end > self.opening}

    @property
    def opening(self) -> int:
        """Number of tokens of the start."""
        return len(self.tokens) - (self.end - self.start)


def name_chunk(
    tokens: TokenIds,
    start: int,
    end: int,
    opening: TokenIds,
    namespace: Namespace,
    extra_keys: Mapping[int, bytes],
    step: int,
    learn: bool = True,
) -> Chunk | None:
    """Name a chunk; content longer than `step` has several blocks. Return None when more than two salts apply or one
    begins inside: such a chunk is not shared."""
    keys = [key for at, key in sorted(extra_keys.items()) if at <= start]
    if len(keys) > 2 or any(start < at < end for at in extra_keys):
        return None
    own = np.concatenate([opening, tokens[start:end]])
    cuts = [len(opening), *range(len(opening) + step, len(own), step), len(own)]
    blocks = chain(own, cuts, namespace, dict(zip((0, len(opening)), keys, strict=False)))
    return Chunk(start, end, own, tuple(blocks), learn)


def relocations(chunks: Sequence[Chunk], index: BlockIndex, reached: int, limit: int, least: int) -> list[Relocate]:
    """Return the stored parts of `chunks` inside `[reached, limit)`, in order of position. Earlier chunks come first.

    Of a chunk with several blocks, the leading stored ones are used. Parts of less than `least` tokens are not.
    """
    open_chunks = [chunk for chunk in chunks if chunk.end > reached and chunk.start < limit]
    stored = index.find(list(dict.fromkeys(name for chunk in open_chunks for name in chunk.content)))
    taken: list[tuple[int, int]] = []
    found: list[Relocate] = []
    for chunk in open_chunks:
        refs = _leading(chunk, stored)
        start = max(chunk.start, reached)
        end = min(chunk.start + refs[-1].end - chunk.opening, chunk.end, limit) if refs else start
        if end - start < least or not _free(taken, start, end):
            continue
        taken.insert(bisect_left(taken, (start, end)), (start, end))
        for ref in refs:
            at = chunk.start + ref.start - chunk.opening
            first, last = max(at, start), min(at + ref.length, end)
            if first < last:
                before = chunk.tokens[ref.start : ref.start + first - at]
                found.append(Relocate(first, last, ref, ref.start + first - at, tuple(before.tolist())))
    return sorted(found, key=lambda span: span.start)


def _leading(chunk: Chunk, stored: Mapping[bytes, BlockRef]) -> list[BlockRef]:
    refs: list[BlockRef] = []
    for name, block in chunk.content.items():
        ref = stored.get(name)
        if ref is None or (ref.start, ref.length) != (block.start, block.length):
            break
        refs.append(ref)
    return refs


def _free(taken: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    at = bisect_left(taken, (start, end))
    return (at == 0 or taken[at - 1][1] <= start) and (at == len(taken) or end <= taken[at][0])
