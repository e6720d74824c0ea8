"""Made-up conversations for the stress scripts: small, and every byte of them known."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from pathlib import Path

from keepwarm.core.blocks import Block, TokenIds
from keepwarm.errors import CorruptRun
from keepwarm.store import Archive
from keepwarm.store.disk.recovery import CATALOGUE, QUARANTINE, RUNS
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

TURN = 16  # tokens
TURNS = 16


class Conversation:
    """A prompt that grows by a block a turn."""

    def __init__(self, seed: int) -> None:
        self.tokens: TokenIds = prompt(TURN * TURNS, seed)
        self.blocks: tuple[Block, ...] = blocks_of(self.tokens, TURN)
        self.ids = [block.exact for block in self.blocks]
        self.kv = MemoryKV.random(UNEVEN, TURN * TURNS, seed)

    def put(self, archive: Archive, first: int, last: int) -> None:
        """Store the turns `[first, last)`."""
        archive.put(self.kv, self.blocks[first:last], namespace())

    def check(self, archive: Archive) -> int:
        """Load what is found; returns how many turns that were. Raises AssertionError when a byte is wrong.

        A run that is evicted between lookup and load is looked up again, as the engine does.
        """
        for _ in range(50):
            refs = archive.lookup(self.ids)
            if not refs:
                return 0
            sink = MemoryKV(UNEVEN, len(self.tokens))
            end = refs[-1].end
            try:
                archive.load(refs, self.tokens[:end], end, sink)
            except CorruptRun:
                continue
            assert sink.same(self.kv, 0, end), "wrong bytes were served"
            return len(refs)
        return 0


@lru_cache(maxsize=256)
def conversation(seed: int) -> Conversation:
    return Conversation(seed)


def folder_size(folder: Path) -> int:
    """Bytes of all files, as `ls` shows them."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def check_books(folder: Path) -> None:
    """The catalogue's numbers add up, and name exactly the files that are there. Raises AssertionError."""
    db = sqlite3.connect(folder / CATALOGUE)
    try:
        facts = dict(db.execute("SELECT name, value FROM facts").fetchall())
        (runs,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM runs").fetchone()
        (doomed,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM doomed").fetchone()
        assert facts["bytes"] == runs + doomed, (facts, runs, doomed)
        assert facts["runs"] == db.execute("SELECT count(*) FROM runs WHERE state = 'live'").fetchone()[0]
        wrong = db.execute(
            "SELECT id FROM runs WHERE children <> (SELECT count(*) FROM edges WHERE parent = id)"
        ).fetchall()
        assert not wrong, f"children miscounted: {wrong}"
        lost = db.execute(
            "SELECT b.run FROM blocks b WHERE b.start > 0 "
            "AND NOT EXISTS (SELECT 1 FROM blocks above WHERE above.exact = b.parent_exact)"
        ).fetchall()
        assert not lost, f"blocks without their parent: {lost}"
        apart = db.execute(
            "SELECT DISTINCT child.run FROM blocks child JOIN blocks own ON own.exact = child.parent_exact "
            "WHERE own.run <> child.run AND NOT EXISTS "
            "(SELECT 1 FROM edges WHERE parent = own.run AND edges.child = child.run)"
        ).fetchall()
        assert not apart, f"nobody noted what they continue: {apart}"
        assert db.execute("PRAGMA quick_check").fetchone()[0] == "ok"
        named = {row[0] for row in db.execute("SELECT file FROM runs WHERE state <> 'reserved'")}
    finally:
        db.close()
    there = {f"{name}/{path.name}" for name in (RUNS, QUARANTINE) for path in (folder / name).iterdir()}
    assert named == there, (named - there, there - named)
