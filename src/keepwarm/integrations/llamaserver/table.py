"""Which slot of a server holds which prompt, and whose; which one a request gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from keepwarm.core.blocks import TokenIds, common_length, token_ids
from keepwarm.integrations.llamaserver.server import SlotState

NOTHING = token_ids(np.empty(0, np.uint32))


@dataclass
class Slot:
    """`tokens` are the beginning of what the slot holds, as far as it is known; `held` is how many it holds in all."""

    number: int
    tokens: TokenIds = field(default_factory=lambda: NOTHING)
    held: int = 0
    task: int = -1  # its last one
    tenant: str | None = None
    used: float = 0.0

    def now_holds(self, tokens: TokenIds, tenant: str | None, held: int | None = None) -> None:
        self.tokens, self.tenant, self.held = tokens, tenant, len(tokens) if held is None else held


def choose(free: Iterable[Slot], tokens: TokenIds, tenant: str | None) -> tuple[Slot, int]:
    """Return the slot that a prompt of a tenant gets, and how many of its leading tokens the slot holds. Prompts of
    other tenants do not count. A slot whose prompt goes on differently for the most part is left to that prompt, if
    there is an empty one or one that was not used for longer."""
    slots = [*free]
    shared = {slot.number: common_length(slot.tokens, tokens) if slot.tenant == tenant else 0 for slot in slots}
    best = max(slots, key=lambda slot: (shared[slot.number], not slot.held, -slot.used))
    if 2 * shared[best.number] < best.held:
        best = min(slots, key=lambda slot: (slot.held > 0, slot.used))
    return best, shared[best.number]


class Table:
    """The slots of one server. Each is lent to one request at a time."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(number) for number in range(count)]
        self._lent: set[int] = set()
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._slots)

    async def lend(self, tokens: TokenIds, tenant: str | None) -> tuple[Slot, int]:
        """Wait for a slot, and lend it. Return it as `choose` does."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._lent) < len(self._slots))
            free = (slot for slot in self._slots if slot.number not in self._lent)
            slot, common = choose(free, tokens, tenant)
            self._lent.add(slot.number)
            return slot, common

    async def lend_idle(self) -> list[Slot]:
        """Lend all slots that nobody uses and that hold something."""
        async with self._changed:
            idle = [slot for slot in self._slots if slot.held and slot.number not in self._lent]
            self._lent |= {slot.number for slot in idle}
            return idle

    async def give_back(self, slot: Slot) -> None:
        async with self._changed:
            slot.used = time.monotonic()
            self._lent.discard(slot.number)
            self._changed.notify_all()

    def is_another(self, states: Sequence[SlotState]) -> bool:
        """Whether the server was started anew since it was last looked at: tasks are numbered from 0 then."""
        tasks = {state.number: state.task for state in states}
        return len(states) != len(self) or any(tasks.get(slot.number, -1) < slot.task for slot in self._slots)

    def look(self, states: Sequence[SlotState]) -> None:
        """Forget what slots held that were changed by somebody else, or emptied by the server."""
        for state in states:
            slot = self._slots[state.number]
            if slot.number not in self._lent and (state.held, state.task) != (slot.held, slot.task):
                slot.now_holds(NOTHING, None, state.held)
                slot.task = state.task
