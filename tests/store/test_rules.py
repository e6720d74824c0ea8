"""What is stored at all, and what is evicted first: admission, times to live, pins, the day's budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.small_runs import ROOM, SIZE, Clock, opened, put, run_for

from keepwarm.errors import StoreError
from keepwarm.store.catalog.reservations import DAY, LEASE_SECONDS
from keepwarm.store.catalog.rows import Wanted
from keepwarm.store.disk import recovery
from keepwarm.store.disk.owner import Owner
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.eviction import LRU
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.retention import Retention, Rules, Sightings
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, prompt


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


def test_ram_holds_chains_from_their_beginning(tmp_path: Path) -> None:
    with opened(tmp_path) as archive:
        put(archive, 0, 4)
        ids = put(archive, 0)
        first, last = (archive.lookup(ids)[at].run_id for at in (0, 7))
        other = DiskTier.open(tmp_path, 1 << 26)  # another process evicts what the second run stands on
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
