"""What arenas leave to the pages of a batch, where a device has no memory for both."""

from __future__ import annotations

from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.arena.room import SHARE, rounded

LEAST = 1 << 30  # bytes of pages, by default


def bytes_for_pages(pool: ArenaPool, asked: int | None, most: int, window: int) -> tuple[int, int]:
    """Return the bytes of the pages of a batch on a device, and how many of them its arenas gave: `Cap.returned` takes
    those back. KV has `SHARE` of the device in all. A pool's cap is less by what is `asked` for, unless it was asked
    for, too. By default pages have a part of it, and `LEAST` at least. They use at most so many bytes. `window` is the
    model's context window in tokens."""
    caps = pool.caps
    if asked is not None:
        given = min(asked, most, caps.nbytes * 9 // 10) if caps.share else 0
        return asked, _made_way(pool, given)
    if caps.share:
        given = _made_way(pool, min(most, caps.part(Arena.size(pool.geometry, rounded(window)))))
        return max(given, min(most, LEAST)), given
    free = pool.port.free_memory() or 0
    return min(most, max(LEAST, int((free + pool.nbytes) * SHARE) - caps.nbytes)), 0


def _made_way(pool: ArenaPool, nbytes: int) -> int:
    """Have arenas give up bytes, with what idle ones hold. Return them; fewer if the device has less memory by now."""
    if nbytes <= 0:
        return 0
    if pool.nbytes + nbytes > pool.cap:
        pool.evict()
    pool.port.reclaim()
    free = pool.port.free_memory()
    return pool.caps.give(nbytes if free is None else min(nbytes, int(free * SHARE)))
