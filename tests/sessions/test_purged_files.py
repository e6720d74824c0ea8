"""What a purge leaves in the folder of sessions: no plain text in a damaged database, nor in a log that others read."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from keepwarm.core.identity import salt_key, salt_tag
from keepwarm.errors import StoreError
from keepwarm.sessions.records import Records
from keepwarm.store.admin import conversations
from keepwarm.store.admin.conversations import FILE, FOLDER, purge_conversations

MINE = frozenset([salt_tag(salt_key("mine"))])


def say(folder: Path, text: str = "marmalade", salt: str = "mine") -> None:
    records = Records(folder)
    node = records.node(records.root(salt), {"message": {"role": "user", "content": text * 50}})
    records.save(records.session_key("s", salt), salt, node.id, [node], {"name": "s"}, records._epochs.now())
    records.close()


def texts(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and b"marmalade" in path.read_bytes()]


@pytest.mark.parametrize("found", ["before", "while purging"])
def test_a_damaged_database(tmp_path: Path, found: str) -> None:
    say(tmp_path)
    path = tmp_path / FOLDER / FILE
    raw = bytearray(path.read_bytes())
    raw[100:140] = b"\xff" * 40  # the first page's
    path.write_bytes(raw)
    if found == "before":
        say(tmp_path, "good morning", "theirs")
        assert [name for name in texts(tmp_path) if name.startswith("damaged-")]
    purge_conversations(tmp_path, MINE)
    assert texts(tmp_path) == []
    say(tmp_path, "good evening")


def test_a_log_that_somebody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The purge says that it is not complete, and is when it is run again."""
    say(tmp_path, "good morning", "theirs")
    reader = sqlite3.connect(tmp_path / FOLDER / FILE, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM nodes").fetchone()
    say(tmp_path)

    real = conversations.connect

    def impatient(path: Path, *, writer: bool) -> sqlite3.Connection:
        connection = real(path, writer=writer)
        connection.execute("PRAGMA busy_timeout = 100")
        return connection

    monkeypatch.setattr(conversations, "connect", impatient)
    with pytest.raises(StoreError, match="another process is reading it; run it again"):
        purge_conversations(tmp_path, MINE)
    assert texts(tmp_path), "in the log"
    reader.execute("COMMIT")
    reader.close()
    purge_conversations(tmp_path, MINE)
    assert texts(tmp_path) == []
