"""What arenas leave to the pages of a batch, where a device has no memory for both."""

from __future__ import annotations

from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.arena.room import SHARE, rounded


def give_pages(pool: ArenaPool, most: int, window: int) -> int:
    """Give a part of a pool's cap, at most so many bytes, to the pages of a batch if it is a share of a device's free
    memory. `window` is the model's context window in tokens. What idle arenas hold makes way. Return the bytes, which
    `Cap.returned` takes back."""
    part = min(most, pool.caps.part(Arena.size(pool.geometry, rounded(window))))
    if part <= 0:
        return 0
    if pool.nbytes + part > pool.cap:
        pool.evict()
    pool.port.reclaim()
    free = pool.port.free_memory()
    return pool.caps.give(part if free is None else min(part, int(free * SHARE)))
