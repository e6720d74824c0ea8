"""Where the store reads KV that a request has just computed, while the next request already writes into its arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import Bytes, KVSource
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.held import KVCopy

_COPIED = 2048  # at most this many tokens are copied for the store before the answer ends: 1 % of computing them
_FETCHED = 256  # the same from a device, which has more arenas for the next request


@dataclass(frozen=True, eq=False)
class Continued:
    """KV that another source holds up to where a copy begins. Implements `KVSource`."""

    before: KVSource
    copied: KVCopy

    @property
    def geometry(self) -> KVGeometry:
        return self.before.geometry

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        cut = min(max(start, self.copied.start), end)
        if cut == end:
            return self.before.read(layer, kv, start, end)
        copied = self.copied.read(layer, kv, cut, end)
        return copied if cut == start else np.concatenate([self.before.read(layer, kv, start, cut), copied], axis=1)


def for_store(arena: Arena, start: int, end: int, anew: int) -> tuple[KVSource, int]:
    """Return a source of the positions `[start, end)`, and the position below which the arena must stay as it is until
    they are read; 0 if it need not.

    A short range is copied now. Of a longer one on the host that is done with what follows `anew`, where the same
    prompt would write again: its next request then need not wait, nor copy what comes before.
    """
    if end - start <= (_COPIED if arena.port.is_host else _FETCHED):
        return arena.copy_of(start, end), 0
    cut = max(start, anew)
    if not arena.port.is_host or not cut < end <= cut + _COPIED:
        return arena, end
    return Continued(arena, arena.copy_of(cut, end)), cut
