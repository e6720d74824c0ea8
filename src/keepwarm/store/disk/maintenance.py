"""Work of the writer's thread while nothing waits for it: merging notes, healing, checking a large store,
compacting."""

from __future__ import annotations

import sqlite3
import time

from keepwarm.store.disk.compaction import Compaction
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.health import Health

_MERGE_SECONDS = 30.0
_CHAINS_NOTED = 256


class Maintenance:
    """Housekeeping of an archive. Every method runs in the writer's thread, except `merge`, which may run in any."""

    def __init__(self, disk: DiskTier | None, health: Health) -> None:
        self._disk = disk
        self._health = health
        self._grown: dict[str, None] = {}  # stored runs that continue others and are not checked yet
        self._merged_at = time.monotonic()
        self._looked_through = False

    def merge(self) -> None:
        """Write access times and counters."""
        if self._disk is None:
            return
        self._merged_at = time.monotonic()
        try:
            self._disk.index.database.merge()
        except sqlite3.Error as error:
            self._health.failed("merging access times", error)

    def grew(self, run_id: str) -> None:
        """Note that a run was stored that continues another."""
        self._grown[run_id] = None
        if len(self._grown) > _CHAINS_NOTED:
            self._grown.pop(next(iter(self._grown)))

    def heal(self) -> None:
        """Rebuild the catalogue if it turned out to be damaged, or open the one that another process built."""
        if self._disk is not None:
            self._disk.heal()

    def idle(self) -> None:
        """Do a part of this work. It is called again a little later if there is nothing else to do."""
        if self._disk is None:
            return
        self.heal()
        if time.monotonic() - self._merged_at >= _MERGE_SECONDS:
            self.merge()
        try:
            if not self._looked_through:
                self._looked_through = True
                self._disk.look_through()
            if self._grown:
                self.compact_grown()
        except (sqlite3.Error, OSError) as error:
            self._health.failed("maintaining the store", error)

    def compact_grown(self) -> int:
        """Merge the chains that grew since the last time. Return how many files were replaced."""
        assert self._disk is not None
        merged, compaction = 0, Compaction(self._disk)
        while self._grown:
            run_id, _ = self._grown.popitem()
            merged += compaction.around(run_id)
        return merged

    def compact(self) -> int:
        """Merge all chains of the store. Return how many files were replaced. Raises sqlite3.Error and OSError."""
        return 0 if self._disk is None else Compaction(self._disk).everything()
