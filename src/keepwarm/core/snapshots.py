"""Where a recurrent state is kept. It cannot be cut at a position: reuse ends at the last snapshot before a difference.

A snapshot may weigh as much as the KV of thousands of tokens. So there are never more of them along a prompt than a
budget allows, and the ones that go first are those that save least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

from keepwarm.core.blocks import Block
from keepwarm.core.identity import digest
from keepwarm.core.schedule import Breakpoint

PURPOSE = "snapshots"  # of the namespace that they are stored under
FEWEST = 2  # along a prompt, whatever they weigh: the end of what many share, and where the next turn goes on
_WITHOUT_KV, _TOKENS_EACH = 8, 256
_NEWEST = 2  # last cuts of a prompt: with them an edited last message, and the same request, go on


def snapshot_id(block_id: bytes) -> bytes:
    """Name of the state at the end of a block (32 bytes)."""
    return digest("keepwarm snapshot 1", block_id)


def snapshot_block(block: Block) -> Block:
    """What the store is given for the state at the end of a block: its last token, behind that block. No prompt's block
    has such names."""
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
    """The last of some positions where what other prompts may share ends: its snapshot is not thinned."""
    hard = {point.position for point in breakpoints if not point.soft}
    return max(hard.intersection(positions), default=None)


def affordable(length: int, bytes_per_token: int, snapshot_bytes: int, budget: float) -> int:
    """How many snapshots a prompt may have that weigh no more than `budget` times its KV; at least `FEWEST`."""
    if not bytes_per_token:  # a model without any KV, whose prompts weigh what their snapshots do
        return max(_WITHOUT_KV, length // _TOKENS_EACH)
    if not snapshot_bytes:
        return FEWEST
    return max(FEWEST, int(budget * length * bytes_per_token / snapshot_bytes))


def wanted(
    ends: Sequence[int], breakpoints: Iterable[Breakpoint], parted: int, reached: int, most: int, *, whole: bool
) -> tuple[int, ...]:
    """Positions at which a request takes snapshots, by importance: no more than `most` of those that it computes.

    `ends` are those of its blocks. Where it goes on next comes first: its last cuts (with `whole` its own end), then
    where it `parted` from a stored prompt, then what its breakpoints declare, hard before soft, the later the better.
    Positions up to `reached` are not computed. At position 1 nothing is saved.
    """
    cuts = list(ends if whole else ends[:-1])
    known = set(cuts)
    declared = sorted((point for point in breakpoints if point.position in known), key=lambda p: (p.soft, -p.position))
    shared = [point.position for point in declared if not point.soft][:1]
    order = [*cuts[-1:], *shared, parted, *cuts[-_NEWEST:], *(point.position for point in declared), *reversed(cuts)]
    found = [at for at in dict.fromkeys(order) if at in known and at > max(reached, 1)]
    return tuple(found[:most])


def superfluous(positions: Collection[int], shared: int | None, most: int) -> list[int]:
    """Which of a prompt's snapshots go, so that `most` are left: those that save least, which is what lies between them
    and the one before. The newest, the one at the `shared` end and, where there is room for three, the one before the
    newest stay."""
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
