"""A catalogue that is damaged, removed, locked or old: the store goes on."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.small_runs import LENGTH, opened, put

from keepwarm.store import Archive
from keepwarm.store.catalog import schema
from keepwarm.store.catalog.index import Index
from keepwarm.store.catalog.ranking import chosen_policy
from keepwarm.store.disk import recovery
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.retention import Rules
from keepwarm.testing.kv import UNEVEN, MemoryKV, prompt


def test_a_catalogue_damaged_in_use_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepwarm.store.disk.tier._HEAL_SECONDS", 0.0)
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        ids = [put(archive, seed) for seed in range(3)]
        path = tmp_path / recovery.CATALOGUE
        assert archive._disk is not None
        archive._disk.index.database._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with path.open("r+b") as file:  # the same file: other processes have it open too
            file.seek(4096)
            file.write(b"\xa5" * (path.stat().st_size - 4096))
        archive._disk.index.database._reader.execute("PRAGMA cache_size = 0")
        archive._disk.index.database._writer.execute("PRAGMA cache_size = 0")
        for seed in (10, 11):  # the first finds the damage, the second heals it
            put(archive, seed)
        assert all(len(archive.lookup(each)) == 8 for each in ids)
        assert len(archive.lookup(put(archive, 12))) == 8


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr("keepwarm.store.disk.tier._HEAL_SECONDS", 0.0)
    folder = tmp_path / "store"
    with Archive.open(folder, max_ram=0, max_disk=1 << 26) as archive:
        ids = put(archive, 0)
        shutil.rmtree(folder)
        with pytest.raises(Exception, match="No such file"):
            archive.load(archive.lookup(ids), prompt(LENGTH), LENGTH, MemoryKV(UNEVEN, LENGTH))
        put(archive, 1)
        assert len(archive.lookup(put(archive, 1))) == 8


_HOLDER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(60)
"""


def test_a_catalogue_that_another_program_locks_costs_only_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as archive:
        ids = put(archive, 0)
        assert archive._disk is not None
        archive._disk.index.database._writer.execute("PRAGMA busy_timeout = 100")
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(tmp_path / recovery.CATALOGUE)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            archive.clear_ram()
            sink = MemoryKV(UNEVEN, LENGTH)
            assert archive.load(archive.lookup(ids), prompt(LENGTH), LENGTH, sink) == {"disk": LENGTH}
            assert {ref.tier for ref in archive.lookup(put(archive, 1))} == {"ram"}
            assert archive.stats()["store_errors"] > 0
        finally:
            holder.kill()
            holder.communicate()
        put(archive, 2)
        archive.clear_ram()
        assert len(archive.lookup(put(archive, 2))) == 8


def test_a_store_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        for turns in (3, 8):
            ids = put(archive, 0, turns)
    old = sqlite3.connect(tmp_path / recovery.CATALOGUE)
    rows = {
        "runs": old.execute(
            "SELECT id, file, bytes, tokens, start, state, parent, owner, lease, created, last_used, namespace "
            "FROM runs"
        ).fetchall(),
        "blocks": old.execute(
            "SELECT exact, run, ordinal, start, length, prefix, parent_exact, parent_prefix, content FROM blocks"
        ).fetchall(),
        "namespaces": old.execute("SELECT * FROM namespaces").fetchall(),
    }
    old.close()
    for path in tmp_path.glob("catalogue*"):
        path.unlink()
    made = sqlite3.connect(tmp_path / recovery.CATALOGUE)
    for statement in schema.MIGRATIONS[0]:
        assert isinstance(statement, str)
        made.execute(statement)
    for table, values in rows.items():
        made.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(values[0]))})", values)
    made.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    made.execute("PRAGMA user_version = 1")
    made.commit()
    made.close()
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        assert len(archive.lookup(ids)) == 8
        first, last = (archive.lookup(ids)[at].run_id for at in (0, 7))
        assert archive._disk is not None
        edges = archive._disk.index.database.read("SELECT parent, child FROM edges")
        assert edges == [(first, last)]
        assert archive._disk.index.database.read("SELECT children FROM runs ORDER BY start") == [(1,), (0,)]
        assert archive.remove(first) == 2


def test_gc_gives_up_by_the_policy_that_the_store_was_last_opened_with(tmp_path: Path) -> None:
    def policy_of(index: Index) -> str:
        with index.database.transaction() as db:
            return chosen_policy(db)

    for name in ("lru", "lfu"):
        Archive.open(tmp_path, max_ram=0, max_disk=1 << 26, rules=Rules(disk_policy=name)).close()  # type: ignore[arg-type]
        disk = DiskTier.open(tmp_path, 1 << 26)  # as `keepwarm gc` does: without rules of its own
        assert policy_of(disk.index) == name
        disk.close()
