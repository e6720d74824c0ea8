"""What the writer's thread does when nobody waits for it: merges notes, heals, looks through a large store,
compacts."""

from __future__ import annotations

import sqlite3
import time

from keepwarm.store.disk.compaction import Compaction
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.health import Health

_MERGE_SECONDS = 30.0
_CHAINS_NOTED = 256


class Maintenance:
    """Housekeeping of an archive. Every method runs in the writer's thread but `merge`, which may run in any."""

    def __init__(self, disk: DiskTier | None, health: Health) -> None:
        self._disk = disk
        self._health = health
        self._grown: dict[str, None] = {}  # runs that continue others, not looked at yet
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
        """A run that continues another was stored."""
        self._grown[run_id] = None
        if len(self._grown) > _CHAINS_NOTED:
            self._grown.pop(next(iter(self._grown)))

    def heal(self) -> None:
        """Make a catalogue again that turned out damaged, or open the one that another process made."""
        if self._disk is not None:
            self._disk.heal()

    def idle(self) -> None:
        """A piece of the work above; called again a little later when nothing else is to be done."""
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
        """Merge the chains that grew since the last time; returns how many files were replaced."""
        assert self._disk is not None
        merged, compaction = 0, Compaction(self._disk)
        while self._grown:
            run_id, _ = self._grown.popitem()
            merged += compaction.around(run_id)
        return merged

    def compact(self) -> int:
        """Merge all chains of the store; returns how many files were replaced. Raises sqlite3.Error and OSError."""
        return 0 if self._disk is None else Compaction(self._disk).everything()
