"""What a tenant asks to be kept, or no longer, changes its own runs: what is public is the operator's."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepwarm.core.blocks import chain
from keepwarm.core.identity import salt_key
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, namespace, prompt


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_tenant_leaves_the_operators_pin(tmp_path: Path, on_disk: bool) -> None:
    with Archive.open(tmp_path if on_disk else None, max_ram=1 << 24, max_disk=1 << 26 if on_disk else 0) as archive:
        public, own = chain(prompt(64, 1), [32, 64], namespace(), {32: salt_key("tenant")})
        kv = MemoryKV.random(UNEVEN, 64, 1)
        for block in (public, own):
            archive.put(kv, [block], namespace())
            archive.flush()

        def pins() -> dict[bool, float | None]:
            return {not node.salts: node.pinned_until for node in archive.contents.tree()}

        archive.contents.retain(public.exact, 3600, 2)
        before = pins()[True]
        assert archive.contents.retain(own.exact, 60, 1, public=False) == 2
        assert pins()[True] == before
        assert pins()[False] is not None
        assert archive.contents.retain(own.exact, 1e-3, 0, public=False) == 2
        assert pins()[True] == before
        archive.contents.retain(own.exact, 60, 1)
        assert pins()[True] != before, "who is under no salt changes all"
