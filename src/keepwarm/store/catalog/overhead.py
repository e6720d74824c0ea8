"""How much of the cap the catalogue itself takes."""

from __future__ import annotations

import os
import sqlite3

from keepwarm.store.catalog.schema import WAL_BYTES

_PAGES_PER_BLOCK = 8  # pages that its row and index entries may touch
_PAGE = 4096 + 24  # in the write-ahead log


def overhead(db: sqlite3.Connection, blocks: int = 0) -> int:
    """Bytes of the catalogue itself, which the cap covers too, and of the log needed to write `blocks` blocks."""
    pages = int(db.execute("PRAGMA page_count").fetchone()[0])
    size = pages * int(db.execute("PRAGMA page_size").fetchone()[0])
    log = min(_PAGES_PER_BLOCK * blocks, pages + blocks) * _PAGE
    path = db.execute("PRAGMA database_list").fetchone()[2]
    return size + max(WAL_BYTES, _size(path + "-wal") + _size(path + "-shm") + log)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
