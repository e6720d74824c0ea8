"""Purges, times to live and caps of a remote tier that several replicas write to at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
from tests.helpers.remote_archives import LENGTH, NUMBERS, PATIENT, Prompt, behind, eventually, watch
from tests.helpers.remotes import RedisServer

from keepwarm.core.identity import salt_key, salt_tag
from keepwarm.errors import RemoteUnavailable
from keepwarm.store import Archive
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.redis import RedisBlobs

Point = Callable[[str, Any], bool]  # told of a call and its first argument


class Replica:
    """One replica's work on the service, which stops before what it is told to and waits to be told more."""

    def __init__(self, archive: Archive, work: Callable[[], object]) -> None:
        self._point: Point | None = None
        self._stopped, self._go_on = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,))
        watch(archive, self._tell)

    def until(self, point: Point) -> None:
        self._point = point
        self.go_on()

    def finish(self) -> None:
        self.go_on()
        self._thread.join()

    def go_on(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go_on.release()
        assert self._stopped.acquire(timeout=20)

    def _run(self, work: Callable[[], object]) -> None:
        work()
        self._stopped.release()

    def _tell(self, what: str, argument: Any) -> None:
        if self._point is not None and self._point(what, argument):
            self._point = None
            self._stopped.release()
            assert self._go_on.acquire(timeout=20)


POINTS: dict[str, Point] = {
    "mark": lambda what, groups: what == "add" and "v1/runs" in groups,
    "body": lambda what, _: what == "put_body",
    "head": lambda what, items: what == "put" and any(key.endswith("/head") for key in items),
    "places": lambda what, items: what == "put" and any(key.startswith("v1/b/") for key in items),
    "looking for runs": lambda what, group: what == "members" and group.startswith("v1/t/"),
    "removing bytes": lambda what, _: what == "delete",
    "removing marks": lambda what, groups: what == "discard" and "v1/runs" in groups,
}


@pytest.mark.parametrize("writing", ["body", "head", "places"])
@pytest.mark.parametrize(
    ("how", "removing"),
    [
        ("evicted", "removing bytes"),
        pytest.param("evicted", "removing marks", marks=pytest.mark.slow),
        pytest.param("purged", "removing bytes", marks=pytest.mark.slow),
        ("purged", "removing marks"),
    ],
)
def test_a_run_that_another_replica_gives_up_while_it_is_written_goes_whole(
    how: str, writing: str, removing: str, url: str, opened: Callable[..., Archive], tmp_path: Path
) -> None:
    """It is written to its end while the other is between two steps of its removal."""
    one, two = Prompt(0, salt="a"), Prompt(1, salt="b")
    sizing = opened(f"file://{tmp_path}/sizing")
    one.put(sizing)
    limits = Limits(timeout=20.0, load_timeout=20.0, cap=behind(sizing).books.marks().popitem()[0].nbytes * 3 // 2)
    archive, others = opened(url, limits=limits if how == "evicted" else PATIENT), opened(url, limits=limits)
    writer = Replica(archive, lambda: one.put(archive))
    other = Replica(others, lambda: two.put(others) if how == "evicted" else others.purge(salt_key("a")))
    writer.until(POINTS[writing])
    other.until(POINTS[removing])
    writer.finish()
    other.finish()
    reader = opened(url)
    nothing_is_left(reader, one, "a", runs=how == "evicted")
    if how == "evicted":
        assert sum(two.loads(reader).values()) == LENGTH


def test_a_run_whose_mark_a_purge_has_not_seen_goes_whole(url: str, opened: Callable[..., Archive]) -> None:
    one, archive, others = Prompt(0, salt="a"), opened(url), opened(url)
    writer = Replica(archive, lambda: one.put(archive))
    other = Replica(others, lambda: others.purge(salt_key("a")))
    writer.until(POINTS["mark"])
    other.until(POINTS["looking for runs"])
    writer.until(POINTS["body"])
    other.until(POINTS["removing marks"])
    writer.finish()
    other.finish()
    nothing_is_left(opened(url), one, "a", runs=0)


def nothing_is_left(reader: Archive, one: Prompt, salt: str, *, runs: int) -> None:
    """Not a key and not a member, beside those of so many other runs."""
    blobs, marks = behind(reader).tier.blobs, behind(reader).books.marks()
    assert one.loads(reader) == {}
    assert len(marks) == runs
    assert blobs.get([f"v1/b/{block_id.hex()}" for block_id in one.ids], 20.0) == [None] * len(one.ids)
    assert [blobs.members(f"v1/p/{block.parent_prefix.hex()}", 20.0) for block in one.blocks] == [{}] * len(one.blocks)
    assert blobs.members(f"v1/t/{salt_tag(salt_key(salt)).hex()}", 20.0) == {}
    assert {run for run in runs_with_bytes(blobs) if run not in {mark.run_id for mark in marks}} == set()


def runs_with_bytes(blobs: Any) -> set[str]:
    if isinstance(blobs, RedisBlobs):
        import redis as client

        assert blobs._pool is not None
        keys = [
            key.decode() for key in client.Redis(connection_pool=blobs._pool).scan_iter(match=f"{blobs._prefix}v1/r/*")
        ]
        return {key.split("{")[1].split("}")[0] for key in keys}
    found = {meta["path"] for batch in obstore.list(blobs._reading, prefix="v1/r") for meta in batch}
    return {path.split("/")[2] for path in found}


def test_noting_a_use_marks_no_run_that_is_gone(url: str, opened: Callable[..., Archive]) -> None:
    one, two = opened(url), opened(url)
    Prompt().put(one)
    assert sum(Prompt().loads(two).values()) == LENGTH
    for mark in behind(one).books.marks():
        behind(one).books.evict(mark)
    behind(two).books.merge(now=True)
    assert not behind(one).books.marks()


def test_what_is_not_used_for_its_time_to_live_goes(
    redis: RedisServer, opened: Callable[..., Archive], tmp_path: Path
) -> None:
    limits = Limits(timeout=20.0, load_timeout=20.0, ttl=3600.0)
    url = f"file://{tmp_path}/objects"
    one = Prompt()
    archive = opened(url, limits=limits)
    one.put(archive)
    books = behind(archive).books
    assert books.expire() == 0
    books._tier.limits = Limits(ttl=1e-6)
    assert books.expire() == 1
    assert one.loads(opened(url)) == {}
    in_redis = opened(f"{redis.url}?prefix=ttl:", limits=limits)
    one.put(in_redis)
    import redis as client

    with client.Redis(port=redis.port) as plain:
        keys = list(plain.scan_iter(match="ttl:v1/*"))
        assert keys
        lasting = b"ttl:v1/runs"
        assert all(3000 < plain.ttl(key) <= 3600 for key in keys if key != lasting)
        assert plain.ttl(lasting) == plain.ttl(b"ttl:layout") == -1


def test_what_is_in_use_outlives_its_time_to_live_with_all_its_sets(
    redis: RedisServer, opened: Callable[..., Archive]
) -> None:
    import redis as client

    one, prefix = Prompt(salt="a"), f"ttl{next(NUMBERS)}:"
    archive = opened(f"{redis.url}?prefix={prefix}", limits=Limits(timeout=20.0, load_timeout=20.0, ttl=2000.0))
    books = behind(archive).books
    one.put(archive)
    books.name("lasts", one.ids[-1])
    books.report("replica", {"requests": 1})
    books.purge(b"another")
    archive.clear_ram()
    with client.Redis(port=redis.port) as plain:
        for pause, renewed in ((501.0, True), (499.0, False)):
            for key in plain.scan_iter(match=f"{prefix}*"):
                if plain.ttl(key) != -1:
                    plain.expire(key, 100)
            assert sum(one.loads(archive).values()) == LENGTH
            books._touched = dict.fromkeys(behind(archive).tier._used, time.time() - pause)
            books.merge()
            left = {key.decode().removeprefix(prefix): plain.ttl(key) for key in plain.scan_iter(match=f"{prefix}*")}
            lasting = {"layout", "v1/names", "v1/n/lasts", "v1/purges", "v1/runs", "v1/replicas"}
            assert {key for key, ttl in left.items() if ttl == -1} == lasting
            assert {key[:5] for key in left if key not in lasting} == {"v1/b/", "v1/p/", "v1/r/", "v1/t/", "v1/s/"}
            ttls = [ttl for key, ttl in left.items() if key not in lasting and "/s/" not in key]
            assert all((ttl > 1900) == renewed for ttl in ttls)


def test_noting_a_use_brings_back_nothing_of_a_run_that_is_purged_meanwhile(
    url: str, opened: Callable[..., Archive]
) -> None:
    one, archive, others = Prompt(salt="a"), opened(url), opened(url)
    one.put(archive)
    archive.clear_ram()
    assert sum(one.loads(archive).values()) == LENGTH
    purged: list[int] = []

    def tell(what: str, argument: Any) -> None:
        if what == "add" and not purged:
            purged.append(others.purge(salt_key("a")).runs)

    watch(archive, tell)
    behind(archive).books.merge(now=True)
    assert purged == [1]
    nothing_is_left(opened(url), one, "a", runs=0)


def test_what_waits_under_a_salt_that_is_purged_meanwhile_is_not_written(
    url: str, opened: Callable[..., Archive]
) -> None:
    mine, public, archive, others = Prompt(0, salt="a"), Prompt(1), opened(url), opened(url)
    for each in (archive, others):
        behind(each).do(behind(each).follow_purges)
        each.flush()
    behind(archive).tier.failed(RemoteUnavailable("a blip"))
    mine.put(archive)
    public.put(archive)
    others.purge(salt_key("a"))
    eventually(lambda: behind(archive).tier.working)
    archive.flush()
    assert mine.loads(archive) == {}
    assert sum(public.loads(others).values()) == LENGTH
    nothing_is_left(opened(url), mine, "a", runs=1)


def test_a_purge_by_one_whose_clock_is_behind_is_followed_and_ones_own_only_once(
    url: str, opened: Callable[..., Archive]
) -> None:
    mine, archive, others = Prompt(0, salt="a"), opened(url), opened(url)
    mine.put(archive)
    behind(archive)._purges = {salt_tag(salt_key("a")): time.time() + 1000}
    others.purge(salt_key("a"))
    behind(archive).do(behind(archive).follow_purges)
    archive.flush()
    assert mine.loads(archive) == {}
    archive.purge(salt_key("a"))
    mine.put(archive)
    behind(archive).do(behind(archive).follow_purges)
    archive.flush()
    assert mine.loads(archive) == {"ram": LENGTH}
