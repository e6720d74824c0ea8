"""The archive: RAM over disk over remote tiers. It finds, loads and stores blocks. Its failures reach no request."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from keepwarm.core.blocks import Block, PrefixNames, TokenIds
from keepwarm.core.identity import Namespace, salt_tag
from keepwarm.core.ports import BlockRef, Bytes, KVSink, KVSource
from keepwarm.core.unclosed import closing, nothing
from keepwarm.errors import CorruptRun, StoreError
from keepwarm.store.admin import listing
from keepwarm.store.admin.contents import Contents
from keepwarm.store.admin.purge import Purged, Purging
from keepwarm.store.admin.purge_epochs import EVERYTHING, Epochs
from keepwarm.store.disk.maintenance import Maintenance
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.disk.timeouts import SECONDS, BoundedCalls
from keepwarm.store.eviction import policy
from keepwarm.store.handover import Handover
from keepwarm.store.health import Health
from keepwarm.store.loading import Loading
from keepwarm.store.local import Local
from keepwarm.store.page_rests import StoredPages
from keepwarm.store.ram.registered import RegisteredRam
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.tier import RemoteTier
from keepwarm.store.remote.tiers import Remotes, open_remotes
from keepwarm.store.retention import Rules
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.layout import Run, new_run_id
from keepwarm.store.storing import Offer, Storing

_Result = TypeVar("_Result")
OpenRemotes = Callable[[Callable[[bytes], Run | None], Epochs, Callable[[Collection[bytes]], bool]], Remotes]


class Archive:
    """KV blocks in RAM and, if a folder is given, on disk. Implements `core.ports.BlockIndex`.

    Safe for use from several threads. One background thread copies, another one writes; open an archive after forking,
    not before. If it is not closed, it is closed when the program ends (`core.unclosed`).
    """

    def __init__(
        self,
        ram: RamTier,
        disk: DiskTier | None,
        health: Health,
        rules: Rules,
        coding: Coding | None = None,
        remotes: OpenRemotes = lambda fetch, epochs, on_purged: Remotes(),
    ) -> None:
        self._ram = ram
        self._disk = disk
        self._health = health
        self.epochs = Epochs(None) if disk is None else disk.epochs
        self.remotes = remotes(self._fetch, self.epochs, lambda tags: self._purging.follow(tags))
        self.contents = Contents(ram, disk, health, self.remotes, self.epochs)
        self._purging = Purging(ram, disk, health, self.epochs, self.contents, self.remotes)
        self._loading = Loading(ram, disk, health, self.remotes, self.epochs, coding)
        self._maintenance = Maintenance(disk, health)
        self._local = Local(ram, disk, lambda ids: self._handover.wait_for_disk(ids))
        self._pages = StoredPages(ram, disk, self._local.find)
        bring = self._loading.bring
        self._storing = Storing(
            ram, disk, health, rules, self._maintenance, self.remotes, bring, self.epochs, self._pages, coding
        )
        self._handover = Handover(self._storing, health, written=self._purging.finish, idle=self._idle, ended=self._end)
        self._unclosed = closing(self, Archive.close)
        self._purging.begin()

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        max_ram: int,
        max_disk: int,
        key: bytes | None = None,
        rules: Rules | None = None,
        timeout: float = SECONDS,
        coding: Coding | None = None,
        remotes: Sequence[str] = (),
        limits: Limits | None = None,
        map_files: bool = False,
        register: Callable[[Bytes], object] | None = None,
    ) -> Archive:
        """Open or create an archive. Caps are in bytes. `path` None keeps KV only in this process. `key` is the key of
        an encrypted store. `rules` say what is stored and what is evicted first. `timeout` is how many seconds a
        request waits for a folder that does not answer. With `coding`, KV is kept encoded in every tier. `remotes` are
        URLs of remote tiers, asked in this order, and `limits` are their limits. With `map_files`, files are used in
        place. `register` is called with the bytes of each large run in RAM.

        Raises StoreNotWritable, StoreUnusable, StoreTooNew, StoreLocked, StoreFull, and ConfigError for a bad URL.
        """
        health = Health()
        secret = StoreKey(key) if key is not None and (path is not None or remotes) else None
        disk = None
        if path is not None:
            disk = DiskTier.open(
                path,
                max_disk,
                health=health,
                key=secret,
                rules=rules,
                bounded=BoundedCalls(timeout),
                coding=coding,
                map_files=map_files,
            )
        if disk is not None:
            index = disk.index  # its database is replaced when it heals
            health.also = lambda name, delta: index.database.count(name, delta)
        rules = rules or Rules()
        chosen = policy(rules.ram_policy, max_ram)
        ram = RegisteredRam(max_ram, register, policy=chosen) if register else RamTier(max_ram, policy=chosen)
        try:
            return cls(
                ram,
                disk,
                health,
                rules,
                coding,
                lambda fetch, epochs, purged: open_remotes(
                    remotes, limits or Limits(), health, secret, fetch, epochs, purged, coding=coding
                ),
            )
        except BaseException:
            if disk is not None:
                disk.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # Epochs, and what may be stored

    def epoch(self) -> int:
        """Return the store's epoch. A request that may store something (`put`) takes it when it begins. First, what any
        process has purged is forgotten here, so that no later lookup finds it. Usually only reads shared memory."""
        return self._purging.epoch()

    def epoch_known(self) -> int | None:
        """Return the epoch, or None if something was purged since the last `epoch`. Calls nothing that could wait."""
        return self._purging.epoch_known()

    def allows(self, epoch: int, tags: Collection[bytes]) -> bool:
        """Whether data of a request that began at `epoch` may be kept under the salts with these tags."""
        return self.epochs.allows(epoch, tags)

    def room(self, part: str, need: int) -> AbstractContextManager[None]:
        """Keep room under `max_disk` for a part of the folder other than KV: see `store.disk.space.Space.room`."""
        return nullcontext() if self._disk is None else self._disk.space.room(part, need)

    def on_purge(self, told: Callable[[frozenset[bytes]], None]) -> None:
        """Set a function that gets the tags of salts whose purge began, here or elsewhere. It is called, in any thread,
        before a later request gets its epoch."""
        self._purging.on_purge = told

    def rest_while(self, resting: Callable[[], float]) -> None:
        """Delay single writes while `resting` returns more than 0 seconds, by 0.1 seconds at most."""
        self._handover.rest_while(resting)

    def hurry(self) -> None:
        """Do not delay copying any longer: a request waits until the blocks of a `put` can be found."""
        self._handover.copier.hurry()

    # core.ports.BlockIndex

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """Return the longest leading part of `ids` that is stored, each block in its fastest tier. Writes nothing."""
        refs = self._local.chain(ids)
        if self.remotes and len(refs) < len(ids):
            refs += self.remotes.lookup(ids[len(refs) :])
            if len(refs) < len(ids):
                refs += self._local.chain(ids[len(refs) :])
        return refs

    def find(self, ids: Sequence[bytes], *, far: bool = False) -> dict[bytes, BlockRef]:
        """Return the blocks that are stored, each in its fastest tier; remote tiers only if `far`. Writes nothing."""
        found = self._local.find(ids)
        if far and self.remotes and (missing := [block_id for block_id in ids if block_id not in found]):
            found = self.remotes.find(missing) | found
        return found

    def children(self, prefix: bytes, *, inside: bool = False, most: int | None = None) -> tuple[BlockRef, ...]:
        """See `core.ports.BlockIndex`. Each is in its fastest tier; remote tiers are asked when there is none here."""
        here = self._local.children(prefix, most)
        return here or (() if inside else self.remotes.children(prefix)[:most])

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids that a block was computed for; None when it is gone or unreadable."""
        return self.remotes.token_ids(ref) if ref.tier in self.remotes.names else self._pages.token_ids(ref)

    def continuing(self, block: Block, key: bytes) -> tuple[tuple[BlockRef, ...], int] | None:
        """See `core.ports.BlockIndex`. Remote tiers are not asked: a round trip costs more than part of a block."""
        return self._pages.continuing(block, key)

    def beginnings(self, rests: Sequence[tuple[Block, BlockRef, bytes]]) -> list[tuple[BlockRef, ...] | None]:
        """See `core.ports.BlockIndex`."""
        return self._pages.beginnings(rests)

    def arrivals(self) -> int:
        """See `core.ports.BlockIndex`."""
        return self._handover.coming.arrivals

    def arrives(self, block: Block, common: int, since: int | None = None) -> bool:
        """See `core.ports.BlockIndex`."""
        return self._handover.coming.wait(block, common, since)

    # Loading

    def load(self, refs: Sequence[BlockRef], tokens: TokenIds, end: int, sink: KVSink) -> dict[str, int]:
        """Load positions `[refs[0].start, end)` into the sink, verified. Return the number of tokens by tier.

        A sink may defer reads from disk (`KVSink.defer`); the errors below are then raised when it asks for a layer.

        `refs` are consecutive and `end` lies in the last one; `tokens` are the expected ids of exactly that range. The
        sink's methods are called only from this thread. Raises CorruptRun after the damaged run was taken out of use,
        and also when a run was evicted since the lookup; a new lookup finds what is left. The sink may then hold
        unverified bytes. After StoreStalled, which is also a CorruptRun, it may still be written to. Raises ValueError
        when the arguments do not fit each other.
        """
        return self._loading.load(refs, tokens, end, sink)

    def promote(self, run_ids: Iterable[str]) -> None:
        """Read runs from disk into RAM, verified, in the background. Dropped when the writer is busy."""
        wanted = [run_id for run_id in dict.fromkeys(run_ids) if self._ram.get(run_id) is None]
        if wanted and self._disk is not None and self._ram.cap > 0:
            self._handover.writer.submit(lambda: self._loading.promote(wanted))

    def pull(self, refs: Iterable[BlockRef], epoch: int | None = None) -> None:
        """Copy runs from remote tiers into RAM and onto disk, in the background. The request began at `epoch` (None:
        now). Runs in other tiers are skipped."""
        began = self.epoch() if epoch is None else epoch
        for run_id, name in {ref.run_id: ref.tier for ref in refs}.items():
            if (tier := self.remotes.tier(name)) is not None:
                self._handover.writer.submit(partial(self._pull, tier, run_id, began))

    def _pull(self, tier: RemoteTier, run_id: str, epoch: int) -> None:
        try:
            self._storing.keep(replace(tier.read_run(run_id), id=new_run_id()), epoch)
        except CorruptRun as error:
            tier.quarantine(run_id, error)

    def replicate(self, ids: Sequence[bytes], epoch: int | None = None) -> None:
        """Copy the blocks of a stored chain to the remote tiers that do not hold them, in the background. The request
        began at `epoch` (None: now)."""
        if self.remotes:
            taken, began = tuple(ids), self.epoch() if epoch is None else epoch
            self._handover.writer.submit(lambda: self.remotes.replicate(taken, self._fetch, began))

    def _fetch(self, block_id: bytes) -> Run | None:
        """Return the run that holds a block, from RAM or disk, in the form that a remote tier takes."""
        found = self._pages.read(block_id)
        return None if found is None else self._pages.whole(found[0])

    def limit_ram(self, nbytes: int) -> None:
        """Set the byte cap of KV in RAM anew; what is beyond it is evicted."""
        self._ram.cap = nbytes
        self._ram.make_room(0, b"")

    def clear_ram(self) -> None:
        """Drop everything in RAM; the disk keeps its runs. For measurements, and to free memory."""
        for run in self._ram.runs():
            self._ram.remove(run.id)

    # Storing

    def put(
        self,
        source: KVSource,
        blocks: Sequence[Block],
        namespace: Namespace,
        ids: Sequence[bytes] | None = None,
        on_copied: Callable[[], None] | None = None,
        *,
        parent: bytes | None = None,
        asked: bool = False,
        epoch: int | None = None,
        names: PrefixNames | None = None,
    ) -> None:
        """Store consecutive blocks in the background; returns at once and never raises for a store's failure.

        `ids` are the blocks' names if they are not the exact ones (derived blocks); `parent` is then the id of the
        block before the first, if that is not its exact parent. `source` must stay readable until `on_copied` is
        called: always once, from the thread that copies, or from this one when the write is dropped because 64 are
        pending. Stored blocks are skipped. The rules of admission do not apply to blocks that a user `asked` to store.
        Nothing is stored under a salt that was purged since `epoch`, when the request began (None: now). With `names`,
        the prefix names of the blocks' prompt, a page whose beginning is stored already is stored from where it differs
        (`store.page_rests`); without, as a whole, as foreign engines need it.
        """
        began = self.epoch() if epoch is None else epoch
        offer = Offer(tuple(blocks), namespace, None if ids is None else tuple(ids), parent, asked, began, names)
        copy = partial(self._storing.copy, source, offer, on_copied)
        if not offer.blocks or not self._handover.put(offer.blocks, copy, began, at_once=on_copied is not None):
            self._storing.notify(on_copied)

    def _idle(self) -> None:
        self._maintenance.idle()
        self.epoch()
        self._purging.finish()

    def flush(self) -> None:
        """Wait until everything put so far is durable (or dropped, see `stats`); merge access times and counters."""
        self._handover.flush()
        self._maintenance.merge()
        self.epoch()
        self.remotes.flush()

    def close(self, timeout: float | None = None) -> bool:
        """Flush and stop, within `timeout` seconds if given. Return False when that is not done by then; it goes on in
        the background. Later puts are dropped; a second call does nothing."""
        self._unclosed.detach()
        return self._handover.close(timeout)

    def let_go(self, first: Callable[[], None] = nothing) -> None:
        """Flush and stop without waiting, after `first`, when the archive's owner is garbage-collected. The end of the
        program waits for it."""
        self._handover.let_go(first)

    def _end(self) -> None:
        """The last thing that the writer's thread does."""
        self.remotes.close()
        if self._disk is not None:
            self._disk.close()

    # Asking

    def compact(self) -> int:
        """Merge chains of small runs into larger files. Return how many files were replaced. Waits for queued writes.

        Raises StoreError when the catalogue or the folder fails.
        """
        try:
            return self._handover.wait_for(self._maintenance.compact)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the store cannot be compacted: {error}") from error

    def namespaces(self) -> dict[str, dict[str, Any]]:
        """Descriptions of every namespace that was stored, by hex digest."""
        return listing.namespaces(self._ram, self._disk, self._health)

    def find_content(self, content_id: bytes) -> list[dict[str, Any]]:
        """Stored blocks with these tokens, whatever came before them: `namespace` (description), `id`, `prefix`,
        `run_id`, `start`, `length`, `parent_exact`, `parent_prefix` (ids as bytes)."""
        return listing.content(self._ram, self._disk, self._health, content_id)

    def eviction_reason(self, block_id: bytes) -> str | None:
        """Why a block is no longer stored ("evicted", "expired", "corrupt"); None when that was not noted."""
        return listing.eviction_reason(self._ram, self._disk, self._health, block_id)

    def namespace_of(self, ref: BlockRef) -> Mapping[str, Any] | None:
        """The described namespace of a stored block; None when it is gone or unreadable."""
        return listing.namespace_of(self._ram, self._disk, ref)

    def remove(self, run_id: str) -> int:
        """Remove a run and every run that continues it, from both tiers. Return how many there were.

        Raises StoreError when the disk tier refuses.
        """
        self._handover.flush()  # so that no queued write adds to it later
        return self.contents.remove(run_id)

    def discard(self, ids: Sequence[bytes]) -> None:
        """Remove blocks, unless pinned, in the background: they must be runs of their own that no other continues."""
        taken = tuple(ids)
        self._handover.writer.submit(lambda: self._storing.discard(taken))

    def purge(self, *salt_keys: bytes) -> Purged:
        """Remove everything under these salts (`core.identity.salt_key`) from RAM, disk and remote tiers. Nothing of it
        is left in the folder, and no process later stores data of a request that began before. Other processes follow
        at their next request, and replicas that share a remote tier when they next look.

        Raises StoreError when the disk or a remote tier fails. Then nothing is stored under these salts until a second
        call, or the next process that opens the store, has finished the work.
        """
        self._handover.flush()  # so that earlier puts are counted
        return self._purging.purge({salt_tag(key) for key in salt_keys})

    def purge_all(self) -> Purged:
        """Purge everything that is stored, under salts and under none. See `purge`."""
        self._handover.flush()
        return self._purging.purge({EVERYTHING})

    def stats(self) -> dict[str, Any]:
        """Present sizes of the tiers, and counts of this process."""
        return listing.stats(self._ram, self._disk, self._health, self.remotes.stats())
