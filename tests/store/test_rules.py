"""What is stored at all, and what is given up first: admission, times to live, pins, the day's budget; and clocks."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepwarm.errors import StoreError
from keepwarm.store import Archive
from keepwarm.store.catalog import schema
from keepwarm.store.catalog.index import Index, Wanted
from keepwarm.store.catalog.ranking import chosen_policy
from keepwarm.store.catalog.reservations import DAY, LEASE_SECONDS
from keepwarm.store.disk import recovery
from keepwarm.store.disk.owner import Owner
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.eviction import LRU
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.retention import Retention, Rules, Sightings
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, namespace, prompt

LENGTH = 64
LARGE = 2048  # tokens of a run that outweighs the catalogue
ROOM = schema.WAL_BYTES + (352 << 10)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def run_for(seed: int, length: int = LARGE, first: int = 0, last: int | None = None) -> Any:
    return make_run(MemoryKV.random(UNEVEN, length, seed), blocks_of(prompt(length, seed), 256)[first:last])


SIZE = run_for(0).nbytes + 8192


def put(archive: Archive, seed: int, turns: int | None = None, **arguments: Any) -> list[bytes]:
    blocks = blocks_of(prompt(LENGTH, seed))[:turns]
    archive.put(MemoryKV.random(UNEVEN, LENGTH, seed), blocks, namespace(), **arguments)
    archive.flush()
    return [block.exact for block in blocks]


def opened(folder: Path | None, **rules: Any) -> Archive:
    return Archive.open(folder, max_ram=1 << 24, max_disk=1 << 26, rules=Rules(**rules))


@pytest.mark.parametrize("on_disk", [True, False])
def test_second_use_stores_what_is_seen_twice(tmp_path: Path, on_disk: bool) -> None:
    with opened(tmp_path if on_disk else None, admit="second_use") as archive:
        ids = put(archive, 0, 4)
        assert archive.lookup(ids) == ()
        assert archive.stats()["extra"]["not_admitted"] == 1
        ids = put(archive, 0)  # its second half is seen for the first time
        assert len(archive.lookup(ids)) == 4
        put(archive, 0)
        assert len(archive.lookup(ids)) == 8
        assert len(archive.lookup(put(archive, 1, asked=True))) == 8


def test_sightings_are_shared_and_survive(tmp_path: Path) -> None:
    with opened(tmp_path, admit="second_use") as archive:
        ids = put(archive, 0)
    with opened(tmp_path, admit="second_use") as archive:
        put(archive, 0)
        assert len(archive.lookup(ids)) == 8


def test_sightings_are_bounded_and_the_oldest_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pure = Sightings(limit=4)
    names = [bytes([at]) * 32 for at in range(6)]
    assert pure.note(names[:4]) == set()
    assert pure.note(names[:1]) == set(names[:1])
    assert pure.note(names[4:]) == set()
    assert pure.note(names[:2]) == set(names[:1])  # the second was the oldest of those four
    monkeypatch.setattr("keepwarm.store.catalog.ranking.SIGHTINGS", 4)
    tier = DiskTier.open(tmp_path, 1 << 24)
    assert [tier.sight(each) for each in (names[:4], names[:1], names[4:], names[:2])] == [
        set(),
        set(names[:1]),
        set(),
        set(names[:1]),
    ]
    tier.close()


def test_short_prefixes_are_not_stored(tmp_path: Path) -> None:
    with opened(tmp_path, min_tokens=40) as archive:
        assert archive.lookup(put(archive, 0, 4)) == ()
        assert len(archive.lookup(put(archive, 0, 5))) == 5


def test_the_days_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, size = Clock(), run_for(0).nbytes
    rules = Rules(writes_per_day=int(2.5 * size))
    tiers = [DiskTier.open(tmp_path, 1 << 30, rules=rules, clock=clock) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "keepwarm.store"):
        assert [tiers[seed % 2].put(run_for(seed)) for seed in range(5)] == [True, True, False, False, False]
    assert len([record for record in caplog.records if "today" in record.message]) == 2  # one of each process
    assert sum(tier.health["over_budget"] for tier in tiers) == 3
    assert not tiers[0].space.fits(size)
    clock.now += DAY
    assert tiers[0].space.fits(size)
    assert tiers[0].put(run_for(7))
    clock.now -= DAY  # set back: that day's bytes are still written
    assert not tiers[0].put(run_for(8))
    for tier in tiers:
        tier.close()


def test_over_budget_runs_stay_in_ram(tmp_path: Path) -> None:
    with opened(tmp_path, writes_per_day=1) as archive:
        ids = put(archive, 0)
        assert {ref.tier for ref in archive.lookup(ids)} == {"ram"}
        assert archive.stats()["extra"]["over_budget"] > 0
    with opened(tmp_path, writes_per_day=1) as archive:
        assert archive.lookup(ids) == ()


def ram(clock: Clock) -> Any:
    return RamTier(3 * run_for(0).nbytes, policy=LRU(), clock=clock)


def disk(folder: Path) -> Callable[[Clock], Any]:
    return lambda clock: DiskTier.open(folder, 3 * SIZE + ROOM, clock=clock, rules=Rules(disk_policy="lru"))


def retain(tier: Any, run: Any, clock: Clock, ttl: float, priority: int) -> None:
    if isinstance(tier, RamTier):
        tier.retain(run.id, Retention.beginning(clock(), ttl, priority))
    else:
        tier.index.retain(run.blocks[-1].id, ttl, priority)


def held(tier: Any, runs: list[Any]) -> list[bool]:
    return [bool(tier.lookup([run.blocks[0].id])) for run in runs]


@pytest.fixture(params=["ram", "disk"])
def tier_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Clock], Any]:
    return ram if request.param == "ram" else disk(tmp_path)


def test_pinned_runs_go_last_and_not_never(tier_of: Callable[[Clock], Any]) -> None:
    clock, runs = Clock(), [run_for(seed) for seed in range(8)]
    tier = tier_of(clock)
    for run in runs[:3]:
        tier.put(run)
    retain(tier, runs[0], clock, 60, 2)
    retain(tier, runs[1], clock, 60, 1)
    for run in runs[3:5]:
        assert tier.put(run)
    assert held(tier, runs) == [True, True, False, False, True, False, False, False]
    retain(tier, runs[4], clock, 60, 3)
    assert tier.put(runs[5])  # everything is pinned: the lowest priority goes
    assert held(tier, runs) == [True, False, False, False, True, True, False, False]
    clock.now += 61
    assert tier.put(runs[6])
    assert tier.put(runs[7])
    assert held(tier, runs)[0] is False  # the pin has ended, and it is the oldest


def test_what_outlived_its_time_goes_first(tier_of: Callable[[Clock], Any]) -> None:
    clock, runs = Clock(), [run_for(seed) for seed in range(5)]
    tier = tier_of(clock)
    for run in runs[:3]:
        tier.put(run)
    retain(tier, runs[2], clock, 10, 0)
    clock.now += 11
    assert tier.put(runs[3])
    assert held(tier, runs) == [True, True, False, True, False]
    assert tier.put(runs[4])
    assert held(tier, runs) == [False, True, False, True, True]


def test_a_use_renews_a_time_to_live(tier_of: Callable[[Clock], Any]) -> None:
    clock, runs = Clock(), [run_for(seed) for seed in range(4)]
    tier = tier_of(clock)
    for run in runs[:3]:
        tier.put(run)
    retain(tier, runs[2], clock, 10, 0)
    clock.now += 9
    (tier.touch if isinstance(tier, RamTier) else lambda run_id: tier.touch([run_id]))(runs[2].id)
    clock.now += 9
    assert tier.put(runs[3])
    assert held(tier, runs) == [False, True, True, True]


def test_uses_of_what_has_a_time_to_live_take_no_memory() -> None:
    clock, run = Clock(), run_for(0)
    tier = ram(clock)
    tier.put(run, Retention.beginning(clock(), 10, 0))
    for _ in range(1000):
        clock.now += 1
        tier.touch(run.id)
    assert len(tier._ends) < 100
    others = [run_for(seed) for seed in range(1, 4)]
    for other in others[:2]:
        tier.put(other)
    clock.now += 11
    assert tier.put(others[2])
    assert held(tier, [run, *others]) == [False, True, True, True]


def test_space_that_another_host_gave_up_is_taken_before_a_run_is(tmp_path: Path) -> None:
    tier, runs = disk(tmp_path)(Clock()), [run_for(seed) for seed in range(4)]
    for run in runs[:3]:
        assert tier.put(run)
    assert tier.index.forget([runs[2].id])
    with tier.index.database.transaction() as db:
        db.execute("UPDATE doomed SET owner = ?", [str(Owner("another pod", 7, "1"))])
    assert tier.put(runs[3])
    assert held(tier, runs) == [True, True, False, True]
    assert not tier.files.path(runs[2].id).exists()
    tier.close()


def test_a_clock_that_is_set_back_makes_no_pin_longer(tier_of: Callable[[Clock], Any]) -> None:
    clock, runs = Clock(), [run_for(seed) for seed in range(7)]
    tier = tier_of(clock)
    for run in runs[:4]:
        tier.put(run)
    retain(tier, runs[3], clock, 60, 1)
    tier.put(runs[4])
    clock.now -= 1e6
    tier.put(runs[5])
    clock.now += 61
    tier.put(runs[6])
    for seed in range(10, 12):
        tier.put(run_for(seed))
    assert not any(held(tier, runs[:4]))


def test_what_is_used_after_the_clock_was_set_back_counts_as_used(tmp_path: Path) -> None:
    clock, runs = Clock(), [run_for(seed) for seed in range(4)]
    tier = disk(tmp_path)(clock)
    for run in runs[:2]:
        tier.put(run)
    clock.now -= 1e6
    tier.put(runs[2])
    tier.touch([runs[0].id])
    tier.put(runs[3])
    assert held(tier, runs) == [True, False, True, True]
    assert all(row.last_used >= row.created for row in tier.index.runs())
    tier.close()


def test_a_lease_ends_although_the_clock_was_set_back(tmp_path: Path) -> None:
    clock, run = Clock(), run_for(0)
    tier = DiskTier.open(tmp_path, 1 << 26, clock=clock)
    tier.index.expire()
    assert not tier.index.reserve(Wanted(run.id, recovery.run_file(run.id), 1000, run), 1 << 26, Rules())
    clock.now -= 1e6
    assert tier.index.expire() == []
    clock.now += LEASE_SECONDS + 1
    assert [row.id for row in tier.index.expire()] == [run.id]
    tier.close()


def test_retain_by_name_keeps_the_whole_prompt(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        put(archive, 0, 3)
        ids = put(archive, 0)
        archive.contents.name("greeting", ids[-1])
        assert archive.contents.retain("greeting", 60) == 2
        assert archive.contents.retain(ids[1], 60, priority=0) == 1
        for bad in (0, -1, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="finite"):
                archive.contents.retain("greeting", bad)
        with pytest.raises(ValueError, match="priority"):
            archive.contents.retain("greeting", 1, -1)
        with pytest.raises(StoreError, match="nothing is named"):
            archive.contents.retain("nobody", 60)
        with pytest.raises(StoreError, match="not stored"):
            archive.contents.retain(b"?" * 32, 60)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), ask=st.integers(0, 24), data=st.data())
def test_binary_search_finds_what_asking_for_every_block_finds(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], ask: int, data: st.DataObject
) -> None:
    blocks = blocks_of(prompt(200, 3), 8)[:24]
    source = MemoryKV.random(UNEVEN, 200, 3)
    tier = DiskTier.open(tmp_path_factory.mktemp("chain"), 1 << 26)
    at = 0
    for length in lengths:  # runs that continue each other, some overlapping the one before
        first = max(0, at - data.draw(st.integers(0, 1)))
        assert tier.put(make_run(source, blocks[first : at + length]))
        at += length
    begin = data.draw(st.integers(0, at - 1))
    ids = [block.exact for block in blocks[begin:]][:ask]
    found = tier.index.find(ids)
    wanted = [found[each] for each in ids if each in found]
    assert len(wanted) == min(max(0, at - begin), len(ids))
    from keepwarm.store.catalog.chains import find_chain

    assert find_chain(tier.index.database.read, ids) == wanted
    assert list(tier.lookup(ids)) == wanted
    tier.close()


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


def test_ram_holds_chains_from_their_beginning(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        put(archive, 0, 4)
        ids = put(archive, 0)
        first, last = (archive.lookup(ids)[at].run_id for at in (0, 7))
        other = DiskTier.open(tmp_path, 1 << 26)  # another process gives up what the second run stands on
        other.remove([first])
        other.close()
        assert [ref.tier for ref in archive.lookup(ids)] == ["ram"] * 8
        archive._ram.remove(first)  # and what stands on it
        assert archive._ram.runs() == ()
        assert archive.lookup(ids) == ()

        put(archive, 1, 4)
        ids = put(archive, 1)
        first, last = (archive.lookup(ids)[at].run_id for at in (0, 7))
        archive.clear_ram()
        archive.promote([last])
        archive.flush()
        assert [run.id for run in archive._ram.runs()] == [first, last]


def test_what_continues_a_run_on_disk_enters_ram_with_it_or_not_at_all(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        put(archive, 0, 4)
        archive.clear_ram()
        ids = put(archive, 0)
        assert [ref.tier for ref in archive.lookup(ids)] == ["ram"] * 8
        whole = archive._ram.nbytes

        put(archive, 1, 4)
        archive.clear_ram()
        archive._ram.cap = whole - 1
        ids = put(archive, 1)
        assert archive._ram.runs() == ()
        assert [ref.tier for ref in archive.lookup(ids)] == ["disk"] * 8


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
