"""Compaction: chains of small runs become larger files, and nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.small_runs import LENGTH, opened, put

from keepwarm.store import Archive
from keepwarm.store.disk import recovery
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.retention import Rules
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, namespace, prompt


def test_a_conversation_becomes_one_file(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        for turns in range(1, 9):
            ids = put(archive, 0, turns)
        assert len(archive.contents.entries()) == 8
        used = archive.contents.entries()[0].last_used
        assert archive.compact() == 8
        (entry,) = archive.contents.entries()
        assert (entry.blocks, entry.tokens, entry.last_used >= used) == (8, LENGTH, True)
        assert len(list((tmp_path / recovery.RUNS).iterdir())) == 1
        assert archive.compact() == 0
        sink = MemoryKV(UNEVEN, LENGTH)
        assert archive.load(archive.lookup(ids), prompt(LENGTH), LENGTH, sink) == {"disk": LENGTH}
        assert sink.same(MemoryKV.random(UNEVEN, LENGTH), 0, LENGTH)
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        assert len(archive.lookup(ids)) == 8
        assert archive.remove(entry.id) == 1


def test_a_branch_is_not_merged_into_one_of_its_sides(tmp_path: Path) -> None:
    other = prompt(LENGTH, 0).copy()
    other[32:] ^= 1
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        for turns in range(1, 9):
            put(archive, 0, turns)
        for turns in range(5, 9):
            archive.put(MemoryKV.random(UNEVEN, LENGTH), blocks_of(other)[:turns], namespace())
        archive.flush()
        assert archive.compact() == 8  # two sides of four
        assert sorted(entry.blocks for entry in archive.contents.entries()) == [1, 1, 1, 1, 4, 4]


def test_compaction_takes_only_spare_space_and_budget(tmp_path: Path) -> None:
    with Archive.open(tmp_path / "a", max_ram=0, max_disk=1 << 26, rules=Rules(writes_per_day=70_000)) as archive:
        for turns in range(1, 9):
            put(archive, 0, turns)
        assert archive.compact() == 0  # more than half of the day's bytes are written
    with opened(tmp_path / "a") as archive:
        assert archive.compact() == 8


def test_a_mostly_dead_run_is_rewritten(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, 1 << 26)
    blocks, source = blocks_of(prompt(LENGTH)), MemoryKV.random(UNEVEN, LENGTH)
    assert tier.put(make_run(source, blocks[:5]))
    assert tier.put(make_run(source, blocks))  # as another process would that did not know of the first
    before = sum(row.nbytes for row in tier.index.runs())
    tier.close()
    with opened(tmp_path) as archive:
        assert archive.compact() == 1
        assert sorted(entry.blocks for entry in archive.contents.entries()) == [3, 5]
        assert sum(entry.bytes for entry in archive.contents.entries()) < before
        sink = MemoryKV(UNEVEN, LENGTH)
        archive.load(archive.lookup([block.exact for block in blocks]), prompt(LENGTH), LENGTH, sink)
        assert sink.same(source, 0, LENGTH)


def test_compacting_a_damaged_run_quarantines_it(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        for turns in range(1, 9):
            ids = put(archive, 0, turns)
        path = tmp_path / recovery.run_file(archive.lookup(ids)[4].run_id)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert archive.compact() == 0
        assert len(archive.lookup(ids)) == 4  # with it goes what stands on it
        assert archive.stats()["corrupt"] == 1


def test_compaction_passes_over_a_run_that_was_given_up_meanwhile(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        for turns in range(1, 9):
            ids = put(archive, 0, turns)
        (tmp_path / recovery.run_file(archive.lookup(ids)[4].run_id)).unlink()
        assert archive.compact() == 0
        assert len(archive.lookup(ids)) == 8  # what became of it is for those to say who load it


def test_a_parent_given_up_while_its_child_is_written_takes_the_child_along(tmp_path: Path) -> None:
    blocks, source = blocks_of(prompt(LENGTH)), MemoryKV.random(UNEVEN, LENGTH)
    tier, other = (DiskTier.open(tmp_path, 1 << 26) for _ in range(2))
    parent, child = make_run(source, blocks[:1]), make_run(source, blocks[1:])
    assert tier.put(parent)

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(child, name)

        def layers(self) -> Any:
            for number, layer in enumerate(child.layers()):
                if number == 1:
                    other.remove([parent.id])
                yield layer

    assert not tier.put(Interrupted())  # type: ignore[arg-type]
    assert (tier.health["dropped_writes"], tier.health["store_errors"]) == (1, 0)
    assert not list((tmp_path / recovery.RUNS).iterdir())
    assert not tier.index.files()
    tier.close(), other.close()


def test_quarantine_takes_what_stands_on_it(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        for turns in (3, 5, 8):
            ids = put(archive, 0, turns)
        path = tmp_path / recovery.run_file(archive.lookup(ids)[3].run_id)
        path.unlink()
        with pytest.raises(Exception, match="No such file"):
            archive.load(archive.lookup(ids), prompt(LENGTH), LENGTH, MemoryKV(UNEVEN, LENGTH))
        assert len(archive.lookup(ids)) == 3
        assert len(archive.contents.entries()) == 1
