"""Fresh KV becomes stored blocks: which of a request's blocks are new, and under which names."""

from __future__ import annotations

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
    blocks: Sequence[Block], plan: LinkPlan, *, tail: bool, again: bool = False, far: Container[str] = ()
) -> Fresh:
    """What of a finished plan is worth storing.

    The last step's block is kept only with `tail`: at a position that is no cut of another prompt it can never match
    exactly. Blocks that stand on KV which was not `exact` get derived names, so that no exact lookup finds them. Where
    reuse ended inside a stored block, the block that was computed on from there is kept whole, beside the stored one:
    else nothing would lead to what follows, and a conversation would be computed again at every turn.

    With `again`, blocks that were still in device memory are offered once more: the rules of admission may have kept
    them from being stored. So are those that came from one of the tiers `far`, to be kept nearer.
    """
    reached = plan.loads[-1].end if plan.loads else 0
    if plan.exactness is Exactness.EXACT:
        reached = min([reached, *(ref.start for load in plan.loads for ref in load.refs if ref.tier in far)])
    if again and plan.exactness is Exactness.EXACT and plan.loads and plan.loads[0].refs[0].tier == "device":
        reached = 0
    new = tuple(block for block in blocks[: None if tail else -1] if block.start >= reached)
    if not new:
        return Fresh((), ())
    if plan.exactness is Exactness.EXACT:
        return Fresh(new, tuple(block.exact for block in new), new[0].parent_exact)
    whole = [ref for load in plan.loads for ref in load.refs]
    if whole[-1].end != reached:
        whole.pop()
    base, last = (whole[-1].end, whole[-1].id) if whole else (0, blocks[0].parent_exact)
    new = tuple(block for block in blocks[: None if tail else -1] if block.start >= base)
    if not new or new[0].start != base or new[0].end <= reached:
        return Fresh((), ())
    ids: list[bytes] = []
    parent = last
    for block in new:
        parent = derived_id(parent, block)
        ids.append(parent)
    return Fresh(new, tuple(ids), last)
