"""From fresh KV to stored blocks: which of a request's blocks are new, and under which names they are stored."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import Block, Chain, derived_id
from keepwarm.core.plan import LinkPlan
from keepwarm.core.spans import Exactness


@dataclass(frozen=True)
class Fresh:
    """Consecutive blocks that a request computed, and the names under which they are stored."""

    blocks: tuple[Block, ...]
    ids: tuple[bytes, ...]
    parent: bytes = b""  # name of the block (or chain root) before the first

    def followed_by(self, block: Block) -> Fresh:
        """Add a block whose KV is not that of a prefill step, so it gets a derived name."""
        return Fresh((*self.blocks, block), (*self.ids, derived_id(self.ids[-1], block)), self.parent)


def fresh_blocks(
    blocks: Sequence[Block],
    plan: LinkPlan,
    count: int | None = None,
    *,
    again: bool = False,
    far: Container[str] = (),
    whole_from: int = 0,
) -> Fresh:
    """Return which of the first `count` blocks (None: of all) that a finished plan computed, or completed, are new.

    The block in which reuse ended is one of them, although a stored one has the same beginning: otherwise nothing would
    lead to the blocks after it. So is a block that ends where reuse ended and a region under a salt begins: it may lie
    inside a stored one. Blocks whose KV depends on KV that was not `exact` get derived names, so that no exact lookup
    finds them.

    With `again`, blocks that were still in device memory are offered once more: the rules of admission may have
    prevented storing them. So are blocks from one of the tiers `far`, to be kept nearer. Blocks that begin before
    `whole_from` were not loaded in every layer, and are never returned.
    """
    reached = plan.prefix_end
    if plan.exactness is Exactness.EXACT:
        reached = min([reached, *(ref.start for load in plan.loads for ref in load.refs if ref.tier in far)])
        if again and plan.loads and plan.loads[0].refs[0].tier == "device":
            reached = 0
        ends = (blocks.ends if isinstance(blocks, Chain) else [block.end for block in blocks])[:count]
        first = bisect_right(ends, reached)
        if 0 < first < len(ends) and ends[first - 1] == reached and _begins_region(blocks, first):
            first -= 1
        if ends and whole_from > blocks[0].start:
            first = max(first, bisect_left(ends, whole_from) + 1)
        new = tuple(blocks[first : len(ends)])
        return Fresh(new, tuple(block.exact for block in new), new[0].parent_exact if new else b"")
    return _derived(blocks[:count], plan, whole_from)


def _begins_region(blocks: Sequence[Block], number: int) -> bool:
    """Whether a region under a salt begins with a block."""
    return blocks[number - 1].salts != blocks[number].salts


def stored_end(plan: LinkPlan) -> int:
    """Return where the last whole stored block that a plan loads ends."""
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
