"""`max_disk` is the cap of the whole folder: with sessions, tool sets, tenants' files and databases written anew."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from keepwarm.core.blocks import chain
from keepwarm.core.identity import salt_key
from keepwarm.serving.tenancy.salts import Salts
from keepwarm.sessions.records import Records
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, namespace, prompt
from keepwarm.toolsets import Registry

CAP = 3 << 20


def opened(folder: Path, cap: int = CAP) -> Archive:
    return Archive.open(folder, max_ram=0, max_disk=cap)


def put(archive: Archive, seed: int, tokens: int = 256, salt: str = "") -> None:
    extra = {0: salt_key(salt)} if salt else {}
    blocks = chain(prompt(tokens, seed), range(32, tokens + 1, 32), namespace(), extra)
    archive.put(MemoryKV(UNEVEN, tokens), blocks, namespace())
    archive.flush()


def say(records: Records, name: str, size: int, salt: str | None = None) -> None:
    root = records.root(salt)
    node = records.node(root, {"message": {"role": "user", "content": f"{name} " * (size // (len(name) + 1))}})
    records.save(records.session_key(name, salt), salt, node.id, [node], {"name": name}, records._epochs.now())


def files(folder: Path) -> dict[str, int]:
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with suppress(FileNotFoundError):
                found[path] = os.stat(path).st_size
    return found


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """The folder's largest size in the body, as somebody saw it who looked all the time."""
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.is_set():
            once, again = files(folder), files(folder)
            if once == again:  # else something went while it was counted, and something came
                most[0] = max(most[0], sum(once.values()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_the_whole_folder_stays_under_the_cap(tmp_path: Path) -> None:
    with opened(tmp_path) as archive, watched(tmp_path) as most:
        records = Records(tmp_path, None, archive.epochs, archive.room)
        registry = Registry(tmp_path, None, archive.epochs, archive.room)
        salts = Salts(tmp_path / "tenants")
        for turn in range(9):
            for seed in range(3):
                put(archive, 100 * turn + seed, salt=f"t{turn % 3}")
            say(records, f"session {turn}", 50_000, f"t{turn % 3}")
            registry.register([], system="x" * 30_000, name=f"set {turn}", salt=f"t{turn % 3}")
            salts.note("acme", "s" * 500 + str(turn))
            if turn % 5 == 4:
                archive.purge(salt_key(f"t{turn % 3}"))
        stored = archive.contents.entries()
    assert stored, "there was room for KV as well"
    assert most[0] <= CAP
    assert most[0] > CAP // 2, "and it was used"


def test_sessions_take_the_room_of_kv(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        for seed in range(40):
            put(archive, seed)
        before = len(archive.contents.entries())
        with watched(tmp_path) as most:
            records = Records(tmp_path, None, archive.epochs, archive.room)
            for number in range(8):
                say(records, f"session {number}", 100_000)
        assert 0 < len(archive.contents.entries()) < before
        assert most[0] <= CAP
        put(archive, 99)
        assert most[0] <= CAP


def test_where_they_alone_are_larger_no_kv_is_stored_and_they_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, 1 << 20) as archive, caplog.at_level(logging.WARNING):
        put(archive, 1)
        assert archive.contents.entries()
        records = Records(tmp_path, None, archive.epochs, archive.room)
        for number in range(8):
            say(records, f"session {number}", 200_000)
        assert archive.contents.entries() == [], "KV was evicted first"
        put(archive, 2)
        assert archive.contents.entries() == []
        assert archive.stats()["dropped_writes"] == 1
        assert "are for other data than KV" in caplog.text
        assert len(list(records.sessions())) == 8
        records.drop([row.key for row in records.sessions()])
        archive.purge(salt_key("nobody"))
        put(archive, 2)
        assert len(archive.contents.entries()) == 1, "there is room again"
