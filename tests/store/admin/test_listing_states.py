"""Snapshots of recurrent state among what people see of a store: entries, sizes, pins, the tree of beginnings."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers.archives import CAP, Prompt
from tests.helpers.states import Stateful, stored

from keepwarm.core.snapshots import snapshot_id
from keepwarm.store import Archive
from keepwarm.store.disk import fsck
from keepwarm.testing.kv import namespace

FAR = 1 << 30


@pytest.fixture(params=["ram", "disk"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    on_disk = request.param == "disk"
    return Archive.open(tmp_path / "store" if on_disk else None, max_ram=0 if on_disk else CAP, max_disk=CAP)


def test_entries_say_what_they_are(archive: Archive) -> None:
    with archive:
        stored(archive, states=(2, 4))
        kinds = sorted((entry.kind, entry.start, entry.end) for entry in archive.contents.entries())
        assert kinds == [("kv", 0, 24), ("kv", 24, 64), ("snapshot", 23, 24), ("snapshot", 39, 40)]
        run = next(entry for entry in archive.contents.entries() if entry.kind == "snapshot")
        shown = archive.contents.show(run.id)
        assert shown["kind"] == "snapshot"
        assert len(shown["chain"]) == 3 - (run.end == 24)


def test_sizes_tell_states_from_kv(archive: Archive) -> None:
    with archive:
        stored(archive, states=(2, 4))
        stats = archive.stats()
        (tier,) = {entry.tier for entry in archive.contents.entries()}
        states = sum(entry.bytes for entry in archive.contents.entries() if entry.kind == "snapshot")
        assert stats["snapshots"][tier] == 2
        assert stats["snapshot_bytes"][tier] == states
        assert stats["bytes"][tier] == sum(entry.bytes for entry in archive.contents.entries())
        assert stats["blocks"][tier] == 8 + 2


def test_a_stretch_tells_where_its_snapshots_are(archive: Archive) -> None:
    """Two prompts part inside a run; each stretch has the snapshots that lie in it, or end it."""
    with archive:
        one = stored(archive, states=(0, 2, 4, 7))
        other = Prompt(seed=5)
        other.tokens[:24] = one.tokens[:24]
        found = archive.contents.beginnings(archive.contents.tree())
        places = {(s.start, s.end): [node.entry.end for node in s.snapshots] for s in found}
        assert places == {(0, 24): [8, 24], (24, 64): [40, 64]}
        assert all(node.entry.kind == "kv" for s in found for node in s.runs)


def test_a_snapshot_of_what_is_left_out_is_left_out(archive: Archive) -> None:
    with archive:
        stored(archive, states=(2, 7))
        states = [node for node in archive.contents.tree() if node.entry.kind == "snapshot"]
        assert archive.contents.beginnings(states) == []


def test_a_pin_keeps_the_snapshots_up_to_its_end(archive: Archive) -> None:
    with archive:
        one = stored(archive, states=(1, 2, 4, 7))
        assert archive.contents.retain(one.ids[4], FAR) == 2 + 3
        pinned = {node.entry.end for node in archive.contents.tree() if node.pinned_until and node.entry.kind != "kv"}
        assert pinned == {16, 24, 40}


def test_a_pin_by_a_snapshot_keeps_what_it_stands_on(archive: Archive) -> None:
    with archive:
        one = stored(archive, states=(1, 2))
        archive.contents.retain(snapshot_id(one.ids[2]), FAR)
        pinned = {(node.entry.kind, node.entry.end) for node in archive.contents.tree() if node.pinned_until}
        assert pinned == {("kv", 24), ("snapshot", 16), ("snapshot", 24)}


def test_what_is_pinned_is_not_thinned(archive: Archive) -> None:
    with archive:
        one = stored(archive, states=(2, 4))
        archive.contents.retain(one.ids[2], FAR)
        archive.discard([snapshot_id(one.ids[2]), snapshot_id(one.ids[4])])
        archive.flush()
        assert one.taken(archive) == [2]
        assert one.loads(archive), "KV stays in any case"


def test_a_pinned_prompt_outlives_others_with_its_snapshots(tmp_path: Path) -> None:
    """In a store with room for few runs: what is evicted is KV and snapshots that nobody pinned."""
    with Archive.open(None, max_ram=40_000, max_disk=0) as archive:
        one = stored(archive, states=(2, 7))
        archive.contents.retain(one.ids[7], FAR)
        for seed in range(1, 12):
            Prompt(seed).put(archive)
            archive.flush()
        assert archive.stats()["evictions"]["ram"] > 5
        assert one.taken(archive) == [2, 7]
        assert one.loads(archive) == {"ram": 64}


def test_removing_a_run_takes_the_snapshots_that_stand_on_it(archive: Archive) -> None:
    with archive:
        one = stored(archive, states=(2, 4))
        second = next(entry for entry in archive.contents.entries() if (entry.kind, entry.start) == ("kv", 24))
        assert archive.remove(second.id) == 2
        assert one.taken(archive) == [2]
        (state,) = [entry for entry in archive.contents.entries() if entry.kind == "snapshot"]
        assert archive.remove(state.id) == 1, "KV stays without it"
        assert sum(one.loads(archive).values()) == 24


def test_a_purge_leaves_no_snapshot(archive: Archive) -> None:
    with archive:
        one = stored(archive, states=(2, 4))
        began = archive.epoch()
        archive.purge_all()
        assert archive.contents.entries() == []
        one.put(archive)
        one.take(archive, 2, epoch=began)  # it began before the purge
        archive.flush()
        assert one.taken(archive) == []
        assert archive.stats()["dropped_writes"] == 1


def test_a_snapshot_of_a_block_that_was_not_let_in_is_no_fault(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive:
        one = stored(archive, runs=(), states=(2,))
        assert archive.contents.entries() == []
        stats = archive.stats()
        assert (stats["dropped_writes"], stats["extra"]["not_admitted"]) == (0, 1)
        assert one.taken(archive) == []


def test_verify_and_gc_find_nothing_amiss(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        stored(archive, states=(0, 2, 7))
    assert fsck.verify(tmp_path).findings == ()
    report = fsck.collect(tmp_path)
    assert not any(report.counts.values())


def test_a_catalogue_that_is_made_again_has_them(tmp_path: Path) -> None:
    """Also of blocks of one token, which begin where their snapshots do, and whose files were written after them."""
    one = Stateful(length=8, step=1)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        for number in range(8):
            one.put(archive, number, number + 1)
            one.take(archive, number)
        archive.flush()
        for node in archive.contents.tree():
            later = 0 if node.entry.kind == "snapshot" else 1000
            os.utime(tmp_path / "runs" / f"{node.entry.id}.safetensors", (later, later))
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"catalogue.sqlite{suffix}").unlink(missing_ok=True)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        assert one.taken(archive) == [*range(8)]
        assert archive.stats()["snapshots"] == {"ram": 0, "disk": 8}


def test_kv_for_any_place_is_called_a_chunk(archive: Archive) -> None:
    with archive:
        one = Prompt()
        archive.put(one.kv, one.blocks, replace(namespace(), purpose="chunks"))
        archive.flush()
        assert [entry.kind for entry in archive.contents.entries()] == ["chunk"]


def test_export_by_a_snapshots_id_exports_its_prompt(tmp_path: Path) -> None:
    with Archive.open(tmp_path / "store", max_ram=0, max_disk=CAP) as archive:
        stored(archive, states=(2,))
        (state,) = [entry for entry in archive.contents.entries() if entry.kind == "snapshot"]
        report = archive.contents.export(state.id, tmp_path / "bundle")
        assert (report.tokens, report.snapshots) == (24, 1)
