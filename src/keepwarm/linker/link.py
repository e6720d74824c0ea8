"""Links one prompt: policies in order, one plan. Decides; moves no tensor."""

from __future__ import annotations

from collections.abc import Sequence

from keepwarm.core.blocks import Block, PrefixNames, TokenIds
from keepwarm.core.plan import Compute, LinkPlan, Load
from keepwarm.core.ports import BlockIndex, BlockRef
from keepwarm.core.spans import Exactness, MissReason, Reuse
from keepwarm.linker.prefix import exact_prefix, token_prefix


def link(
    tokens: TokenIds,
    blocks: Sequence[Block],
    names: PrefixNames,
    index: BlockIndex,
    reuse: Reuse,
    resident: Sequence[BlockRef] = (),
) -> LinkPlan:
    """The plan for a prompt cut into `blocks`: what is loaded and which steps are computed."""
    if reuse is Reuse.OFF:
        return LinkPlan(len(tokens), _computes(blocks, 0), 0, MissReason.OFF)
    exact = exact_prefix(blocks, index, resident)
    if reuse is Reuse.EXACT:
        loads: tuple[Load, ...] = (Load(0, exact[-1].end, exact, Exactness.EXACT),) if exact else ()
    else:
        loads = token_prefix(tokens, names, index, exact)
    reached = loads[-1].end if loads else 0
    whole = reached >= (blocks[-1].start if reuse is Reuse.EXACT else len(tokens) - 1)
    reason = MissReason.NONE if whole else MissReason.NEW
    return LinkPlan(len(tokens), (*loads, *_computes(blocks, reached)), reached, reason)


def _computes(blocks: Sequence[Block], reached: int) -> tuple[Compute, ...]:
    """The prompt's own steps after `reached`; the first is shortened when reuse ended inside it."""
    return tuple(Compute(max(block.start, reached), block.end) for block in blocks if block.end > reached)
