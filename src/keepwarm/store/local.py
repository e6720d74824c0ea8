"""The blocks in RAM and on disk, each in the fastest tier that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepwarm.core.ports import BlockRef
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.ram.tier import RamTier


class Local:
    """The two tiers of this machine, asked as one. Writes nothing."""

    def __init__(self, ram: RamTier, disk: DiskTier | None, wait: Callable[[Sequence[bytes]], bool]) -> None:
        """`wait` waits for blocks that are about to be written to disk; it returns False when there are none."""
        self._ram, self._disk, self._wait = ram, disk, wait

    def chain(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """Return the longest leading part of `ids` that is stored."""
        held = self._ram.refs(ids)
        first = next((at for at, block_id in enumerate(ids) if block_id not in held), len(ids))
        below = self._disk.lookup(ids[first:]) if first < len(ids) and self._disk is not None else ()
        if not held:
            return below
        refs = [held[block_id] for block_id in ids[:first]]
        for block_id, ref in zip(ids[first:], below, strict=False):
            refs.append(held.get(block_id, ref))
        for block_id in ids[len(refs) :]:  # the blocks after that, which only RAM holds
            if block_id not in held:
                break
            refs.append(held[block_id])
        return tuple(refs)

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """Return the blocks that are stored."""
        held = self._ram.refs(ids)
        if self._disk is None or len(held) == len(set(ids)):
            return held
        below = [block_id for block_id in ids if block_id not in held]
        found = self._disk.find(below)
        if len(found) < len(below) and self._wait([each for each in below if each not in found]):
            found = self._disk.find(below)
        return found | held

    def children(self, prefix: bytes, most: int | None = None) -> tuple[BlockRef, ...]:
        """Return at most `most` blocks whose left context has this prefix name."""
        found = {ref.id: ref for ref in self._ram.children(prefix, most)}
        if self._disk is not None and (most is None or len(found) < most):
            for ref in self._disk.children(prefix, most):
                found.setdefault(ref.id, ref)
        return tuple(found.values())[:most]
