"""Prefix policies: the longest stored beginning of a prompt, exact first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter

from keepwarm.core.blocks import Block, Chain, PrefixNames, TokenIds, common_length
from keepwarm.core.plan import Load
from keepwarm.core.ports import BlockIndex, BlockRef, in_line
from keepwarm.core.spans import Exactness

_START = attrgetter("start")
_LOOKUPS = 4  # of a prompt in all, if blocks of others keep arriving: under load that may never end


def whole_blocks(blocks: Chain, index: BlockIndex, resident: int) -> tuple[BlockRef, ...]:
    """Return the stored blocks with the same tokens, cuts and arithmetic; never the last step.

    The first `resident` tokens are in device memory already.
    """
    there = tuple(_on_device(block.start, block.end, block) for block in blocks[:-1] if block.end <= resident)
    wanted = blocks.exact[len(there) : -1]
    looked = 0
    while wanted:
        looked += 1
        before = index.arrivals() if looked < _LOOKUPS else None
        found = index.lookup(wanted)
        if len(found) == len(wanted):
            return (*there, *found)
        following = blocks[len(there) + len(found)]
        if not index.arrives(following, following.length - 1, before):
            return (*there, *found)
    return there


def matching_tokens(
    blocks: Chain, index: BlockIndex, resident: int, keys: Mapping[int, bytes]
) -> tuple[tuple[BlockRef, ...], int]:
    """Return the stored blocks with the same tokens under the same invariant arithmetic, and the position where the
    match ends: at the first token that differs, inside the last block or after it. At least one token is left to
    compute.

    The first `resident` tokens are in device memory already; `keys` are the extra keys of regions, by position.
    """
    limit = blocks.ends[-1] - 1
    resident = min(resident, limit)
    whole = bisect_right(blocks.ends, resident)
    last = len(blocks) - (blocks.last_start == limit)  # if the last token is a block of its own, it is not loaded
    refs: tuple[BlockRef, ...] = ()
    reached = resident
    again = True
    looked = 0
    while resident < limit:
        looked += 1
        before = index.arrivals() if looked < _LOOKUPS else None
        refs, reached, parted = _stored(blocks, range(whole, last), index, resident, keys)
        if parted is None:
            break
        landed = again and bool(refs) and refs[-1].id == parted.exact  # stored since the lookup: more may follow
        again = not landed
        if not landed and not index.arrives(parted, reached - parted.start, before):
            break
    while refs and refs[-1].start >= limit:  # the rest of a page that is the last token
        refs = refs[:-1]
    there = min(resident, refs[0].start) if refs else resident
    boundary = blocks.start(whole)
    spans = ((0, min(boundary, there)), (boundary, there))
    named = (blocks[whole - 1] if whole and boundary <= there else None, None)
    device = (_on_device(*span, block) for span, block in zip(spans, named, strict=True) if span[0] < span[1])
    return (*device, *refs), min(reached, limit)


def _stored(
    blocks: Chain, wanted: range, index: BlockIndex, resident: int, keys: Mapping[int, bytes]
) -> tuple[tuple[BlockRef, ...], int, Block | None]:
    """Look up the `wanted` blocks. Return the stored ones, the position up to which they serve, and the first block
    that is not stored as a whole (None when all are, or only the last token is left). The last reference may be to
    another block with the same beginning as that one."""
    found = index.lookup(blocks.exact[wanted.start : wanted.stop])
    refs, count = _with_beginnings(blocks, wanted, found, index, keys)
    reached = refs[-1].end if refs else resident
    if reached >= blocks.ends[-1] - 1 or count == len(wanted):
        return refs, reached, None
    block = blocks[wanted[count]]
    following = index.continuing(block, keys.get(block.start, b""))
    if following is not None and block.start + following[1] > reached:
        return in_line((*refs, *following[0])), block.start + following[1], block
    return refs, reached, block


def _with_beginnings(
    blocks: Chain, wanted: range, found: Sequence[BlockRef], index: BlockIndex, keys: Mapping[int, bytes]
) -> tuple[tuple[BlockRef, ...], int]:
    """Complete the `found` blocks. If only the rest of a page is stored under its name, add the blocks that hold its
    beginning. Return the references, and how many of the `wanted` blocks they hold."""
    starts = [blocks.start(wanted.start), *blocks.ends[wanted.start : wanted.start + len(found) - 1]] if found else []
    begun = [*map(_START, found)]
    if starts == begun:  # this is the usual case, and there may be a thousand blocks
        return tuple(found), len(found)
    rests = [at for at, (start, began) in enumerate(zip(starts, begun, strict=True)) if began != start]
    refs: list[BlockRef] = []
    done = 0
    asked = [(blocks[wanted[at]], found[at], keys.get(starts[at], b"")) for at in rests]
    for at, before in zip(rests, index.beginnings(asked), strict=True):
        refs += found[done:at]
        if before is None:
            return in_line(refs), at
        refs += before
        done = at
    return in_line((*refs, *found[done:])), len(found)


def _on_device(start: int, end: int, block: Block | None = None) -> BlockRef:
    """Return a reference to KV in an arena; `block` is the block that ends at `end`, if there is one."""
    names = (block.exact, block.prefix) if block is not None else (b"", b"")
    return BlockRef(*names, run_id="", ordinal=0, start=start, length=end - start, tier="device")


def token_prefix(
    tokens: TokenIds,
    names: PrefixNames,
    index: BlockIndex,
    exact: Sequence[BlockRef],
    reached: int,
    longest_part: int | None = None,
) -> tuple[Load, ...]:
    """Find the longest stored beginning with the same tokens, however it was cut or computed.

    The search walks from block to block over every position that a stored path reaches. It may end with part of a block
    after comparing its token ids, if the block is no longer than `longest_part`. At least one token is left to compute.
    The `exact` blocks, valid up to `reached`, are preferred as far as they reach.
    """
    limit = len(tokens) - 1
    paths: dict[int, tuple[BlockRef, ...]] = {0: ()}
    for count, ref in enumerate(exact, start=1):
        if ref.end <= reached:
            paths[ref.end] = tuple(exact[:count])
    frontier = sorted(paths)
    parts: set[int] = set()  # positions where part of a block ends
    best_end, best = reached, tuple(exact)
    while frontier:
        at = frontier.pop()
        for ref in index.children(names.opening(at), inside=at in parts):
            if ref.start != at:
                continue
            end = at + ref.length
            if end <= limit and names.at(end) == ref.prefix:
                if end not in paths:
                    paths[end] = (*paths[at], ref)
                    frontier.append(end)
                taken = end
            elif longest_part is not None and ref.length > longest_part:
                continue
            else:
                stored = index.token_ids(ref)
                taken = at if stored is None else at + common_length(stored, tokens[at:limit])
                if taken > at and taken not in paths:  # the rest of a page may follow there
                    paths[taken] = (*paths[at], ref)
                    frontier.append(taken)
                    parts.add(taken)
            if taken > best_end:
                best_end, best = taken, (*paths[at], ref)
    return loads(in_line(best), best_end, frozenset(ref.id for ref in exact))


def loads(path: Sequence[BlockRef], end: int, exact_ids: frozenset[bytes]) -> tuple[Load, ...]:
    """Make one load per label; blocks of an exact path stay `exact` up to the first that is not."""
    count = 0
    while count < len(path) and path[count].id in exact_ids:
        count += 1
    found = []
    if count:
        found.append(Load(0, min(path[count - 1].end, end), tuple(path[:count]), Exactness.EXACT))
    if count < len(path):
        found.append(Load(path[count].start, end, tuple(path[count:]), Exactness.PREFIX))
    return tuple(found)
