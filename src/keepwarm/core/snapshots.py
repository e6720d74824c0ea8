"""Where snapshots of a recurrent state are taken. A state cannot be cut at a position, so reuse ends at the last
snapshot before a difference.

A snapshot may be as large as the KV of thousands of tokens. So a prompt never has more of them than a budget allows,
and those that save least are removed first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

from keepwarm.core.blocks import Block
from keepwarm.core.identity import digest
from keepwarm.core.schedule import Breakpoint

PURPOSE = "snapshots"  # of the namespace that they are stored under
FEWEST = 2  # along a prompt, whatever their size: the end of the shared part, and where the next turn continues
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


def wanted(
    ends: Sequence[int], breakpoints: Iterable[Breakpoint], parted: int, reached: int, most: int, *, whole: bool
) -> tuple[int, ...]:
    """Return at most `most` positions at which a request takes snapshots, the most important first.

    `ends` are the ends of its blocks. The order is: its last cut (with `whole` its own end), its last hard breakpoint,
    where it `parted` from a stored prompt, the cut before the last one, then its breakpoints, hard before soft, later
    ones first, then all other cuts, later ones first. Positions up to `reached` are not computed. A snapshot at
    position 1 saves nothing.
    """
    cuts = list(ends if whole else ends[:-1])
    known = set(cuts)
    declared = sorted((point for point in breakpoints if point.position in known), key=lambda p: (p.soft, -p.position))
    shared = [point.position for point in declared if not point.soft][:1]
    order = [*cuts[-1:], *shared, parted, *cuts[-_NEWEST:], *(point.position for point in declared), *reversed(cuts)]
    found = [at for at in dict.fromkeys(order) if at in known and at > max(reached, 1)]
    return tuple(found[:most])


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
