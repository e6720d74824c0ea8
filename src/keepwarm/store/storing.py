"""Store fresh KV. One thread skips stored blocks, copies the others and keeps them in RAM. Another one writes them to
disk and queues them for remote tiers. So copied blocks can be found before the disk has them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from keepwarm.core.blocks import TOKEN_BYTES, Block, PrefixNames
from keepwarm.core.identity import Namespace
from keepwarm.core.ports import KVSource
from keepwarm.errors import PurgedMeanwhile
from keepwarm.store.admin.purge_epochs import Epochs
from keepwarm.store.coming import TIMEOUT
from keepwarm.store.disk.maintenance import Maintenance
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.health import Health
from keepwarm.store.page_rests import StoredPages
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.remote.tiers import Remotes
from keepwarm.store.retention import Retention, Rules, Sightings
from keepwarm.store.runfile.codec import Coding, bytes_of, coded_runs
from keepwarm.store.runfile.layout import Run, StoredBlock, salts_of, stored_blocks

Copied = tuple[list[Run], bool]  # the runs that are left to keep, and whether on disk


@dataclass(frozen=True)
class Offer:
    """Consecutive blocks that a request offers to the store, as `Archive.put` describes them."""

    blocks: tuple[Block, ...]
    namespace: Namespace
    ids: tuple[bytes, ...] | None
    parent: bytes | None
    asked: bool
    epoch: int
    names: PrefixNames | None


class Storing:
    """Stores blocks in both tiers. `copy` runs in the copier's thread, `keep` in the writer's, `notify` in any."""

    def __init__(
        self,
        ram: RamTier,
        disk: DiskTier | None,
        health: Health,
        rules: Rules,
        maintenance: Maintenance,
        remotes: Remotes,
        bring: Callable[[bytes, int], None],
        epochs: Epochs,
        pages: StoredPages,
        coding: Coding | None = None,
    ) -> None:
        """`bring` loads the chain of a block into RAM if this many more bytes fit beside it (`Loading.bring`)."""
        self._ram = ram
        self._disk = disk
        self._health = health
        self._rules = rules
        self._maintenance = maintenance
        self._remotes = remotes
        self._bring = bring
        self._epochs = epochs
        self._pages = pages
        self._coding = coding
        self._sightings = Sightings()  # of an archive without a disk tier
        self._to_be_written: Counter[bytes] = Counter()  # blocks that wait for the disk; touched under the lock
        self._lock = threading.Condition()

    def copy(self, source: KVSource, offer: Offer, on_copied: Callable[[], None] | None) -> Copied:
        """Copy blocks, and keep them in RAM if their chain is there. Return the runs that are left to `keep`, and
        whether on disk. Never raises; `on_copied` is called once, whatever happens."""
        runs: list[Run] = []
        to_disk = False
        try:
            self._maintenance.heal()
            check = partial(self._epochs.check, offer.epoch, salts_of(offer.blocks))
            check()
            admitted = self._admitted(stored_blocks(offer.blocks, offer.ids, offer.parent), offer.asked, check)
            if admitted:
                run, to_disk = self._copy(source, offer, admitted)
                if run is not None:
                    runs = (
                        [run] if self._coding is None or run.geometry.is_state else coded_runs(run, self._coding.codec)
                    )
        except PurgedMeanwhile as error:
            self._health.dropped("storing a run", str(error))
        except Exception as error:
            self._health.failed("copying KV to store it", error)
        finally:
            self.notify(on_copied)
        if runs:
            self._health.worked("copying KV to store it")
            self._health.worked("queueing a write")
        for run in runs:
            self._into_ram(run, offer.epoch)
        if to_disk:
            self._count_waiting(runs, 1)
        return runs, to_disk

    def give_up(self, runs: Sequence[Run], to_disk: bool) -> None:
        """Note that these copies no longer wait for the disk. They stay in RAM."""
        if to_disk:
            self._count_waiting(runs, -1)

    def _count_waiting(self, runs: Sequence[Run], count: int) -> None:
        with self._lock:
            for block in (block for run in runs for block in run.blocks):
                self._to_be_written[block.id] += count
                if not self._to_be_written[block.id]:
                    del self._to_be_written[block.id]
            self._lock.notify_all()

    def wait_for_disk(self, ids: Collection[bytes]) -> bool:
        """Wait a moment for the blocks that are about to be written. Return True when there were any and the wait was
        long enough."""
        with self._lock:
            wanted = [block_id for block_id in ids if block_id in self._to_be_written]
            return bool(wanted) and self._lock.wait_for(
                lambda: not any(block_id in self._to_be_written for block_id in wanted), TIMEOUT
            )

    def keep_all(self, runs: Sequence[Run], to_disk: bool, epoch: int) -> None:
        """Keep copied runs on disk and in remote tiers, and in RAM if their chain must be loaded first."""
        try:
            for run in runs:
                self._keep(run, to_disk, epoch)
                if self._remotes and (whole := self._pages.whole(run)) is not None:
                    self._remotes.submit(whole, epoch)
        finally:
            self.give_up(runs, to_disk)

    def keep(self, run: Run, epoch: int) -> None:
        """Store a run from a remote tier, which was requested at `epoch`, in RAM and on disk."""
        self._keep(run, self._disk is not None and self._disk.space.fits(run.nbytes), epoch)

    def _keep(self, run: Run, to_disk: bool, epoch: int) -> None:
        self._maintenance.heal()
        if run.start and not self._in_ram(run.blocks):
            self._bring(run.parent, run.nbytes)
        self._into_ram(run, epoch)
        if to_disk:
            self._write(run, epoch)

    def _into_ram(self, run: Run, epoch: int) -> None:
        if not self._in_ram(run.blocks):
            ttl = self._rules.ttl
            kept = None if ttl is None else Retention.beginning(time.time(), ttl, 0)
            self._ram.put(run, kept, partial(self._epochs.allows, epoch, run.salts))

    def discard(self, ids: Sequence[bytes]) -> None:
        """See `Archive.discard`; in the writer's thread."""
        try:
            for block_id in ids:
                held = self._ram.find(block_id)
                kept = None if held is None else self._ram.retention(held[0].id)
                if held is not None and len(held[0].blocks) == 1 and not (kept and kept.priority):
                    self._ram.remove(held[0].id)
            if self._disk is not None:
                runs = {ref.run_id for ref in self._disk.find(ids).values()}
                pinned = {each for each in runs if (kept := self._disk.index.retention(each)) and kept.priority}
                self._health.count("discarded", len(self._disk.remove(runs - pinned)))
        except (sqlite3.Error, OSError) as error:
            self._health.failed("discarding a run", error)

    def is_found(self, runs: Sequence[Run]) -> bool:
        """Whether all copied runs can be found in RAM now."""
        return all(self._in_ram(run.blocks) for run in runs)

    def notify(self, on_copied: Callable[[], None] | None) -> None:
        """Tell the source's owner that it may change. An error of the callback is counted, not raised."""
        if on_copied is None:
            return
        try:
            on_copied()
        except Exception as error:
            self._health.failed("calling back after a copy", error)

    def _admitted(
        self, records: Sequence[StoredBlock], asked: bool, check: Callable[[], None]
    ) -> Sequence[StoredBlock]:
        """Return the leading part that the rules admit. Raises what `check` does."""
        if asked:
            return records
        if records[-1].end < self._rules.min_tokens:
            self._health.count("not_admitted")
            return ()
        if self._rules.admit == "always":
            return records
        new = [block.id for block in records if not self._is_stored(block.id)]
        known = self._sightings.note(new) if self._disk is None else self._disk.sight(new, check)
        unknown = [block.ordinal for block in records if block.id in new and block.id not in known]
        if unknown:
            self._health.count("not_admitted")
        return records[: unknown[0]] if unknown else records

    def _copy(self, source: KVSource, offer: Offer, records: Sequence[StoredBlock]) -> tuple[Run | None, bool]:
        """Copy the admitted blocks that are not stored, if any. Return them, and whether to write them to disk."""
        on_disk = self._on_disk([block.id for block in records])
        wanted = self._new(offer, records, on_disk)
        nbytes = self._bytes_of(source, wanted)
        follows = source.geometry.is_state and bool(wanted) and bool(self._on_disk([wanted[0].parent]))
        enough = bool(wanted) and (offer.asked or follows or self._unwritten(wanted) >= self._rules.min_write)
        to_disk = self._disk is not None and enough and self._disk.space.fits(nbytes)
        if not to_disk:
            in_ram = {block.id for block in records if self._ram.find(block.id) is not None}
            wanted = self._new(offer, records, on_disk | in_ram)
            nbytes = self._bytes_of(source, wanted)
            if nbytes > self._ram.cap and not self._remotes:
                if enough:
                    self._health.dropped("storing a run", f"{nbytes} bytes fit neither into RAM nor on disk")
                return None, False
        if not wanted:
            return None, False
        first = wanted[0]
        if first.start and not self._is_stored(first.parent) and not self._remotes.holds(first.parent):
            if source.geometry.is_state:
                self._health.count("not_admitted")  # its block was not admitted, or is gone
            else:
                self._health.dropped("storing a run", "the block it continues is not stored")
            return None, False
        if not self._in_ram(wanted):
            self._ram.make_room(nbytes, first.parent)  # before the copy is made, so that the cap always holds
        tokens = np.concatenate([block.tokens for block in offer.blocks[first.ordinal : wanted[-1].ordinal + 1]])
        own = tokens[first.start - first.page_start :]
        return Run.copy_from(source, wanted, own, offer.namespace.describe()), to_disk

    def _new(self, offer: Offer, records: Sequence[StoredBlock], stored: set[bytes]) -> Sequence[StoredBlock]:
        """Return the records from the first to the last one that is not stored. If another stored block holds the
        beginning of the first one's page, the first record is only the rest of it."""
        missing = [block.ordinal for block in records if block.id not in stored]
        if not missing:
            return ()
        first, *others = records[missing[0] : missing[-1] + 1]
        page, names = offer.blocks[first.ordinal], offer.names
        sealed = self._disk is not None and self._disk.files.key is not None  # its headers do not reveal token ids
        if names is None or sealed or self._coding is not None:
            return first, *others
        found = self._pages.continuing(page, names.keys.get(page.start, b""), but=first.id)
        refs, common = found or ((), 0)
        skip = min(common, page.length - 1)
        if not skip:
            return first, *others
        base = [ref for ref in refs if ref.start < page.start + skip][-1]
        return first.from_token(skip, page.tokens, base.id, names.at(page.start + skip)), *others

    def _unwritten(self, records: Sequence[StoredBlock]) -> int:
        """Number of tokens of these blocks, and of the runs that they stand on and only RAM holds."""
        tokens, parent = records[-1].end - records[0].start, records[0].parent
        while tokens < self._rules.min_write and not self._on_disk([parent]):
            held = self._ram.find(parent)
            if held is None:
                break
            tokens, parent = tokens + len(held[0].tokens), held[0].parent
        return tokens

    def _bytes_of(self, source: KVSource, blocks: Sequence[StoredBlock]) -> int:
        tokens = sum(block.length for block in blocks)
        return bytes_of(source.geometry, self._coding, blocks) + TOKEN_BYTES * tokens

    def _write(self, run: Run, epoch: int) -> None:
        """Write a run, after the runs that it stands on and only RAM holds (an earlier write may have failed)."""
        assert self._disk is not None
        chain = [run]
        while chain[-1].start and not self._disk.find([chain[-1].parent]):
            held = self._ram.find(chain[-1].parent)
            if held is None or held[0] in chain:
                break
            chain.append(held[0])
        for member in reversed(chain):
            if not self._disk.put(member, epoch):
                return
        if run.start and not run.geometry.is_state:
            self._maintenance.grew(run.id)

    def _is_stored(self, block_id: bytes) -> bool:
        return self._ram.find(block_id) is not None or bool(self._on_disk([block_id]))

    def _on_disk(self, ids: Sequence[bytes]) -> set[bytes]:
        """Return the blocks that are on disk, or will be in a moment."""
        if self._disk is None:
            return set()
        with self._lock:
            waiting = {block_id for block_id in ids if block_id in self._to_be_written}
        return waiting | set(self._disk.find(ids))

    def _in_ram(self, blocks: Sequence[StoredBlock]) -> bool:
        return all(self._ram.find(block.id) is not None for block in blocks)
