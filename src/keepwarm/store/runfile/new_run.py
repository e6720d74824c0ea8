"""Blocks that become one run: merged by compaction, carried by a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from keepwarm.core.blocks import TokenIds
from keepwarm.core.geometry import KVGeometry
from keepwarm.store.runfile.layout import StoredBlock, new_run_id, salts_of


@dataclass(frozen=True, eq=False)
class NewRun:
    """A `runfile.layout.Outline`."""

    id: str
    geometry: KVGeometry
    namespace: Mapping[str, Any]
    tokens: TokenIds
    blocks: tuple[StoredBlock, ...]

    @property
    def salts(self) -> frozenset[bytes]:
        return salts_of(self.blocks)

    def part(self, first: int, last: int) -> NewRun:
        """Return the blocks `[first, last)` as a run of their own, under a new id."""
        blocks, begin = self.blocks[first:last], self.blocks[0].start
        return replace(
            self,
            id=new_run_id(),
            tokens=self.tokens[blocks[0].start - begin : blocks[-1].end - begin],
            blocks=tuple(replace(block, ordinal=ordinal) for ordinal, block in enumerate(blocks)),
        )
