"""Snapshots of recurrent state beside the disk tier's own work: compaction, eviction, damage, a full disk."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.archives import CAP, Prompt
from tests.helpers.states import Stateful, snapshot_files, stored

from keepwarm.core.snapshots import snapshot_id
from keepwarm.errors import CorruptRun, StoreFull
from keepwarm.store import Archive
from keepwarm.store.disk import fsck
from keepwarm.store.retention import Rules


def opened(folder: Path) -> Archive:
    return Archive.open(folder, max_ram=0, max_disk=CAP)


def test_snapshots_do_not_keep_a_conversation_from_becoming_one_file(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        one = stored(archive, runs=[(at, at + 1) for at in range(8)], states=range(8))
        assert archive.compact() == 8
        kinds = sorted((entry.kind, entry.start, entry.end) for entry in archive.contents.entries())
        assert kinds == [("kv", 0, 64), *(("snapshot", end - 1, end) for end in range(8, 72, 8))]
        assert archive.compact() == 0
        assert one.loads(archive) == {"disk": 64}
        assert one.taken(archive) == [*range(8)]
        (run,) = [entry for entry in archive.contents.entries() if entry.kind == "kv"]
        nodes = [node for node in archive.contents.tree() if node.entry.kind == "snapshot"]
        assert {node.parent for node in nodes} == {run.id}
        assert archive.remove(run.id) == 9
    assert fsck.verify(tmp_path).findings == ()


def test_what_grows_is_merged_beside_its_snapshots(tmp_path: Path) -> None:
    """As it happens in the background: each turn stores a run and a snapshot behind it."""
    with opened(tmp_path) as archive:
        one = Stateful()
        for at in range(8):
            one.put(archive, at, at + 1)
            one.take(archive, at)
            archive.flush()
        archive._handover.wait_for(archive._maintenance.compact_grown)
        assert [entry.tokens for entry in archive.contents.entries() if entry.kind == "kv"] == [64]
        assert one.taken(archive) == [*range(8)]


def test_a_branch_beside_a_snapshot_still_keeps_its_sides_apart(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        one, other = stored(archive, runs=[(at, at + 1) for at in range(4)], states=(1, 3)), Stateful()
        other.tokens = one.tokens.copy()
        branch = Prompt(seed=3)
        branch.put(archive)
        archive.flush()
        assert archive.compact() == 4
        assert sorted(entry.end for entry in archive.contents.entries() if entry.kind == "kv") == [32, 64]


def test_kv_outlives_its_snapshots_and_never_the_other_way(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        one = stored(archive, states=(2, 7))
        size = archive.contents.size_on_disk()
    for cap in range(size - 4096, size // 2, -4096):
        fsck.collect(tmp_path, max_disk=cap)
        with opened(tmp_path) as archive:
            found, left = archive.lookup(one.ids), one.taken(archive)
            assert all(number < len(found) for number in left)
    assert fsck.verify(tmp_path).findings == ()


def _flip(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def _swap(path: Path, other: Path) -> None:
    first = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(first)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "flip": _flip,
    "truncate": lambda path, _: path.write_bytes(path.read_bytes()[:-100]),
    "half-written": lambda path, _: path.write_bytes(bytes(4096) + path.read_bytes()[4096:]),
    "empty": lambda path, _: path.write_bytes(b""),
    "remove": lambda path, _: path.unlink(),
    "swap": _swap,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_snapshot_is_a_miss_a_counter_and_a_line(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as archive, caplog.at_level(logging.WARNING):
        one = stored(archive, states=(1, 2, 7))
        first, second, _ = snapshot_files(archive, tmp_path)
        DAMAGE[how](second, first)
        archive._disk.files.forget_headers()  # type: ignore[union-attr]
        for _ in range(1 + (how == "swap")):
            with pytest.raises(CorruptRun):
                one.taken(archive)
        assert one.taken(archive) == ([7] if how == "swap" else [1, 7])
        assert archive.stats()["corrupt"] == 1 + (how == "swap")
        assert "quarantined" in caplog.text
        assert one.loads(archive) == {"disk": 64}, "KV stays"
        one.take(archive, 2)  # it is computed, and stored, again
        archive.flush()
        assert 2 in one.taken(archive)


def test_verify_finds_a_damaged_snapshot_and_repairs(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        one = stored(archive, states=(2, 7))
        first, second = snapshot_files(archive, tmp_path)
    _flip(first, second)
    assert fsck.verify(tmp_path).damage == 1
    assert fsck.verify(tmp_path, repair=True).damage == 0
    with opened(tmp_path) as archive:
        assert one.taken(archive) == [7]
        assert one.loads(archive) == {"disk": 64}


def test_gc_drops_a_snapshot_that_was_never_written_whole(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        one = stored(archive, states=(2,))
        (path,) = snapshot_files(archive, tmp_path)
    (tmp_path / "runs" / ("0" * 32 + ".safetensors.tmp")).write_bytes(path.read_bytes()[:5000])
    assert fsck.collect(tmp_path).counts["temporary"] == 1
    with opened(tmp_path) as archive:
        assert one.taken(archive) == [2]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), StoreFull("under the cap")])
def test_a_snapshot_without_room_is_dropped_and_kv_stays(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise error

    with opened(tmp_path) as archive:
        one = stored(archive, states=(2,))
        with monkeypatch.context() as patch:
            patch.setattr("keepwarm.store.disk.run_files.write_run", full)
            one.take(archive, 7)
            archive.flush()
        stats = archive.stats()
        assert stats["dropped_writes"] + stats["store_errors"] == 1
        assert one.taken(archive) == [2]
        assert one.loads(archive) == {"disk": 64}
        one.take(archive, 7)
        archive.flush()
        assert one.taken(archive) == [2, 7]
    assert fsck.verify(tmp_path).findings == ()


def test_a_snapshot_goes_where_its_block_is(tmp_path: Path) -> None:
    """Blocks too few to be written stay in RAM, and so does what stands on them."""
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP, rules=Rules(min_write=1000)) as archive:
        one = stored(archive, states=(2,))
        assert one.taken(archive) == [2]
        assert {entry.tier for entry in archive.contents.entries()} == {"ram"}
        assert not list((tmp_path / "runs").iterdir())
        assert archive.find([snapshot_id(one.ids[2])])
