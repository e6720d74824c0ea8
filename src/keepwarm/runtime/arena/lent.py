"""Arenas in use, from which another request may copy what they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.held import Held

WORTH = 64  # tokens; fewer are not copied, and are no reason to take an arena


@dataclass(frozen=True)
class Lent:
    """An arena in use: how often the pool had forgotten everything when it was lent, and the thread that has it."""

    arena: Arena
    forgotten: int
    thread: int


def worth_copying(lent: Iterable[Lent], forgotten: int, wanted: Held, arena: Arena) -> tuple[Arena, Held] | None:
    """Return the arena in use that holds most of what is wanted, and what that is, if it is worth copying into `arena`,
    which was just taken."""
    found = [(each.arena.resident(wanted), each.arena) for each in lent if each.forgotten == forgotten]
    count, source = max(found, key=lambda each: each[0], default=(0, arena))
    held = source.held_to(min(count, arena.capacity))
    if held is None or len(held.tokens) - arena.resident(wanted) < WORTH or arena.pins:
        return None
    return (source, held) if source.is_settled(len(held.tokens)) else None
