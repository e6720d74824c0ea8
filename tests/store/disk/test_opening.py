"""Opening a store: refusals with a cure, and recovery."""

from __future__ import annotations

import errno
import logging
import sqlite3
from pathlib import Path

import pytest

from keepwarm.errors import StoreError, StoreLocked, StoreNotWritable, StoreTooNew, StoreUnusable
from keepwarm.store import Archive
from keepwarm.store.catalog import schema
from keepwarm.store.catalog.database import Database
from keepwarm.store.catalog.index import Index
from keepwarm.store.disk import recovery
from keepwarm.store.disk.owner import Owner
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.runfile import header as run_header
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, prompt

LENGTH = 40
CAP = 1 << 24


def filled(folder: Path, seeds: int = 3, key: StoreKey | None = None) -> list[bytes]:
    """Make a store with a run per seed; returns their block ids."""
    ids: list[bytes] = []
    tier = DiskTier.open(folder, CAP, key=key)
    for seed in range(seeds):
        blocks = blocks_of(prompt(LENGTH, seed))
        assert tier.put(make_run(MemoryKV.random(UNEVEN, LENGTH, seed), blocks))
        ids += [block.exact for block in blocks]
    tier.close()
    return ids


def found(folder: Path, ids: list[bytes], key: StoreKey | None = None) -> int:
    tier = DiskTier.open(folder, CAP, key=key)
    count = len(tier.find(ids))
    tier.close()
    return count


def execute(folder: Path, sql: str, values: tuple[object, ...] = ()) -> None:
    connection = sqlite3.connect(folder / recovery.CATALOGUE)
    with connection:
        connection.execute(sql, values)
    connection.close()


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    for folder in (tmp_path / "store", tmp_path / "store" / "below"):
        with pytest.raises(StoreNotWritable, match=r"cannot be written.*choose another"):
            Archive.open(folder, max_ram=0, max_disk=CAP)


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    ids = filled(tmp_path)
    execute(tmp_path, f"PRAGMA user_version = {schema.SCHEMA + 1}")
    with pytest.raises(StoreTooNew, match="use the newer version"):
        Archive.open(tmp_path, max_ram=0, max_disk=CAP)
    execute(tmp_path, f"PRAGMA user_version = {schema.SCHEMA}")
    assert found(tmp_path, ids) == len(ids)


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [
        ("/dev/vda / ext4 rw 0 0\nserver:/home /mnt/far nfs4 rw 0 0\n", "nfs4"),
        ("/dev/vda / ext4 rw 0 0\nme@there: /mnt fuse.sshfs rw 0 0\n", "fuse.sshfs"),
        ("/dev/vda / ext4 rw 0 0\nshare /mnt/far/my\\040store 9p rw 0 0\n", "9p"),
        ("share / cifs rw 0 0\n/dev/vda /mnt/far ext4 rw 0 0\n", None),
        ("share /mnt/far nfs rw 0 0\n/dev/vda /mnt/far xfs rw 0 0\n", None),
        ("share /mnt/fa nfs rw 0 0\n", None),
        ("", None),
    ],
)
def test_network_file_systems_are_told_by_the_nearest_mount(mounts: str, kind: str | None) -> None:
    assert schema.network_file_system(Path("/mnt/far/my store"), mounts) == kind


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "network_file_system", lambda folder: "nfs4")
    with pytest.raises(StoreUnusable, match=r"nfs4.*local disk"):
        Archive.open(tmp_path, max_ram=0, max_disk=CAP)


@pytest.mark.parametrize("damage", ["text", "truncated", "pages", "gone"])
def test_a_damaged_catalogue_is_made_again_from_the_runs(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = filled(tmp_path)
    path = tmp_path / recovery.CATALOGUE
    good = path.read_bytes()
    bad = {"text": b"not a database" * 500, "truncated": good[: len(good) // 2], "pages": good[:4096] + b"\xa5" * 40000}
    path.unlink()
    if damage in bad:
        path.write_bytes(bad[damage])
    with caplog.at_level(logging.WARNING, "keepwarm.store"):
        assert found(tmp_path, ids) == len(ids)
    if damage in bad:
        assert "made again" in caplog.text
        assert [entry.read_bytes() for entry in (tmp_path / "quarantine").glob("catalogue-*.sqlite")] == [bad[damage]]


def test_making_the_catalogue_again_leaves_out_damaged_runs(tmp_path: Path) -> None:
    ids = filled(tmp_path)
    victim = next((tmp_path / "runs").iterdir())
    victim.write_bytes(victim.read_bytes()[:-1])
    (tmp_path / recovery.CATALOGUE).write_bytes(b"x" * 5000)
    assert found(tmp_path, ids) == len(ids) * 2 // 3
    assert not victim.exists()


def test_a_newer_run_stops_the_rebuild_before_anything_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(run_header, "_version_of", lambda blocks: run_header.FORMAT + 1)
        filled(tmp_path)
    (tmp_path / recovery.CATALOGUE).write_bytes(b"x" * 5000)
    with pytest.raises(StoreTooNew):
        Archive.open(tmp_path, max_ram=0, max_disk=CAP)
    assert (tmp_path / recovery.CATALOGUE).read_bytes() == b"x" * 5000
    assert len(list((tmp_path / "runs").iterdir())) == 3


@pytest.mark.parametrize("why", ["key", "newer", "folder", "handles", "catalogue"])
def test_a_catalogue_that_could_not_be_filled_is_filled_by_a_later_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE if why == "handles" else errno.EIO, why)

    key = StoreKey(bytes(32)) if why == "key" else None
    with monkeypatch.context() as newer:
        if why == "newer":
            newer.setattr(run_header, "_version_of", lambda blocks: run_header.FORMAT + 1)
        ids = filled(tmp_path, key=key)
    (tmp_path / recovery.CATALOGUE).unlink()
    refusal = {"key": StoreLocked, "newer": StoreTooNew, "handles": StoreUnusable}.get(why, StoreNotWritable)
    for _ in range(2):
        with monkeypatch.context() as broken:
            if why == "folder":
                broken.setattr(recovery.os, "scandir", fails)
            elif why == "handles":
                broken.setattr(recovery.RunReader, "open", fails)
            elif why == "catalogue":
                broken.setattr(Index, "adopt_all", fails)
            with pytest.raises(StoreError) as raised:
                DiskTier.open(tmp_path, CAP)
            assert type(raised.value) is refusal
        assert len(list((tmp_path / "runs").iterdir())) == 3
    if why == "newer":
        monkeypatch.setattr(run_header, "FORMAT", run_header.FORMAT + 1)
    assert found(tmp_path, ids, key) == len(ids)
    assert found(tmp_path, ids, key) == len(ids)


def test_nothing_is_swept_while_the_catalogue_is_not_filled(tmp_path: Path) -> None:
    ids = filled(tmp_path)
    path = tmp_path / recovery.CATALOGUE
    path.unlink()
    index = Index(Database(path, schema.open_catalogue(path)[0]))
    recovery.sweep(tmp_path, index)
    index.database.close()
    assert found(tmp_path, ids) == len(ids)


def test_files_without_a_row_are_removed_and_rows_without_a_file_forgotten(tmp_path: Path) -> None:
    ids = filled(tmp_path)
    runs = tmp_path / "runs"
    next(runs.iterdir()).unlink()
    stray = [runs / ("a" * 32 + ".safetensors"), runs / ("b" * 32 + ".safetensors.tmp"), runs / "other"]
    for path in stray:
        path.write_bytes(b"stray")
    assert found(tmp_path, ids) == len(ids) * 2 // 3
    assert not any(path.exists() for path in stray)


@pytest.mark.parametrize(
    ("owner", "lease", "kept"),
    [
        ("alive", 1e12, True),
        ("alive", 1.0, False),  # its lease has ended
        ("dead", 1e12, False),
        ("elsewhere", 1e12, True),  # on another machine, nobody can tell
        ("elsewhere", 1.0, False),
        ("nonsense", 1e12, False),
    ],
)
def test_reservations_end_with_their_process_or_lease(tmp_path: Path, owner: str, lease: float, kept: bool) -> None:
    filled(tmp_path, 1)
    me = Owner.current()
    owners = {
        "alive": str(me),
        "dead": str(Owner(me.host, me.pid, me.started + "1")),
        "elsewhere": str(Owner("elsewhere", 1, "1")),
        "nonsense": "?",
    }
    run_id = "c" * 32
    execute(
        tmp_path,
        "INSERT INTO runs (id, file, bytes, tokens, start, state, parent, owner, lease, created, last_used, namespace) "
        "VALUES (?, ?, 1, 1, 0, 'reserved', x'00', ?, ?, 0, 0, '')",
        (run_id, recovery.run_file(run_id), owners[owner], lease),
    )
    half_written = tmp_path / (recovery.run_file(run_id) + recovery.TEMPORARY)
    half_written.write_bytes(b"half")
    tier = DiskTier.open(tmp_path, CAP)
    assert (tier.index.run(run_id) is not None) == kept
    assert half_written.exists() == kept
    tier.close()


def test_a_catalogue_cannot_name_files_outside_the_store(tmp_path: Path) -> None:
    store, outside = tmp_path / "store", tmp_path / "precious"
    outside.write_text("keep me")
    filled(store, 1)
    execute(store, "UPDATE runs SET file = '../precious'")
    tier = DiskTier.open(store, CAP)
    tier.remove([row.id for row in tier.index.runs("1")])
    tier.close()
    assert outside.exists()
