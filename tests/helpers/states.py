"""Snapshots of a made-up recurrent state along a made-up prompt, in a store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers.archives import LENGTH, Prompt

from keepwarm.core.geometry import STATE_BYTES, KVGeometry, LayerGeometry
from keepwarm.core.ports import BlockRef
from keepwarm.core.snapshots import PURPOSE, snapshot_block, snapshot_id
from keepwarm.store import Archive
from keepwarm.testing.kv import MemoryKV, namespace

STATE = KVGeometry((LayerGeometry(1, 300, 299), LayerGeometry(1, 40, 40)), STATE_BYTES)
SPACE = replace(namespace(), purpose=PURPOSE)


class Stateful(Prompt):
    """A prompt, its KV, and the state at the end of each of its blocks."""

    def __init__(self, seed: int = 0, length: int = LENGTH, step: int = 8) -> None:
        super().__init__(seed, length, step)
        self.states = MemoryKV.random(STATE, length, seed + 1000)  # by the position of the last token

    def take(self, archive: Archive, *numbers: int, **arguments: Any) -> None:
        """Store the snapshots at the ends of some blocks."""
        for number in numbers:
            archive.put(
                self.states,
                [snapshot_block(self.blocks[number])],
                SPACE,
                ids=[snapshot_id(self.ids[number])],
                parent=self.ids[number],
                **arguments,
            )

    def taken(self, archive: Archive) -> list[int]:
        """The blocks at whose ends there are snapshots, each of which must be equal to the bit."""
        found = archive.find([snapshot_id(name) for name in self.ids], far=True)
        return [number for number, name in enumerate(self.ids) if self.loaded(archive, number, found)]

    def loaded(self, archive: Archive, number: int, found: dict[bytes, BlockRef]) -> bool:
        """Load a snapshot that was found, if it was."""
        ref, block = found.get(snapshot_id(self.ids[number])), self.blocks[number]
        if ref is None:
            return False
        sink = MemoryKV(STATE, len(self.tokens))
        archive.load([ref], block.tokens[-1:], block.end, sink)
        assert sink.same(self.states, block.end - 1, block.end)
        return True


def stored(archive: Archive, *, runs: Iterable[tuple[int, int]] = ((0, 3), (3, 8)), states: Iterable[int]) -> Stateful:
    """A prompt in some runs, with snapshots at the ends of some of its blocks."""
    one = Stateful()
    for first, last in runs:
        one.put(archive, first, last)
        archive.flush()
    one.take(archive, *states)
    archive.flush()
    return one


def snapshot_files(archive: Archive, folder: Path) -> list[Path]:
    """The files of all snapshots, those of the shortest beginnings first."""
    entries = [entry for entry in archive.contents.entries() if entry.kind == "snapshot"]
    return [folder / "runs" / f"{entry.id}.safetensors" for entry in sorted(entries, key=lambda entry: entry.start)]
