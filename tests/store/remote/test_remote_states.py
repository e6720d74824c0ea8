"""Snapshots of recurrent state in remote tiers: written, found, pulled and purged as the runs they stand on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.remote_archives import behind, damage
from tests.helpers.states import Stateful, stored

from keepwarm.core.snapshots import snapshot_id
from keepwarm.errors import CorruptRun
from keepwarm.store import Archive


def ids_of(one: Stateful) -> list[bytes]:
    return [snapshot_id(name) for name in one.ids]


def test_another_replica_finds_them_and_keeps_them_nearer_when_asked(
    url: str, opened: Callable[..., Archive], tmp_path: Path
) -> None:
    one, tier = stored(opened(url), states=(2, 7)), url.partition(":")[0]
    other = opened(url, folder=tmp_path / "other")
    assert one.taken(other) == [2, 7]
    found = other.find(ids_of(one), far=True)
    assert {ref.tier for ref in found.values()} == {tier}
    assert other.find(ids_of(one)) == {}, "a round trip is asked for"
    other.pull([*other.lookup(one.ids), *found.values()])
    other.flush()
    assert {ref.tier for ref in other.find(ids_of(one)).values()} == {"ram"}
    other.clear_ram()
    assert {ref.tier for ref in other.find(ids_of(one)).values()} == {"disk"}
    assert one.taken(other) == [2, 7]


def test_replicating_brings_those_that_are_stored(url: str, opened: Callable[..., Archive], tmp_path: Path) -> None:
    alone = opened(folder=tmp_path / "store")
    one = stored(alone, states=(2, 7))
    alone.close()
    later = opened(url, folder=tmp_path / "store")
    later.replicate([*one.ids, *ids_of(one)])
    later.flush()
    assert one.taken(opened(url)) == [2, 7]


def test_a_damaged_one_is_a_miss(url: str, opened: Callable[..., Archive], tmp_path: Path) -> None:
    first = opened(url)
    one = stored(first, states=(2,))
    damage(first)
    other = opened(url)
    with pytest.raises(CorruptRun):
        one.taken(other)
    assert one.taken(other) == []
    assert other.stats()["corrupt"] == 1


def test_a_purge_of_everything_takes_them(url: str, opened: Callable[..., Archive]) -> None:
    first = opened(url)
    one = stored(first, states=(2, 7))
    first.purge_all()
    assert one.taken(opened(url)) == []
    assert behind(first).books.marks() == {}
