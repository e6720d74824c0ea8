"""Keeps the slots of one model of a llama-server: what happens before a request goes on, and after its answer.

Before: the request's tokens are asked for, a slot is chosen, and if the store holds more of the prompt than the slot,
that is restored. After: what the slot holds now is saved and stored, if enough of it is new. Whatever fails is counted
and logged, and the request goes on without the cache.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from keepwarm.core.blocks import TokenIds, common_length
from keepwarm.core.identity import Namespace
from keepwarm.core.schedule import PAGE_TOKENS
from keepwarm.errors import ConfigError, KeepwarmError
from keepwarm.integrations.kept import Kept
from keepwarm.integrations.llamacpp.form import Unreadable
from keepwarm.integrations.llamacpp.memory import StateSource
from keepwarm.integrations.llamaserver.identity import namespace_of
from keepwarm.integrations.llamaserver.probe import Probe, Unusable, clear, file_in, probe
from keepwarm.integrations.llamaserver.server import LlamaServer, Refused
from keepwarm.integrations.llamaserver.slot_file import SlotFile, SlotPlace, read_slot
from keepwarm.integrations.llamaserver.table import NOTHING, Slot, Table
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

FAILURES = (
    Refused,
    Unreadable,
    KeepwarmError,
    OSError,
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
)
_COPIED = 60.0  # seconds until the store has copied a state
_UNREAD = 3  # states in another form, after which no more are saved


@dataclass(frozen=True)
class Settings:
    """Of `keepwarm slots`, for every model."""

    folder: Path  # of the server's saved slots
    salt: str | None = None
    save_tokens: int = PAGE_TOKENS  # a slot is saved if so many of its tokens are not stored
    model_file: Path | None = None


@dataclass(frozen=True)
class Known:
    """What a server saves, and the names of its KV. It is asked anew after every restart."""

    probe: Probe
    namespace: Namespace


@dataclass
class Lease:
    """A slot lent to a request, and what is known of that. `predicted` tokens were answered, if the server told."""

    table: Table
    known: Known | None  # None: nothing is kept
    slot: Slot
    tokens: TokenIds
    tenant: str | None
    epoch: int
    common: int
    restored: int = 0
    predicted: int | None = None


class Keeper:
    """One model of a server."""

    def __init__(self, server: LlamaServer, archive: Archive, settings: Settings, counts: Counter[str]) -> None:
        self._server = server
        self._archive = archive
        self._settings = settings
        self._counts = counts
        self._table = Table(0)
        self._known: Known | None = None
        self._context = 0  # tokens of a slot
        self._attaching = asyncio.Lock()
        self._saving = asyncio.Semaphore(2)  # states in memory
        self._unread = 0  # states in a row that had another form than the first one
        self.said = "the server was not asked yet"

    # ---- the server ----

    async def attach(self) -> None:
        """Ask the server what it is, and what it saves. Raises Refused if it does not answer."""
        self.forget()
        props = await self._server.props()
        self._context = int(props["default_generation_settings"]["n_ctx"])
        table = Table(int(props["total_slots"]))
        if not len(table):
            raise Refused(0, "the server has no slots")
        await asyncio.to_thread(clear, self._settings.folder)
        try:
            found = await probe(self._server, len(table) - 1, self._settings.folder)
            adapters = await self._server.adapters()
            named = partial(namespace_of, props, adapters, found.form, found.digest, self._settings.model_file)
            self._known, self._unread = Known(found, await asyncio.to_thread(named)), 0
            self.said = _described(found, len(table), str(props["build_info"]))
        except (Unusable, ConfigError, OSError) as why:
            self._keep_nothing(why)
        except Refused as error:
            if not error.status:
                raise
            self._keep_nothing(error)
        table.look(await self._server.slots())
        self._table = table

    def _keep_nothing(self, why: BaseException) -> None:
        self._known, self.said = None, f"nothing is kept: {why}"
        log.warning("%s", self.said)

    def forget(self) -> None:
        """Ask the server anew before the next request. Nothing of the present ones is stored."""
        self._known, self._table = None, Table(0)

    async def _look(self) -> None:
        """Look at the server's slots, and ask what it is if it was started anew. Raises Refused."""
        async with self._attaching:
            states = await self._server.slots()
            if self._table.is_another(states):
                await self.attach()
            else:
                self._table.look(states)

    # ---- before a request ----

    async def lend(
        self, path: str, body: Mapping[str, Any], tenant: str | None, caller: Mapping[str, str]
    ) -> Lease | None:
        """Return a slot that holds as much of a request's prompt as can be found. None: the request goes on without the
        cache."""
        try:
            epoch = await asyncio.to_thread(self._archive.epoch)
            _, tokens = await asyncio.gather(self._look(), self._server.tokens(path, body, caller))
            if tokens is None or not len(tokens):
                return None
            lease = await self._lent(tokens, tenant, epoch)
        except FAILURES as error:
            self._failed("lookup", error)
            return None
        table, slot = lease.table, lease.slot
        try:
            await self._fill(lease)
        except FAILURES as error:
            self._failed("restore", error)
            if slot.held and slot.tenant != tenant:  # it could not be emptied
                await table.give_back(slot)
                return None
        except BaseException:
            await table.give_back(slot)
            raise
        self._counts["prompt_tokens"] += len(tokens)
        self._counts["slot_tokens"] += 0 if lease.restored else lease.common
        self._counts["restored_tokens"] += lease.restored
        return lease

    async def _lent(self, tokens: TokenIds, tenant: str | None, epoch: int) -> Lease:
        """Lend a slot. What is known of the server may be forgotten while a request waits: then it is asked anew, since
        nobody would ever give a slot of no table back. Raises Refused."""
        while True:
            known, table = self._known, self._table
            if len(table):
                slot, common = await table.lend(tokens, tenant)
                if table is self._table:
                    return Lease(table, known, slot, tokens, tenant, epoch, common)
                await table.give_back(slot)
            await self._look()

    async def _fill(self, lease: Lease) -> None:
        slot = lease.slot
        if slot.held and (slot.tenant != lease.tenant or not lease.common):
            await self._server.erase(slot.number)  # nobody may see in his times what another one asked
            slot.now_holds(NOTHING, None)
        if lease.known is None or len(lease.tokens) - lease.common <= PAGE_TOKENS:
            return
        path = file_in(self._settings.folder)
        try:
            if await asyncio.to_thread(self._find, lease, lease.known, path):
                slot.now_holds(NOTHING, None)
                lease.common = 0
                held = await self._restored(lease, path.name)
                if lease.table.is_another(await self._server.slots()):
                    await self._server.erase(slot.number)
                    raise Refused(0, "the server was started anew meanwhile")
                lease.common = lease.restored = held
                slot.now_holds(lease.tokens[:held], lease.tenant)
        finally:
            path.unlink(missing_ok=True)

    async def _restored(self, lease: Lease, name: str) -> int:
        """Restore a file. Slots may share the room of one cache: if there is none left, idle ones are emptied. What
        they hold is in the store, too."""
        try:
            return await self._server.restore(lease.slot.number, name)
        except Refused:
            idle = await lease.table.lend_idle()
            if not idle:
                raise
            try:
                for slot in idle:
                    await self._server.erase(slot.number)
                    slot.now_holds(NOTHING, None)
            finally:
                for slot in idle:
                    await lease.table.give_back(slot)
            return await self._server.restore(lease.slot.number, name)

    def _kept(self, lease: Lease, known: Known, path: Path) -> Kept:
        salts = [each for each in (self._settings.salt, lease.tenant) if each]
        place = SlotPlace(known.probe.form, known.probe.head, path)
        return Kept(self._archive, known.namespace, place, "\n".join(salts) if salts else None)

    def _find(self, lease: Lease, known: Known, path: Path) -> dict[str, int]:
        """Write the stored beginning of a prompt to a file, if it is worth it."""
        kept = self._kept(lease, known, path)
        restore = kept.restore_whole if known.probe.form.has_tail else kept.restore
        return restore(lease.tokens, lease.common + PAGE_TOKENS - 1)

    # ---- after its answer ----

    async def done(self, lease: Lease) -> None:
        """Save what the slot holds now, if enough of it is new, and give the slot back."""
        slot, saved = lease.slot, None
        try:
            states = await self._server.slots()
            if lease.table.is_another(states):
                return
            state = states[slot.number]
            slot.now_holds(lease.tokens[: state.held], lease.tenant, state.held)
            slot.task = state.task
            if lease.known is not None and await asyncio.to_thread(self._is_new, lease, lease.known, state.held):
                saved = await self._saved(lease)
        except FAILURES as error:
            slot.now_holds(NOTHING, None, 1)  # not known
            self._failed("save", error)
            return
        finally:
            await lease.table.give_back(slot)
        if saved is not None:
            await self._keep(lease, saved)

    def _is_new(self, lease: Lease, known: Known, held: int) -> bool:
        """Whether enough of what a slot holds is not stored."""
        stored = self._kept(lease, known, self._settings.folder).find(lease.tokens)[1]
        return held - stored >= self._settings.save_tokens

    async def _saved(self, lease: Lease) -> SlotFile | None:
        """Let the server write the slot, and read it. None if it does not hold this request's tokens."""
        path = file_in(self._settings.folder)
        async with self._saving:
            await asyncio.to_thread(clear, self._settings.folder)
            try:
                if not await self._server.save(lease.slot.number, path.name):
                    return None  # the server emptied it for another request
                saved = await asyncio.to_thread(read_slot, path)
            finally:
                path.unlink(missing_ok=True)
        held, asked = saved.tokens, lease.tokens
        own = common_length(held, asked) == min(len(held), len(asked))
        lease.slot.now_holds(held if own else NOTHING, lease.tenant if own else None, len(held))
        if not own or self._is_shifted(lease, len(held)):
            self._counts["foreign"] += 1
            return None
        return saved

    def _is_shifted(self, lease: Lease, held: int) -> bool:
        """Whether the server may have dropped tokens from the middle of the context (`--context-shift`): what follows
        them was computed after others."""
        if lease.predicted is None:
            return held > self._context // 2
        return held < len(lease.tokens) + lease.predicted - 1

    async def _keep(self, lease: Lease, saved: SlotFile) -> None:
        try:
            async with self._saving:
                if lease.known is None or lease.known is not self._known:
                    return  # the server was started anew, perhaps with another model, or its adapters changed
                await asyncio.to_thread(self._put, lease, lease.known, saved)
            self._counts["saves"] += 1
            self._unread = 0
        except FAILURES as error:
            self._failed("store", error)
            self._unread += isinstance(error, Unreadable)
            if self._unread == _UNREAD:
                self._keep_nothing(error)

    def _put(self, lease: Lease, known: Known, saved: SlotFile) -> None:
        """Store a saved slot, and wait until it is on disk."""
        state, copied = known.probe.state_of(saved), threading.Event()
        kept = self._kept(lease, known, self._settings.folder)
        kept.put(StateSource(state), state.tail, saved.tokens, lease.epoch, copied.set)
        copied.wait(_COPIED)
        self._archive.flush()

    def _failed(self, what: str, error: BaseException) -> None:
        self._counts[f"{what}_failures"] += 1
        log.warning("a request goes on without the cache (%s): %s", what, error or type(error).__name__)


def _described(found: Probe, slots: int, build: str) -> str:
    size = found.form.geometry.bytes_per_token
    if not found.form.has_tail:
        return (
            f"{slots} slots of llama-server {build}, {size:,} bytes a token, reused up to the first token that differs"
        )
    return (
        f"{slots} slots of llama-server {build}. The state of this model cannot be cut, and the server does not save "
        "its checkpoints: a prompt is continued from the end of an earlier answer only"
    )
