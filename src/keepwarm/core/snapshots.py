"""Where snapshots of a recurrent state are taken. A state cannot be cut at a position, so reuse ends at the last
snapshot before a difference.

Under scheduled arithmetic they stand at cuts. Under invariant arithmetic a state is exact behind any token, so they
stand where parts of a prompt end, and at the ends of pages. There, a snapshot inside a page has the name of a prompt
that ends at its position.

A snapshot may be as large as the KV of thousands of tokens. So a prompt never has more of them than a budget allows,
and those that save least are removed first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence

from keepwarm.core.blocks import Block
from keepwarm.core.identity import digest
from keepwarm.core.schedule import PAGE_TOKENS, Breakpoint

PURPOSE = "snapshots"  # of the namespace that they are stored under
FEWEST = 2  # along a prompt, whatever their size: the end of the shared part, and where the next turn continues
WORTH = 8  # tokens; where a prompt parts from a stored one this close behind a snapshot, it takes no other one
_WITHOUT_KV, _TOKENS_EACH = 8, 256
_NEWEST = 2  # last cuts of a prompt: from them an edited last message, and the same request, can continue


def snapshot_id(block_id: bytes) -> bytes:
    """Name of the state at the end of a block (32 bytes)."""
    return digest("keepwarm snapshot 1", block_id)


def snapshot_block(block: Block) -> Block:
    """Return the block under which the store keeps the state at the end of a block: its last token, behind that block.
    No block of a prompt has these names."""
    name = snapshot_id(block.exact)
    return Block(
        block.end - 1,
        block.end,
        block.tokens[-1:],
        exact=name,
        prefix=digest("keepwarm snapshot prefix 1", name),
        parent_exact=block.exact,
        parent_prefix=digest("keepwarm snapshots behind 1", block.exact),
        salts=block.salts,
    )


def shared_end(breakpoints: Iterable[Breakpoint], positions: Collection[int]) -> int | None:
    """Return the last position where a part that other prompts may share ends. Its snapshot is never removed."""
    hard = {point.position for point in breakpoints if not point.soft}
    return max(hard.intersection(positions), default=None)


def affordable(length: int, bytes_per_token: int, snapshot_bytes: int, budget: float) -> int:
    """How many snapshots a prompt may have so that they are at most `budget` times its KV; at least `FEWEST`."""
    if not bytes_per_token:  # a model without KV, whose prompts consist of snapshots only
        return max(_WITHOUT_KV, length // _TOKENS_EACH)
    if not snapshot_bytes:
        return FEWEST
    return max(FEWEST, int(budget * length * bytes_per_token / snapshot_bytes))


def last_place(length: int, breakpoints: Iterable[Breakpoint]) -> int:
    """Return where the same prompt goes on under invariant arithmetic: where its last message ends, as the next turn
    does that, too, even if it is rendered with another header for the answer. If that is more than a page before its
    end, it is the last token, which is always computed."""
    near = [point.position for point in breakpoints if length - PAGE_TOKENS <= point.position < length]
    return max(near, default=length - 1)


def wanted(
    ends: Sequence[int], breakpoints: Iterable[Breakpoint], parted: int, reached: int, most: int, *, whole: bool
) -> tuple[int, ...]:
    """Return at most `most` positions at which a request takes snapshots under scheduled arithmetic, the most important
    first.

    `ends` are the ends of its blocks. The order is: its last cut (with `whole` its own end), its last hard breakpoint,
    where it `parted` from a stored prompt, the cut before the last one, then its breakpoints, hard before soft, later
    ones first, then all other cuts, later ones first. Positions up to `reached` are not computed. A snapshot at
    position 1 saves nothing.
    """
    cuts = list(ends if whole else ends[:-1])
    known = set(cuts)
    declared = _declared(breakpoints, known)
    order = [*cuts[-1:], *_shared(declared), parted, *cuts[-_NEWEST:], *(p.position for p in declared), *reversed(cuts)]
    found = [at for at in dict.fromkeys(order) if at in known and at > max(reached, 1)]
    return tuple(found[:most])


def wanted_inside(
    ends: Sequence[int], breakpoints: Iterable[Breakpoint], parted: int, reached: int, most: int, *, whole: bool
) -> tuple[int, ...]:
    """Do what `wanted` does, under invariant arithmetic. The order is: where the same prompt goes on (`last_place`;
    with `whole` its own end), its last hard breakpoint, where it `parted` from a stored prompt, its last two
    breakpoints, then the others, then its last token, then the ends of its pages. If not all of them are affordable,
    none is closer than a page to a more important one."""
    length, points = ends[-1], list(breakpoints)
    places = range(max(reached, 1) + 1, length + whole)
    declared = _declared(points, places)
    last = length if whole else last_place(length, points)
    parted = parted if parted - reached >= WORTH else 0
    newest = sorted({point.position for point in declared})[-_NEWEST:]
    first = [last, *_shared(declared), parted]
    order = [*first, *reversed(newest), *(point.position for point in declared), length - 1, *reversed(ends[:-1])]
    found = [at for at in dict.fromkeys(order) if at in places]
    return tuple(found if len(found) <= most else [*_apart(found, first)][:most])


def _declared(breakpoints: Iterable[Breakpoint], places: Collection[int]) -> list[Breakpoint]:
    """Return the breakpoints at some places: hard before soft, later ones first."""
    return sorted((point for point in breakpoints if point.position in places), key=lambda p: (p.soft, -p.position))


def _shared(declared: Sequence[Breakpoint]) -> list[int]:
    return [point.position for point in declared if not point.soft][:1]


def _apart(positions: Iterable[int], always: Collection[int]) -> Iterator[int]:
    """Yield those that are in `always`, and those that are a page or more from all that were yielded before."""
    taken: list[int] = []
    for at in positions:
        if at in always or all(abs(at - other) >= PAGE_TOKENS for other in taken):
            taken.append(at)
            yield at


def superfluous(positions: Collection[int], shared: int | None, most: int) -> list[int]:
    """Return which of a prompt's snapshots to remove, so that `most` are left: those that save least, that is, have the
    fewest tokens between them and the one before. The newest and the one at the `shared` end stay; if there is room for
    three, so does the one before the newest."""
    left = sorted(positions)
    newest = _NEWEST if most > FEWEST else 1
    gone: list[int] = []
    while len(left) > most:
        free = [at for at in left[:-newest] if at != shared]
        if not free:
            break
        least = min(free, key=lambda at: at - (left[bisect_left(left, at) - 1] if at != left[0] else 0))
        left.remove(least)
        gone.append(least)
    return gone
