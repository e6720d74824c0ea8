"""Removing a tenant: everything under one salt, from RAM, the folder and the catalogue's free pages."""

from __future__ import annotations

from dataclasses import dataclass

from keepwarm.store.disk import DiskTier
from keepwarm.store.format import UNKNOWN_SALT
from keepwarm.store.memory import RamTier
from keepwarm.store.recovery import QUARANTINE, sweep, unlink_rows
from keepwarm.store.reserving import doom, left_behind

PURGES = "purges"  # setting: how often the store was purged, so that other processes notice


@dataclass(frozen=True)
class Purged:
    """What a purge removed."""

    runs: int  # from RAM, disk or both
    nbytes: int  # of files
    names: int


def purge_ram(ram: RamTier, tag: bytes) -> set[str]:
    """Remove every run with a block under a salt, or of whom nobody knows; returns their ids."""
    return {run.id for run in ram.runs() if run.salts & {tag, UNKNOWN_SALT} and ram.remove(run.id)}


def drop_purged(ram: RamTier, disk: DiskTier) -> None:
    """Remove runs under any salt from RAM that the disk does not hold (any more): another process may have purged them.
    What is known of files is forgotten.

    Raises sqlite3.Error.
    """
    disk.forget_headers()
    for run in ram.runs():
        if run.salts and disk.index.run(run.id) is None:
            ram.remove(run.id)


def purge_disk(disk: DiskTier, tag: bytes) -> tuple[Purged, set[str]]:
    """Remove every run with a block under a salt and what continues it, and all that cannot be told apart from them;
    returns the ids of live runs that went, too.

    The latter is: quarantined files, catalogues moved aside, files that no row names or that any process gave up and
    has not unlinked yet, writes of any process that are under way (their writers notice), names of prompts that are not
    stored (any more), notes of blocks that were seen or given up, and runs of a version that did not record salts. Then
    the catalogue is written anew.

    Raises sqlite3.Error and OSError; a second call then finishes the work.
    """
    with disk.index.transaction() as db:
        found = "SELECT run FROM salts WHERE tag IN (?, ?) UNION SELECT id FROM runs WHERE state <> 'live'"
        gone = left_behind(db)
        gone += doom(db, [row[0] for row in db.execute(found, [tag, UNKNOWN_SALT]).fetchall()])
        names = db.execute("DELETE FROM names WHERE leaf NOT IN (SELECT exact FROM blocks)").rowcount
        db.execute("DELETE FROM ghosts")
        db.execute("DELETE FROM sightings")
        db.execute("DELETE FROM departed")
        db.execute("DELETE FROM layouts WHERE run NOT IN (SELECT id FROM runs)")
        db.execute(
            "INSERT INTO settings VALUES (?, '1') ON CONFLICT (name) DO UPDATE SET value = CAST(value AS INTEGER) + 1",
            [PURGES],
        )
    unlink_rows(disk.folder, gone)
    disk.index.unlinked(row.id for row in gone)
    for entry in (disk.folder / QUARANTINE).iterdir():
        entry.unlink(missing_ok=True)
    sweep(disk.folder, disk.index)
    disk.index.rewrite()
    live = [row for row in gone if row.state == "live"]
    return Purged(len(live), sum(row.nbytes for row in gone), names), {row.id for row in live}
