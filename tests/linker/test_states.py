"""States behind stored blocks: under scheduled arithmetic only behind a block that is used as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.helpers.states import SPACE, STATE

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds, chain
from keepwarm.core.plan import LinkPlan
from keepwarm.core.schedule import Breakpoint, Pages, Schedule
from keepwarm.core.snapshots import snapshot_block, snapshot_id
from keepwarm.core.spans import MissReason, Reuse
from keepwarm.linker.link import NamedPrompt, link
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, namespace, prompt


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_no_state_belongs_to_the_beginning_of_a_block(order: tuple[int, int], tmp_path: Path) -> None:
    """Where prompts were cut otherwise, a block of one may follow the beginning of a longer block of another."""
    head = prompt(50, 1)
    texts = np.concatenate([head, prompt(80, 2)]), np.concatenate([head, prompt(100, 3)])
    cuts = (100, 130), (50, 120, 150)

    def blocks_of(tokens: TokenIds, ends: tuple[int, ...]) -> Chain:
        return chain(tokens, ends, namespace())

    archive = Archive.open(tmp_path, max_ram=1 << 26, max_disk=1 << 26)
    try:
        for which in order:
            archive.put(
                MemoryKV.random(UNEVEN, len(texts[which])), blocks_of(texts[which], cuts[which])[:], namespace()
            )
        behind = snapshot_block(blocks_of(texts[0], cuts[0])[0])
        archive.put(MemoryKV.random(UNEVEN, 100), [behind], namespace())
        archive.flush()
        tokens = np.concatenate([texts[1][:120], prompt(30, 4)])
        other = namespace(torch="2.8")
        named = NamedPrompt(
            tokens, chain(tokens, (128, 150), other), PrefixNames(tokens, other), Schedule(128, 4), stateful=True
        )
        plan = link(named, archive, Reuse.PREFIX)
    finally:
        archive.close()
    assert plan.snapshots.stored == {}
    assert plan.loads == ()


@pytest.mark.parametrize("resident", [0, 70, 200])
def test_a_state_inside_a_page_is_found_where_a_match_ends(resident: int, tmp_path: Path) -> None:
    """And elsewhere if the prompt says that a part of it ends there."""
    text, grid, space = prompt(150, 1), Pages(512), namespace()
    blocks = chain(text, grid.cuts(150), space)
    part = blocks.up_to(77)
    assert (part.start, part.end, part.exact) == (64, 77, chain(text[:77], grid.cuts(77), space)[-1].exact)
    state = {"ids": [snapshot_id(part.exact)], "parent": blocks.exact[2]}

    def planned(common: int, *declared: int) -> LinkPlan:
        tokens = np.concatenate([text[:common], prompt(40, 2)])
        points = tuple(map(Breakpoint, declared))
        named = chain(tokens, grid.cuts(len(tokens)), space), PrefixNames(tokens, space), grid, True
        return link(
            NamedPrompt(tokens, *named, breakpoints=points), archive, Reuse.EXACT, resident=min(resident, common)
        )

    with Archive.open(tmp_path, max_ram=1 << 26, max_disk=1 << 26) as archive:
        archive.put(MemoryKV.random(UNEVEN, 150), blocks[:], space)
        archive.put(MemoryKV.random(STATE, 77), [snapshot_block(part)], SPACE, **state)
        archive.flush()
        for plan in (planned(80), planned(130, 77)):
            assert (plan.prefix_end, [*plan.snapshots.stored], plan.last_cut) == (77, [77], plan.length - 1)
            assert plan.loads[-1].refs[-1].end == (77 if resident == 200 else 96)
        assert planned(80).miss_reason is MissReason.NEW, "a few tokens from there on are computed again"
        assert planned(130, 77).miss_reason is MissReason.STATE
        assert planned(76).prefix_end == planned(130).prefix_end == 0
