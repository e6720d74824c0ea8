"""States behind stored blocks: only behind a block that is used as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds, chain
from keepwarm.core.schedule import Schedule
from keepwarm.core.snapshots import snapshot_block
from keepwarm.core.spans import Reuse
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
