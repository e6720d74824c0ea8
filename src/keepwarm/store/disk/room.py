"""Room under `max_disk` for what is no run: sessions, tool sets, tenants' files, a database while it is written anew.

The cap is the whole folder's. Whoever stores KV leaves out what lies beside the runs, and some more for each part of it
to grow by, and notes how large each part may be (`granted`). A writer of such a part looks at that, and takes room of
its own when it needs more: KV is evicted for it. Nobody's conversations or tools are refused: where they alone are
larger than the cap, no KV is stored, and the folder is larger than the cap.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from keepwarm.store.catalog import ranking

TakeRoom = Callable[[str, int], AbstractContextManager[None]]  # for a part to grow by so many bytes
SESSIONS, TOOL_SETS, REWRITING = "sessions", "toolsets", ""
_PARTS = (SESSIONS, TOOL_SETS)
_RUNS = "runs"
_QUARANTINE = "quarantine"
_MOVED_ASIDE = "catalogue-"
_GROWTH = 256 << 10  # bytes that a part may grow by without asking, in a large store
_GROWTH_SHARE = 4096  # in a small one: one part in so many of the cap


def left_out(db: sqlite3.Connection, cap: int) -> int:
    """Bytes of a store's folder that are kept from runs, beside the catalogue; noted for who writes there. In the
    caller's transaction."""
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
    """The question to a catalogue how large a part may be, with its values."""
    return "SELECT value FROM facts WHERE name = ?", [_fact(part)]


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    try:
        with os.scandir(folder) as entries:
            return sum(map(_size, entries))
    except OSError:
        return 0


def _rest(catalogue: Path) -> int:
    """Bytes of what is no run's, no part's and not the catalogue's."""
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
        pass  # what there is at this moment
    return total


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0  # gone meanwhile


def _fact(part: str) -> str:
    return f"granted to {part}"
