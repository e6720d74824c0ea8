"""The contents of an archive as people see them: entries, names, retention, counters, bundles."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from keepwarm.core.blocks import TokenIds
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import BlockRef
from keepwarm.core.results import Entry
from keepwarm.errors import BundleError, CorruptRun, PurgedMeanwhile, StoreError
from keepwarm.store.admin import listing
from keepwarm.store.admin.beginnings import Stretch, beginnings
from keepwarm.store.admin.bundle import Exported, Imported, export_bundle, import_bundle
from keepwarm.store.admin.headers import Header, headers
from keepwarm.store.admin.purge_epochs import Epochs
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.health import Health
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.remote.tiers import Remotes


class Contents:
    """RAM and disk of one archive. Safe for use from several threads."""

    def __init__(self, ram: RamTier, disk: DiskTier | None, health: Health, remotes: Remotes, epochs: Epochs) -> None:
        self._ram = ram
        self._disk = disk
        self._health = health
        self._remotes = remotes
        self._epochs = epochs
        self._lock = threading.Lock()
        self._names: dict[str, bytes] = {}  # used without a disk tier, or when its catalogue fails

    def name(self, name: str, leaf_id: bytes, epoch: int | None = None, tags: Collection[bytes] = ()) -> None:
        """Name the prompt that ends with a block; a name in use is moved. The request for it began at `epoch` (None:
        now) and is under the salts with these tags. Failures, and a purge since then, are counted, not raised."""
        epoch = self._epochs.now() if epoch is None else epoch
        check = partial(self._epochs.check, epoch, tags)
        try:
            with self._lock:
                check()
                self._names[name] = leaf_id
            self._remotes.name(name, leaf_id, partial(self._epochs.allows, epoch, tags))
            if self._disk is not None:
                self._disk.index.set_name(name, leaf_id, check)
        except PurgedMeanwhile as error:
            self._health.dropped("naming a run", str(error))
        except sqlite3.Error as error:
            self._health.failed("naming a run", error)

    def names(self) -> dict[str, bytes]:
        """Leaf block ids by name."""
        if self._disk is None:
            return dict(self._names)
        return self._health.asking(self._disk.index.names, self._names)

    def forget_names(self) -> None:
        """After a purge, forget here the names of prompts that are no longer in RAM. A catalogue has its own names."""
        with self._lock:
            stored = {block.id for run in self._ram.runs() for block in run.blocks}
            self._names = {name: leaf for name, leaf in self._names.items() if leaf in stored}

    def entries(self) -> list[Entry]:
        """One entry per stored run, the most recently used first. Empty when the catalogue fails."""
        return self._health.asking(lambda: listing.entries(self._ram, self._disk, self.names()), [])

    def tree(self) -> list[listing.Node]:
        """The entries, each with the run it continues and the salts it is under. Empty when the catalogue fails."""
        return self._health.asking(lambda: listing.tree(self._ram, self._disk, self.names()), [])

    def beginnings(self, nodes: Iterable[listing.Node]) -> list[Stretch]:
        """Return these runs as a tree of shared beginnings, which branches where prompts differ. Reads headers."""
        return beginnings(nodes, self._tokens_of)

    def headers(self, origin: Mapping[str, Any]) -> list[Header]:
        """Return the stored beginnings that prompts share or that have a name, by a described namespace's model and
        arithmetic, the most recently used first. Empty without a disk tier, and when the catalogue fails."""
        if self._disk is None:
            return []
        index = self._disk.index
        return self._health.asking(lambda: headers(index, origin), [])

    def _tokens_of(self, node: listing.Node) -> TokenIds | None:
        run = self._ram.get(node.entry.id)
        if run is not None or self._disk is None:
            return None if run is None else run.tokens
        try:
            return self._disk.files.header(node.entry.id).tokens
        except CorruptRun:
            return None

    def show(self, wanted: str) -> dict[str, Any]:
        """Return one run in full, JSON-ready. `wanted`: a name, or the first 4 or more digits of a run or block id.

        Raises StoreError when no run or more than one fits, or the catalogue fails.
        """
        try:
            return listing.show(self._ram, self._disk, self.names(), wanted)
        except sqlite3.Error as error:
            raise StoreError(f"the catalogue cannot be read: {error}") from error

    def remove(self, run_id: str) -> int:
        """See `Archive.remove`, which first waits for queued writes."""
        try:
            family = listing.descendants(self._ram, self._disk, run_id)
            gone = {row.id for row in self._disk.remove(family)} if self._disk is not None else set()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"run {run_id} cannot be removed: {error}") from error
        return len(gone | {member for member in reversed(family) if self._ram.remove(member)})

    def refuse(self, ref: BlockRef, error: CorruptRun) -> None:
        """Take the run of a block out of use in the tiers here and in the one where it was found. Its bytes pass
        verification, but the caller cannot use them."""
        held, tier = self._ram.find(ref.id), self._remotes.tier(ref.tier)
        if held is not None:
            self._ram.remove(held[0].id)
        found = {} if self._disk is None else self._disk.find([ref.id])
        for each in found.values():
            assert self._disk is not None
            self._disk.quarantine(each.run_id, CorruptRun(f"run {each.run_id}: {error}"))
        if tier is not None:
            tier.quarantine(ref.run_id, CorruptRun(f"run {ref.run_id}: {error}"))
        if not found and tier is None:
            self._health.count("corrupt")

    def retain(self, target: str | bytes, ttl: float, priority: int = 1, *, public: bool = True) -> int:
        """Keep a stored prompt for `ttl` seconds; `target` is its name or the id of its last block. Returns the number
        of runs that hold it.

        With a priority of 1 or more the prompt is pinned until then: it is evicted last, when nothing else is left, the
        lowest priority first. With 0 it has a time to live instead: after `ttl` seconds without use it is evicted
        first. Without `public`, its runs that are under no salt stay as they are: a tenant, who shares them, must not
        end or shorten what the operator asked for. The tenant does not need it, since a run that others continue is
        never evicted. Raises StoreError when the prompt is not stored or the catalogue fails, and ValueError for a time
        that is not positive and finite.
        """
        leaf = self.names().get(target) if isinstance(target, str) else target
        if leaf is None:
            raise StoreError(f"nothing is named {target!r}; `keepwarm ls` lists the names")
        kept = {run.id: None for run in self._ram.retain_chain(leaf, ttl, priority, public=public)}
        if self._disk is not None:
            try:
                kept.update(dict.fromkeys(self._disk.index.retain(leaf, ttl, priority, public=public)))
            except sqlite3.Error as error:
                raise StoreError(f"the catalogue cannot be written: {error}") from error
        if not kept:
            raise StoreError(f"{target if isinstance(target, str) else target.hex()} is not stored; warm it again")
        return len(kept)

    def export(
        self,
        wanted: str,
        file: Path,
        sign_key: Path | None = None,
        note: Mapping[str, Any] | None = None,
        epoch: int | None = None,
    ) -> Exported:
        """Write a stored prompt (a name, or digits of a run's or block's id, as for `show`) into a bundle. The export
        began at `epoch` of the store (None: now).

        Raises StoreError, PurgedMeanwhile when the prompt was purged since then, and ConfigError for a bad key. See
        `store.admin.bundle`.
        """
        epoch = self._epochs.now() if epoch is None else epoch
        check = partial(self._epochs.check, epoch)
        disk = self._on_disk("exported")
        try:
            names = self.names()
            leaf = listing.leaf(self._ram, disk, names, wanted)
            own = [name for name, at in names.items() if at == leaf]
            return export_bundle(disk, leaf, own, file, sign_key, note, check)
        except (sqlite3.Error, OSError) as error:
            raise BundleError(f"{wanted!r} cannot be exported to {file}: {error}") from error

    def import_(
        self,
        file: Path,
        *,
        verify_key: Path | None = None,
        model: Mapping[str, Any] | None = None,
        geometry: KVGeometry | None = None,
        epoch: int | None = None,
    ) -> Imported:
        """Store a bundle's prompt and names. `model` is a described model identity that it must have, and `geometry`
        that model's. The import began at `epoch` of the store (None: now).

        Raises StoreError, PurgedMeanwhile when everything was purged since then, and ConfigError for a bad key. See
        `store.admin.bundle`.
        """
        epoch = self._epochs.now() if epoch is None else epoch
        disk = self._on_disk("imported")
        try:
            return import_bundle(disk, file, epoch, verify_key=verify_key, model=model, geometry=geometry)
        except (sqlite3.Error, OSError) as error:
            raise BundleError(f"{file} cannot be imported: {error}") from error

    def _on_disk(self, what: str) -> DiskTier:
        if self._disk is None:
            raise BundleError(f"nothing can be {what}: this archive has no folder")
        return self._disk

    def size_on_disk(self) -> int:
        """Bytes of every file in the store's folder; 0 without one."""
        return 0 if self._disk is None else self._disk.size_on_disk()

    def counters(self) -> dict[str, int]:
        """Counters of all processes that ever used the store, as merged so far. There are none without a folder."""
        return {} if self._disk is None else self._health.asking(self._disk.index.counters, {})

    def count(self, name: str, delta: int = 1) -> None:
        """Add to a counter that is merged into the store's at the next flush."""
        if self._disk is not None:
            self._disk.index.database.count(name, delta)
