"""Looking through a store and putting it right: every kind of damage is named, and none is left after a repair."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from tests.helpers.archives import CAP, LENGTH, Prompt

from keepwarm.errors import StoreLocked, StoreUnusable
from keepwarm.store import Archive
from keepwarm.store.disk import fsck as check
from keepwarm.store.disk.owner import Owner
from keepwarm.store.runfile.crypto import StoreKey

KEY = bytes(range(32))


def execute(folder: Path, sql: str, values: tuple[object, ...] = ()) -> None:
    connection = sqlite3.connect(folder / "catalogue.sqlite")
    connection.execute("PRAGMA foreign_keys = ON")
    with connection:
        connection.execute(sql, values)
    connection.close()


def runs(folder: Path) -> list[Path]:
    """Run files, the first made first."""
    return sorted((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def content(folder: Path) -> dict[str, bytes]:
    """All files; the catalogue's log and index are not counted as content."""
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in files.items() if not name.endswith(("-wal", "-shm"))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three prompts; the first one in two runs."""
    folder = tmp_path / "store"
    with Archive.open(folder, max_ram=0, max_disk=CAP) as archive:
        for seed, first in ((0, 5), (0, 8), (1, 8), (2, 8)):
            Prompt(seed).put(archive, 0, first)
            archive.flush()
            time.sleep(0.002)
    return folder


def loaded(folder: Path, key: bytes | None = None) -> list[int]:
    """Tokens found of each prompt; what is loaded is equal to the bit."""
    with Archive.open(folder, max_ram=0, max_disk=CAP, key=key) as archive:
        return [sum(Prompt(seed).loads(archive).values()) for seed in range(3)]


def kinds(report: check.Verified) -> list[str]:
    return [found.kind for found in report.findings]


def test_a_sound_store_is_sound(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = check.verify(folder, progress=lambda done, total: seen.append((done, total)))
    assert (report.runs, report.findings, report.damage) == (4, (), 0)
    assert report.nbytes == sum(path.stat().st_size for path in runs(folder))
    assert seen == [(done, 4) for done in range(5)]


def damage(folder: Path, kind: str) -> list[int]:
    """Damage a store; returns what of each prompt is left afterwards."""
    first, second, third, _ = runs(folder)
    if kind == "corrupt":
        raw = bytearray(third.read_bytes())
        raw[-100] ^= 1
        third.write_bytes(raw)
        return [64, 0, 64]
    if kind == "truncated":
        third.write_bytes(third.read_bytes()[:5000])
        return [64, 0, 64]
    if kind == "exchanged":
        other = second.read_bytes()
        second.write_bytes(third.read_bytes())
        third.write_bytes(other)
        return [40, 0, 64]
    if kind == "missing":
        first.unlink()
        return [0, 64, 64]
    if kind == "mismatch":
        execute(folder, "UPDATE blocks SET length = 9 WHERE run = ? AND ordinal = 3", (third.stem,))
        return [64, 64, 64]
    if kind == "rows missing":
        execute(folder, "DELETE FROM blocks WHERE run = ? AND ordinal > 3", (third.stem,))
        return [64, 64, 64]
    if kind == "unreachable":
        execute(folder, "DELETE FROM runs WHERE id = ?", (first.stem,))
        first.unlink()
        return [0, 64, 64]
    if kind == "catalogue":
        raw = bytearray((folder / "catalogue.sqlite").read_bytes())
        raw[4096:] = b"\xa5" * (len(raw) - 4096)
        (folder / "catalogue.sqlite").write_bytes(raw)
        return [64, 64, 64]
    assert kind == "no catalogue"
    (folder / "catalogue.sqlite").unlink()
    return [64, 64, 64]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("corrupt", ["corrupt"]),
        ("truncated", ["corrupt"]),
        ("exchanged", ["corrupt", "corrupt"]),
        ("missing", ["missing"]),
        ("mismatch", ["mismatch"]),
        ("rows missing", ["mismatch"]),
        ("unreachable", ["unreachable"]),
        ("catalogue", ["catalogue"]),
        ("no catalogue", ["catalogue"]),
    ],
)
def test_damage_is_named_left_alone_and_repaired(folder: Path, kind: str, named: list[str]) -> None:
    left = damage(folder, kind)
    before = content(folder)
    report = check.verify(folder)
    assert kinds(report) == named
    assert report.damage == len(named)
    assert content(folder) == before, "looking changes nothing"
    repaired = check.verify(folder, repair=True)
    assert kinds(repaired) == named
    assert repaired.damage == 0
    assert all(found.repaired for found in repaired.findings)
    again = check.verify(folder)
    assert again.damage == 0
    assert set(kinds(again)) <= {"quarantined"}
    assert loaded(folder) == left


def leftovers(folder: Path) -> dict[str, int]:
    """Leave behind what crashes and strangers leave; returns counts by kind."""
    me = Owner.current()
    (folder / "runs" / ("a" * 32 + ".safetensors")).write_bytes(bytes(1000))
    (folder / "runs" / ("b" * 32 + ".safetensors.tmp")).write_bytes(bytes(2000))
    (folder / "quarantine" / ("c" * 32 + ".safetensors")).write_bytes(bytes(4000))
    (folder / "quarantine" / "catalogue-1.sqlite").write_bytes(bytes(8000))
    execute(
        folder,
        "INSERT INTO runs (id, file, bytes, tokens, start, state, parent, owner, lease, created, last_used, namespace) "
        "VALUES (?, ?, 16000, 1, 0, 'reserved', x'00', ?, 1e12, 0, 0, '')",
        ("d" * 32, f"runs/{'d' * 32}.safetensors", str(Owner(me.host, me.pid, me.started + "1"))),
    )
    (folder / "runs" / ("d" * 32 + ".safetensors.tmp")).write_bytes(bytes(16000))
    return {"orphan": 1, "temporary": 1, "quarantined": 2, "expired": 1}


def test_leftovers_are_no_damage_and_are_collected(folder: Path) -> None:
    counts = leftovers(folder)
    report = check.verify(folder)
    assert report.damage == 0
    assert {kind: kinds(report).count(kind) for kind in counts} == counts
    before, size = content(folder), sum(map(len, content(folder).values()))
    planned = check.collect(folder, dry_run=True)
    assert content(folder) == before
    assert planned.counts == counts | {"unreachable": 0, "evicted": 0}
    assert planned.nbytes == {
        "orphan": 1000,
        "temporary": 2000,
        "quarantined": 12000,
        "expired": 16000,
        "unreachable": 0,
        "evicted": 0,
    }
    assert planned.freed == 31000
    done = check.collect(folder)
    assert done.counts == planned.counts
    assert sum(map(len, content(folder).values())) <= size - 31000
    assert check.verify(folder).findings == ()
    assert loaded(folder) == [64, 64, 64]


def test_unreachable_runs_are_collected(folder: Path) -> None:
    assert damage(folder, "unreachable") == [0, 64, 64]
    assert check.collect(folder).counts["unreachable"] == 1
    assert check.verify(folder).findings == ()
    assert loaded(folder) == [0, 64, 64]


def test_a_store_shrinks_to_a_size(folder: Path) -> None:
    with Archive.open(folder, max_ram=0, max_disk=CAP) as archive:
        for _ in range(3):
            Prompt(1).loads(archive)
            archive.flush()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    target = size - 2 * runs(folder)[2].stat().st_size
    planned = check.collect(folder, max_disk=target, dry_run=True)
    assert len(runs(folder)) == 4
    done = check.collect(folder, max_disk=target)
    assert done.counts == planned.counts
    assert done.counts["evicted"] in (2, 3)
    assert done.size <= target
    assert sum(loaded(folder)) >= 64
    assert check.verify(folder).findings == ()
    assert check.collect(folder, max_disk=0).counts["evicted"] == 4 - done.counts["evicted"]
    assert runs(folder) == []


def test_encrypted_stores_are_checked_with_their_key(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with Archive.open(folder, max_ram=0, max_disk=CAP, key=KEY) as archive:
        for seed in range(3):
            Prompt(seed).put(archive)
    assert check.verify(folder, StoreKey(KEY)).findings == ()
    for key in (None, StoreKey(bytes(32))):
        with pytest.raises(StoreLocked, match="KEEPWARM_STORE_KEY"):
            check.verify(folder, key)
    path = runs(folder)[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 128
    path.write_bytes(raw)
    report = check.verify(folder, StoreKey(KEY), repair=True)
    assert kinds(report) == ["corrupt"]
    assert sorted(loaded(folder, KEY)) == [0, LENGTH, LENGTH]


def test_a_plain_run_in_an_encrypted_store_is_damage(tmp_path: Path, folder: Path) -> None:
    sealed = tmp_path / "sealed"
    with Archive.open(sealed, max_ram=0, max_disk=CAP, key=KEY) as archive:
        Prompt(7).put(archive)
    stranger = runs(folder)[0]
    mine = runs(sealed)[0]
    shutil.copy(stranger, mine)
    assert kinds(check.verify(sealed, StoreKey(KEY))) == ["corrupt"]


def test_what_is_no_store_is_said_so(tmp_path: Path) -> None:
    for look in (check.verify, check.collect):
        with pytest.raises(StoreUnusable, match="no store"):
            look(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_use_can_be_checked(folder: Path) -> None:
    """What another process evicts while it is looked at is no damage."""
    with Archive.open(folder, max_ram=0, max_disk=CAP) as archive:
        gone = iter(archive.contents.entries())

        def evict(done: int, total: int) -> None:
            entry = next(gone, None)
            if entry is not None:
                archive.remove(entry.id)

        assert check.verify(folder, progress=evict).damage == 0
