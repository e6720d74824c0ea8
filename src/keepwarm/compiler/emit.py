"""Fresh KV becomes stored blocks: which of a request's blocks are new, and under which names."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import Block, derived_id
from keepwarm.core.plan import LinkPlan
from keepwarm.core.spans import Exactness


@dataclass(frozen=True)
class Fresh:
    """Consecutive blocks that a request computed, and the names they are stored under."""

    blocks: tuple[Block, ...]
    ids: tuple[bytes, ...]
    parent: bytes = b""  # name of the block (or chain root) before the first

    def followed_by(self, block: Block) -> Fresh:
        """With one more block, whose KV is not that of a prefill step: it gets a derived name."""
        return Fresh((*self.blocks, block), (*self.ids, derived_id(self.ids[-1], block)), self.parent)


def fresh_blocks(
    blocks: Sequence[Block], plan: LinkPlan, *, again: bool = False, far: Container[str] = (), whole_from: int = 0
) -> Fresh:
    """Which of the `blocks` that a finished plan computed, or completed, are new.

    A block that reuse ended in is among them, beside the stored one that begins like it: else nothing would lead to
    what follows. So is one that ends where reuse did and a region under a salt begins: it may lie inside a stored one.
    Blocks that stand on KV which was not `exact` get derived names, so that no exact lookup finds them.

    With `again`, blocks that were still in device memory are offered once more: the rules of admission may have kept
    them from being stored. So are those that came from one of the tiers `far`, to be kept nearer.
    What begins before `whole_from` was not loaded in every layer, and is never among them.
    """
    reached = plan.prefix_end
    if plan.exactness is Exactness.EXACT:
        reached = min([reached, *(ref.start for load in plan.loads for ref in load.refs if ref.tier in far)])
        if again and plan.loads and plan.loads[0].refs[0].tier == "device":
            reached = 0
        first = bisect_right(blocks, reached, key=lambda block: block.end)
        if 0 < first < len(blocks) and blocks[first - 1].end == reached and _begins_region(blocks, first):
            first -= 1
        first = max(first, bisect_left(blocks, whole_from, key=lambda block: block.start))
        new = tuple(blocks[first:])
        return Fresh(new, tuple(block.exact for block in new), new[0].parent_exact if new else b"")
    return _derived(blocks, plan, whole_from)


def _begins_region(blocks: Sequence[Block], number: int) -> bool:
    """Whether a region under a salt begins with a block."""
    return blocks[number - 1].salts != blocks[number].salts


def stored_end(plan: LinkPlan) -> int:
    """Where the last whole stored block that a plan loads ends."""
    whole = [ref.end for load in plan.loads for ref in load.refs if ref.end <= load.end and ref.id]
    return max(whole, default=0)


def _derived(blocks: Sequence[Block], plan: LinkPlan, whole_from: int) -> Fresh:
    base = stored_end(plan)
    if base < whole_from:
        return Fresh((), ())
    new = tuple(block for block in blocks if block.start >= base)
    if not new or new[0].start != base or new[0].end <= plan.prefix_end:
        return Fresh((), ())
    stored = {ref.end: ref.id for load in plan.loads for ref in load.refs}
    parent = last = stored.get(base, new[0].parent_exact)
    ids: list[bytes] = []
    for block in new:
        last = derived_id(last, block)
        ids.append(last)
    return Fresh(new, tuple(ids), parent)
