"""Room under `max_disk` for data other than runs: sessions, tool sets, tenants' files, a database that is rewritten.

The cap is for the whole folder. Before KV is stored, the size of this other data is subtracted from the cap, with some
room for each part to grow. How large each part may become is noted (`granted`). A writer of a part reads that, and
reserves room if it needs more; KV is evicted for it. Conversations and tools are never refused: if they alone exceed
the cap, no KV is stored, and the folder exceeds the cap.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from keepwarm.store.catalog import ranking

TakeRoom = Callable[[str, int], AbstractContextManager[None]]  # gets a part and the bytes by which it grows
SESSIONS, TOOL_SETS, REWRITING = "sessions", "toolsets", ""
_PARTS = (SESSIONS, TOOL_SETS)
_RUNS = "runs"
_QUARANTINE = "quarantine"
_MOVED_ASIDE = "catalogue-"
_GROWTH = 256 << 10  # bytes that a part may grow by without a reservation, in a large store
_GROWTH_SHARE = 4096  # in a small store: the cap divided by this


def left_out(db: sqlite3.Connection, cap: int) -> int:
    """Return the bytes of a store's folder that runs may not use, besides the catalogue. Note for the writers of each
    part how large it may become. Works inside the caller's transaction."""
    catalogue = Path(db.execute("PRAGMA database_list").fetchone()[2])
    growth = min(_GROWTH, cap // _GROWTH_SHARE)
    total = growth + _rest(catalogue)
    for part in _PARTS:
        granted = size_of(catalogue.parent / part) + growth
        if ranking.fact(db, _fact(part)) != granted:
            ranking.set_fact(db, _fact(part), granted)
        total += granted
    return total


def granted(part: str) -> tuple[str, list[str]]:
    """Return the query, with its values, that asks a catalogue how large a part may become."""
    return "SELECT value FROM facts WHERE name = ?", [_fact(part)]


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    try:
        with os.scandir(folder) as entries:
            return sum(map(_size, entries))
    except OSError:
        return 0


def _rest(catalogue: Path) -> int:
    """Bytes of all files except the runs, the parts and the catalogue."""
    folder, total = catalogue.parent, 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    total += 0 if entry.name in (*_PARTS, _RUNS, _QUARANTINE) else size_of(Path(entry.path))
                elif not entry.name.startswith(catalogue.name):
                    total += _size(entry)
        with os.scandir(folder / _QUARANTINE) as entries:
            total += sum(_size(entry) for entry in entries if entry.name.startswith(_MOVED_ASIDE))
    except OSError:
        pass  # count what was found so far
    return total


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0  # gone meanwhile


def _fact(part: str) -> str:
    return f"granted to {part}"
