"""Prefix policies: the longest stored beginning of a prompt, exact first."""

from __future__ import annotations

from collections.abc import Sequence

from keepwarm.core.blocks import Block, PrefixNames, TokenIds, common_length
from keepwarm.core.plan import Load
from keepwarm.core.ports import BlockIndex, BlockRef
from keepwarm.core.spans import Exactness


def exact_prefix(blocks: Sequence[Block], index: BlockIndex, resident: Sequence[BlockRef]) -> tuple[BlockRef, ...]:
    """Stored blocks with the same tokens, the same cuts and the same arithmetic; never the last step.

    `resident` are leading blocks that are in device memory already.
    """
    wanted = [block.exact for block in blocks[:-1]]
    if len(resident) >= len(wanted):
        return tuple(resident[: len(wanted)])
    return (*resident, *index.lookup(wanted[len(resident) :]))


def token_prefix(
    tokens: TokenIds, names: PrefixNames, index: BlockIndex, exact: Sequence[BlockRef]
) -> tuple[Load, ...]:
    """The longest stored beginning with the same tokens, however it was cut or computed.

    Walks from block to block over every position that some stored path reaches, and takes part of one last block after
    comparing its token ids. Leaves at least one token to compute. Exact blocks are preferred where they reach.
    """
    limit = len(tokens) - 1
    paths: dict[int, tuple[BlockRef, ...]] = {0: ()}
    for count, ref in enumerate(exact, start=1):
        paths[ref.end] = tuple(exact[:count])
    frontier = sorted(paths)
    best_end, best = max(((end, path) for end, path in paths.items()), key=lambda item: item[0])
    while frontier:
        at = frontier.pop()
        for ref in index.children(names.opening(at)):
            end = at + ref.length
            if end <= limit and names.at(end) == ref.prefix:
                if end not in paths:
                    paths[end] = (*paths[at], ref)
                    frontier.append(end)
                taken = end
            elif min(end, limit) > best_end:
                stored = index.token_ids(ref)
                taken = at if stored is None else at + common_length(stored, tokens[at:limit])
            else:
                continue
            if taken > best_end:
                best_end, best = taken, (*paths[at], ref)
    return _loads(best, best_end, frozenset(ref.id for ref in exact))


def _loads(path: Sequence[BlockRef], end: int, exact_ids: frozenset[bytes]) -> tuple[Load, ...]:
    """One load per label; blocks of an exact path stay `exact` up to the first that is not."""
    count = 0
    while count < len(path) and path[count].id in exact_ids:
        count += 1
    loads = []
    if count:
        loads.append(Load(0, min(path[count - 1].end, end), tuple(path[:count]), Exactness.EXACT))
    if count < len(path):
        loads.append(Load(path[count].start, end, tuple(path[count:]), Exactness.PREFIX))
    return tuple(loads)
