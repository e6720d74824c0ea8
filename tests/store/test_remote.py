"""Remote tiers behind RAM and disk: what is found, what it costs, and services that fail, lie, fill up or vanish."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import obstore
import pytest
from tests.store.remotes import RedisServer, S3Server, free_port, redis_cluster, redis_server, s3_server

from keepwarm.core.blocks import chain, derived_id
from keepwarm.core.identity import salt_key, salt_tag
from keepwarm.core.ports import BlockRef
from keepwarm.errors import ConfigError, CorruptRun, RemoteUnavailable, StoreError, StoreLocked, StoreTooNew
from keepwarm.store import Archive
from keepwarm.store.remote import tier as remote
from keepwarm.store.remote.backend import redacted
from keepwarm.store.remote.circuit_breaker import LONGEST_PAUSE, Breaker
from keepwarm.store.remote.heads import Mark, Whereabouts
from keepwarm.store.remote.layout import LAYOUT_KEY
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.redis import RedisBlobs
from keepwarm.store.remote.tiers import open_blobs
from keepwarm.store.remote.write_behind import Behind
from keepwarm.store.runfile import header
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

LENGTH = 64
PATIENT = Limits(timeout=20.0, load_timeout=20.0)
_NUMBERS = count()


class Prompt:
    """A made-up prompt and its KV."""

    def __init__(self, seed: int = 0, length: int = LENGTH, step: int = 8, salt: str | None = None) -> None:
        self.tokens = prompt(length, seed)
        self.blocks = blocks_of(self.tokens, step)
        if salt is not None:
            cuts = [block.end for block in self.blocks]
            self.blocks = chain(self.tokens, cuts, namespace(), {0: salt_key(salt)})
        self.ids = [block.exact for block in self.blocks]
        self.kv = MemoryKV.random(UNEVEN, length, seed)

    def put(self, archive: Archive, first: int = 0, last: int | None = None) -> None:
        archive.put(self.kv, self.blocks[first:last], namespace())
        archive.flush()

    def loads(self, archive: Archive) -> dict[str, int]:
        """Load what is found, looking up again as the engine does; it must be equal to the bit."""
        for _ in range(8):
            refs = archive.lookup(self.ids)
            if not refs:
                return {}
            end = refs[-1].end
            sink = MemoryKV(UNEVEN, len(self.tokens))
            try:
                taken = archive.load(refs, self.tokens[:end], end, sink)
            except CorruptRun:
                continue
            assert sink.same(self.kv, 0, end)
            return taken
        raise AssertionError("looked up again and again")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["redis", "s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return f"{request.getfixturevalue('redis').url}?prefix=test{next(_NUMBERS)}:"
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        return server.bucket(f"test{next(_NUMBERS)}")
    return f"file://{tmp_path}/objects"


@pytest.fixture
def opened() -> Iterator[Callable[..., Archive]]:
    """Opens archives; RAM and nothing else unless a folder is given."""
    made: list[Archive] = []

    def open_(*urls: str, folder: Path | None = None, limits: Limits = PATIENT, **settings: Any) -> Archive:
        made.append(Archive.open(folder, max_ram=1 << 24, max_disk=1 << 24, remotes=urls, limits=limits, **settings))
        return made[-1]

    yield open_
    for each in made:
        each.close()


def behind(archive: Archive) -> Behind:
    return next(iter(archive.remotes))


def eventually(what: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def damage(archive: Archive) -> None:
    """Change one byte of every run's KV in the remote tier."""
    one = behind(archive)
    for mark in one.books.marks():
        head = one.books._head_now(mark.run_id)
        assert head is not None
        key = f"v1/r/{mark.run_id}/body"
        body = bytearray(one.tier.blobs.body(key, head.body_bytes, 20.0, whole=True).read(head.body_bytes, 0))
        body[len(body) // 2] ^= 1
        one.tier.blobs.put_body(key, memoryview(bytes(body)), 20.0)


# What is found


def test_another_replica_finds_it_to_the_bit_and_keeps_it_nearer_when_asked(
    url: str, opened: Callable[..., Archive], tmp_path: Path
) -> None:
    one, tier = Prompt(), url.partition(":")[0]
    one.put(opened(url))
    other = opened(url, folder=tmp_path / "other")
    assert one.loads(other) == {tier: LENGTH}
    other.pull(other.lookup(one.ids))
    other.flush()
    assert one.loads(other) == {"ram": LENGTH}
    other.clear_ram()
    assert one.loads(other) == {"disk": LENGTH}


def test_a_chain_over_all_tiers_is_one_chain(url: str, opened: Callable[..., Archive], tmp_path: Path) -> None:
    """The beginning is in RAM, the next blocks are on disk, the rest is known to the remote alone."""
    one, tier = Prompt(), url.partition(":")[0]
    whole = opened(url)
    for first in range(0, 8, 2):
        one.put(whole, first, first + 2)
    near = opened(folder=tmp_path / "near")
    one.put(near, 0, 2)
    near.close()
    other = opened(url, folder=tmp_path / "near")
    one.put(other, 2, 4)
    other.flush()
    other._ram.remove(other.lookup(one.ids)[3].run_id)
    assert one.loads(other) == {"ram": 16, "disk": 16, tier: 32}


def test_what_follows_brings_what_it_stands_on(url: str, opened: Callable[..., Archive], tmp_path: Path) -> None:
    one = Prompt()
    one.put(opened(folder=tmp_path / "store"), 0, 4)
    opened_later = opened(url, folder=tmp_path / "store")
    one.put(opened_later, 4, 8)
    other = opened(url)
    assert sum(one.loads(other).values()) == LENGTH


def test_replicating_brings_a_stored_chain(url: str, opened: Callable[..., Archive], tmp_path: Path) -> None:
    one = Prompt()
    one.put(opened(folder=tmp_path / "store"))
    later = opened(url, folder=tmp_path / "store")
    later.replicate(one.ids)
    later.contents.name("what / ever.", one.ids[-1])
    later.flush()
    assert behind(later).books.names() == {"what / ever.": one.ids[-1]}
    assert sum(one.loads(opened(url)).values()) == LENGTH


def test_a_branch_shares_its_beginning(url: str, opened: Callable[..., Archive]) -> None:
    one, two = Prompt(0), Prompt(0)
    two.tokens = two.tokens.copy()
    two.tokens[40:] += 1
    two.blocks = blocks_of(two.tokens, 8)
    two.ids = [block.exact for block in two.blocks]
    two.kv = MemoryKV.random(UNEVEN, LENGTH, 5)
    for pair, other in zip(two.kv.arrays, one.kv.arrays, strict=True):
        for mine, theirs in zip(pair, other, strict=True):
            mine[:, :40] = theirs[:, :40]
    writer = opened(url)
    one.put(writer)
    two.put(writer)
    assert len(behind(writer).books.marks()) == 2
    reader = opened(url)
    assert sum(two.loads(reader).values()) == LENGTH
    assert sum(one.loads(reader).values()) == LENGTH
    assert {ref.id for ref in reader.children(one.blocks[5].parent_prefix)} <= {one.ids[5], two.ids[5]}


def test_derived_names_are_found_too(url: str, opened: Callable[..., Archive]) -> None:
    one = Prompt()
    parent = one.blocks[0].parent_exact
    ids = []
    for block in one.blocks:
        parent = derived_id(parent, block)
        ids.append(parent)
    writer = opened(url)
    writer.put(one.kv, one.blocks, namespace(), ids=ids, parent=one.blocks[0].parent_exact)
    writer.flush()
    reader = opened(url)
    assert reader.lookup(one.ids) == ()
    assert len(reader.lookup(ids)) == len(ids)


def test_two_remotes_are_asked_in_order(redis: RedisServer, opened: Callable[..., Archive], tmp_path: Path) -> None:
    near, far = f"{redis.url}?prefix=two{next(_NUMBERS)}:", f"file://{tmp_path}/objects"
    one = Prompt()
    one.put(opened(near), 0, 4)
    one.put(opened(far))
    both = opened(near, far)
    assert one.loads(both) == {"redis": 32, "file": 32}
    with pytest.raises(ConfigError, match="two remotes"):
        opened(near, near)


class Counting:
    """Passes everything on to a service, and counts its round trips."""

    def __init__(self, blobs: Any) -> None:
        self._blobs = blobs
        self.trips = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._blobs, name)
        if name in ("get", "members", "body"):
            self.trips += 1
        return found


@pytest.mark.parametrize(("kind", "most"), [("redis", 2), ("file", 5)])
def test_a_lookup_costs_few_round_trips_whatever_the_blocks(
    kind: str, most: int, redis: RedisServer, opened: Callable[..., Archive], tmp_path: Path
) -> None:
    url = f"{redis.url}?prefix=trips{next(_NUMBERS)}:" if kind == "redis" else f"file://{tmp_path}/objects"
    one = Prompt(length=1000, step=2)
    writer = opened(url)
    for first in range(0, 400, 100):
        one.put(writer, first, first + 100)
    archive = opened(url)
    tier = behind(archive).tier
    counting = tier.blobs = Counting(tier.blobs)  # type: ignore[assignment]
    assert len(archive.lookup(one.ids)) == 400
    assert counting.trips <= most
    counting.trips = 0
    assert len(archive.lookup(one.ids)) == 400  # the heads are known now
    assert counting.trips <= most - 1
    counting.trips = 0
    walked: list[BlockRef] = []
    for block in one.blocks[:400]:
        walked += archive.children(block.parent_prefix)
    assert len(walked) == 400
    assert counting.trips == 0


# Tenants, keys, versions


def test_a_purge_reaches_the_remote_and_the_other_replicas(url: str, opened: Callable[..., Archive]) -> None:
    mine, other, public = Prompt(0, salt="a"), Prompt(0, salt="b"), Prompt(1)
    one, two = opened(url), opened(url)
    for each in (mine, other, public):
        each.put(one)
        each.put(two)
    assert not set(mine.ids) & set(other.ids)
    behind(two).follow_purges()
    assert one.purge(salt_key("a")).runs == 1
    left = opened(url)
    assert mine.loads(left) == {}
    assert sum(other.loads(left).values()) == sum(public.loads(left).values()) == LENGTH
    members = behind(left).tier.blobs.members(f"v1/t/{salt_tag(salt_key('a')).hex()}", 20.0)
    assert members == {}
    behind(two).follow_purges()
    assert mine.loads(two) == {}
    assert public.loads(two) == {"ram": LENGTH}


def test_a_purge_that_cannot_reach_the_remote_says_so(opened: Callable[..., Archive]) -> None:
    archive = opened(f"redis://127.0.0.1:{free_port()}/", limits=Limits(timeout=0.5))
    with pytest.raises(StoreError, match="not complete"):
        archive.purge(salt_key("a"))


def test_an_encrypted_remote_needs_its_key(url: str, opened: Callable[..., Archive]) -> None:
    key, one = bytes(range(32)), Prompt()
    one.put(opened(url, key=key))
    assert sum(one.loads(opened(url, key=key)).values()) == LENGTH
    for wrong in (None, bytes(range(1, 33))):
        with pytest.raises(StoreLocked, match="key"):
            opened(url, key=wrong)


def test_a_newer_layout_is_refused_and_a_newer_run_is_a_miss_with_a_message(
    url: str, opened: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = Prompt(), Prompt(1)
    writer = opened(url)
    with monkeypatch.context() as patch:
        patch.setattr(header, "_version_of", lambda blocks: header.FORMAT + 1)
        one.put(writer)
    two.put(writer)
    reader = opened(url)
    assert one.loads(reader) == {}
    assert "count as not stored" in caplog.text
    assert sum(two.loads(reader).values()) == LENGTH
    behind(writer).tier.blobs.put({LAYOUT_KEY: b'{"layout": 99, "key": null}'}, 20.0)
    with pytest.raises(StoreTooNew, match="upgrade"):
        opened(url)


# The cap and the time to live


def test_the_cap_holds_among_replicas_that_write_at_once(url: str, opened: Callable[..., Archive]) -> None:
    limits = Limits(timeout=20.0, load_timeout=20.0, cap=60_000)
    archives = [opened(url, limits=limits) for _ in range(3)]

    def write(at: int) -> None:
        for seed in range(6):
            Prompt(100 * at + seed).put(archives[at])

    threads = [threading.Thread(target=write, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raced = url.startswith("s3")  # this server answers 500 to some writes that race, and then a mark may be left behind
    if raced:
        Prompt(999).put(archives[0])  # who writes next brings it under the cap
    marks = behind(archives[0]).books.marks()
    assert 0 < sum(mark.nbytes for mark in marks) <= 60_000
    reader = opened(url, limits=limits)
    seeds = [seed for at in range(3) for seed in range(100 * at, 100 * at + 6)]
    found = [seed for seed in (*seeds, 999) if Prompt(seed).loads(reader)]
    assert len(found) <= len(marks)
    assert raced or len(found) == len(marks)


class Watched:
    """Passes everything on to a service, after telling of it."""

    def __init__(self, blobs: Any, tell: Callable[[str, Any], None]) -> None:
        self._blobs = blobs
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._blobs, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._tell(name, arguments[0] if arguments else None)
            return found(*arguments, **named)

        return call


def watch(archive: Archive, tell: Callable[[str, Any], None]) -> None:
    books = behind(archive).books
    books._blobs = Watched(books._blobs, tell)  # type: ignore[assignment]


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


@pytest.mark.parametrize("removing", ["removing bytes", "removing marks"])
@pytest.mark.parametrize("writing", ["body", "head", "places"])
@pytest.mark.parametrize("how", ["evicted", "purged"])
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

    one, prefix = Prompt(salt="a"), f"ttl{next(_NUMBERS)}:"
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


# Services that fail


def test_one_that_is_not_there_costs_one_time_out(opened: Callable[..., Archive]) -> None:
    archive = opened(f"redis://127.0.0.1:{free_port()}/", limits=Limits(timeout=0.5))
    for seed in range(3):
        one = Prompt(seed)
        one.put(archive)
        assert one.loads(archive) == {"ram": LENGTH}
    assert archive.stats()["extra"]["remote"]["redis"]["failures"] == 1
    assert archive.stats()["extra"]["remote"]["redis"]["state"] == "failing"


def test_whatever_the_client_raises_is_a_failure_of_the_service(opened: Callable[..., Archive], tmp_path: Path) -> None:
    def fail(what: str, argument: Any) -> None:
        if what in ("get", "members"):
            raise RuntimeError("of the client's own kind")

    asks: list[Callable[[Archive], Any]] = [
        lambda archive: archive.lookup(Prompt().ids),
        lambda archive: archive.children(Prompt().blocks[0].parent_prefix),
        lambda archive: behind(archive).tier.find(Prompt().ids),
    ]
    for ask in asks:
        archive = opened(f"file://{tmp_path}/objects")
        tier = behind(archive).tier
        tier.blobs = Watched(tier.blobs, fail)  # type: ignore[assignment]
        assert not ask(archive)
        assert not tier.working
    with pytest.raises(CorruptRun, match="own kind") as caught:
        tier.header("0" * 32)
    assert not tier.quarantine("0" * 32, caught.value)


def test_last_words_are_tried_once(tmp_path: Path) -> None:
    tier = remote.RemoteTier(open_blobs(f"file://{tmp_path}/objects", PATIENT), limits=PATIENT)
    one = Behind(tier, lambda block_id: None)
    tried: list[int] = []

    def fail(*, now: bool = False) -> None:
        tried.append(1)
        if len(tried) < 20:
            raise RuntimeError("of the client's own kind")

    one.do(lambda: setattr(one.books, "merge", fail))
    one.close()
    assert len(tried) == 1


def test_a_cluster_that_is_not_there_costs_one_time_out(opened: Callable[..., Archive]) -> None:
    archive = opened(f"redis+cluster://127.0.0.1:{free_port()}/0", limits=Limits(timeout=0.5))
    one = Prompt()
    one.put(archive)
    assert one.loads(archive) == {"ram": LENGTH}
    assert archive.stats()["extra"]["remote"]["redis"]["state"] == "failing"
    with pytest.raises(ConfigError, match="database 0"):
        opened("redis+cluster://127.0.0.1:1/3")


def test_a_cluster_whose_slots_move_is_learnt_anew_from_any_node(
    opened: Callable[..., Archive], tmp_path: Path
) -> None:
    import redis as client

    with redis_cluster(tmp_path) as servers:
        one, archive = Prompt(), opened(f"{servers[0].url}0")
        one.put(archive)
        archive.clear_ram()
        tier = behind(archive).tier
        refs = archive.lookup(one.ids)
        nodes = [client.Redis(port=server.port) for server in servers]
        slot = int(nodes[0].execute_command("CLUSTER", "KEYSLOT", refs[0].run_id))
        source, target = (0, 1) if slot < 8192 else (1, 0)
        names = [node.execute_command("CLUSTER", "MYID").decode() for node in nodes]
        nodes[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        nodes[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        for each in nodes[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            nodes[source].execute_command("MIGRATE", "127.0.0.1", servers[target].port, each, 0, 5000)
        for node in (nodes[target], nodes[source]):
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])
        with pytest.raises(CorruptRun, match="slots have moved"):  # of a body alone: the head is remembered
            archive.load(refs, one.tokens, LENGTH, MemoryKV(UNEVEN, LENGTH))
        eventually(lambda: tier.working)
        assert one.loads(archive) == {"redis": LENGTH}
        servers[0].kill()  # the URL's, and another takes its slots over
        eventually(lambda: not any(archive.lookup(Prompt(seed).ids) for seed in range(8)) and not tier.working)
        for command in ("DELSLOTSRANGE", "ADDSLOTSRANGE"):
            nodes[1].execute_command("CLUSTER", command, 0, 8191)
        eventually(lambda: tier.working)
        for seed in range(2, 6):
            Prompt(seed).put(archive)
            archive.clear_ram()
            assert Prompt(seed).loads(archive) == {"redis": LENGTH}
        for node in nodes:
            node.close()


def test_deleting_from_google_what_is_not_there_is_no_error() -> None:
    class Empty(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        account = {"gcs_base_url": f"http://127.0.0.1:{server.server_address[1]}", "disable_oauth": True}
        key = quote(json.dumps(account | dict.fromkeys(("client_email", "private_key", "private_key_id"), "")))
        blobs = open_blobs(f"gs://bucket/kv?google_service_account_key={key}&allow_http=true", PATIENT)
        try:
            blobs.delete(["v1/a", "v1/b"], {"v1/c": 1}, 20.0)
            blobs.discard({"v1/runs": ["d"]}, 20.0)
        finally:
            blobs.close()
            server.shutdown()


@pytest.mark.parametrize("busy", ["put", "get"])
def test_a_lookup_does_not_wait_for_the_writing_of_a_long_run(
    busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = open_blobs(f"file://{tmp_path}/objects", PATIENT)
    real, go_on, begun = getattr(obstore, busy), threading.Event(), threading.Event()

    def slow(store: Any, key: str, *data: Any) -> Any:
        if key.startswith("slow"):
            begun.set()
            go_on.wait(20.0)
        return real(store, key, *data)

    def write() -> None:
        keys = [f"slow{number}" for number in range(400)]
        if busy == "put":
            blobs.put(dict.fromkeys(keys, b""), 40.0)
        else:
            blobs.get(keys, 40.0)  # which of its blocks are stored

    monkeypatch.setattr(obstore, busy, slow)
    writing = threading.Thread(target=write)
    writing.start()
    try:
        assert begun.wait(20.0)
        assert blobs.get([f"v1/b/{number}" for number in range(16)], 5.0) == [None] * 16
        assert blobs.members("v1/runs", 5.0) == {}
        assert not blobs.is_member("v1/runs", "one", 5.0)
    finally:
        go_on.set()
        writing.join()
        blobs.close()


def test_the_probe_of_a_large_body_has_the_time_of_a_lookup_at_least(
    opened: Callable[..., Archive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = behind(opened(f"file://{tmp_path}/objects", limits=Limits(timeout=3.0, load_timeout=5.0))).tier
    asked: list[float] = []
    real = type(tier.blobs).body

    def body(self: Any, key: str, size: int, seconds: float, *, whole: bool) -> Any:
        asked.append(seconds)
        return real(self, key, size, seconds, whole=whole)

    monkeypatch.setattr(type(tier.blobs), "body", body)
    tier._stalled = ("0" * 32, 1 << 30)
    tier._test()
    assert 3.0 < asked[0] < 3.1


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


def test_one_that_comes_back_with_another_key_is_left_alone(url: str, opened: Callable[..., Archive]) -> None:
    archive = opened(url)
    tier = behind(archive).tier
    tier.failed(RemoteUnavailable("a blip"))
    tier.blobs.put({LAYOUT_KEY: b'{"layout": 1, "key": "another"}'}, 20.0)
    eventually(lambda: tier.refused)
    tried: list[int] = []
    real = tier.probe

    def probe() -> bool:
        tried.append(1)
        return real()

    tier.probe = probe  # type: ignore[method-assign]
    tier.breaker._next = 0.0  # a test would be due
    behind(archive)._wake()
    time.sleep(0.5)
    assert len(tried) <= 2


class Deaf:
    """A server that accepts connections and says nothing, or a byte now and then."""

    def __init__(self, drip: bytes = b"") -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._drip = drip
        self._accepted: list[socket.socket] = []
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True), threading.Thread(target=self._run)]
        for thread in self._threads:
            thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._accepted.append(self._socket.accept()[0])
            except OSError:
                return

    def _run(self) -> None:
        while not self._closed.wait(0.05):
            for each in list(self._accepted):
                try:
                    each.sendall(self._drip)
                except OSError:
                    self._accepted.remove(each)

    def url(self, kind: str) -> str:
        if kind == "redis":
            return f"redis://127.0.0.1:{self.port}/"
        keys = "region=r&access_key_id=a&secret_access_key=b"
        return f"s3://bucket/kv?endpoint=http://127.0.0.1:{self.port}&{keys}"

    def close(self) -> None:
        self._closed.set()
        self._socket.close()
        self._threads[1].join()
        for each in self._accepted:
            each.close()


@pytest.mark.parametrize("kind", ["redis", "s3"])
@pytest.mark.parametrize("drip", [b"", b"+"], ids=["silent", "dripping"])
def test_one_that_stalls_costs_one_time_out(kind: str, drip: bytes, opened: Callable[..., Archive]) -> None:
    """The bound is on the whole answer: a byte now and then does not stretch it."""
    deaf = Deaf(drip)
    try:
        archive = opened(deaf.url(kind), limits=Limits(timeout=0.3, write_timeout=1.0))
        for seed in range(3):
            one = Prompt(seed)
            one.put(archive)
            assert one.loads(archive) == {"ram": LENGTH}
        assert archive.stats()["extra"]["remote"][kind]["failures"] == 1
    finally:
        deaf.close()


def test_a_load_that_stalls_is_bounded_and_the_breaker_tests_a_load(
    redis: RedisServer, opened: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{redis.url}?prefix=stall{next(_NUMBERS)}:"
    one = Prompt()
    one.put(opened(url))
    archive = opened(url, limits=Limits(timeout=20.0, load_timeout=0.3))
    tier = behind(archive).tier
    refs = archive.lookup(one.ids)
    real = type(tier.blobs).receive

    def slow(self: Any, name: str, commands: Any, buffers: Any, deadline: float) -> None:
        time.sleep(0.2)  # each layer: three of them are too late
        real(self, name, commands, buffers, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(type(tier.blobs), "receive", slow)
        with pytest.raises(CorruptRun):
            archive.load(refs, one.tokens, LENGTH, MemoryKV(UNEVEN, LENGTH))
        assert not tier.working
        assert archive.stats()["corrupt"] == 0
        assert archive.lookup(one.ids) == ()  # at once, and from nowhere
    eventually(lambda: tier.working)
    assert one.loads(archive) == {"redis": LENGTH}


def test_killed_and_started_again_it_takes_what_waited(opened: Callable[..., Archive], tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        archive = opened(server.url, limits=Limits(timeout=2.0, write_timeout=5.0))
        Prompt(0).put(archive)
        server.kill()
        Prompt(1).put(archive)
        assert Prompt(2).loads(archive) == {}
        eventually(lambda: not behind(archive).tier.working)
        server.start()  # empty, on the same port
        eventually(lambda: behind(archive).tier.working)
        archive.flush()
        other = opened(server.url)
        assert Prompt(0).loads(other) == {}
        assert Prompt(1).loads(other) == {"redis": LENGTH}


def test_an_object_store_that_stops_and_comes_back(opened: Callable[..., Archive]) -> None:
    with s3_server() as server:
        url = server.bucket("again")
        archive = opened(url, limits=Limits(timeout=5.0, write_timeout=10.0))
        Prompt(0).put(archive)
        server.stop()
        assert Prompt(2).loads(archive) == {}
        eventually(lambda: not behind(archive).tier.working)
        server.start()
        eventually(lambda: behind(archive).tier.working)
        assert sum(Prompt(0).loads(opened(url)).values()) == LENGTH  # moto kept it


def test_killed_in_the_middle_nothing_wrong_is_served(opened: Callable[..., Archive], tmp_path: Path) -> None:
    """Loads and saves while the server is killed and started at random moments. `tests/stress/remote.py` is longer."""
    with redis_server(tmp_path) as server:
        limits = Limits(timeout=1.0, load_timeout=1.0, write_timeout=2.0)
        writer, reader = opened(server.url, limits=limits), opened(server.url, limits=limits)
        stop = threading.Event()
        problems: list[BaseException] = []

        def work(archive: Archive, act: Callable[[Prompt], Any]) -> None:
            for number in count():
                if stop.is_set():
                    return
                try:
                    archive.clear_ram()
                    act(Prompt(number % 7))
                except BaseException as error:
                    problems.append(error)
                    return

        threads = [
            threading.Thread(target=work, args=(writer, lambda each: each.put(writer))),
            threading.Thread(target=work, args=(reader, lambda each: each.loads(reader))),
        ]
        for thread in threads:
            thread.start()
        for _ in range(3):
            eventually(lambda: behind(reader).tier.working and behind(writer).written > 0)
            server.kill()
            server.start()
        stop.set()
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive(), "it hangs"
        assert problems == []


def test_one_without_room_drops_writes_and_is_still_read(opened: Callable[..., Archive], tmp_path: Path) -> None:
    import redis as client

    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as server:
        archive = opened(server.url)
        Prompt(0).put(archive)
        with client.Redis(port=server.port) as plain:
            plain.config_set("maxmemory", "1mb")
            Prompt(1).put(archive)
            assert archive.stats()["dropped_writes"] > 0
            assert Prompt(0).loads(opened(server.url)) == {"redis": LENGTH}
            plain.config_set("maxmemory", "0")


def test_damaged_kv_is_a_miss_and_is_removed_for_all(url: str, opened: Callable[..., Archive]) -> None:
    one, writer = Prompt(), opened(url)
    one.put(writer)
    damage(writer)
    reader = opened(url)
    assert one.loads(reader) == {}
    assert reader.stats()["corrupt"] == 1
    reader.flush()
    assert behind(reader).books.marks() == {}
    one.put(reader)
    assert sum(one.loads(opened(url)).values()) == LENGTH


def test_a_service_that_lies_again_and_again_is_not_asked_any_more(
    redis: RedisServer, opened: Callable[..., Archive]
) -> None:
    url = f"{redis.url}?prefix=lies{next(_NUMBERS)}:"
    writer = opened(url)
    prompts = [Prompt(seed) for seed in range(5)]
    for one in prompts:
        one.put(writer)
    damage(writer)
    reader = opened(url)
    behind(reader).tier.on_doubt = lambda run_id: None
    for one in prompts:
        assert one.loads(reader) == {}
    assert reader.stats()["corrupt"] == 3
    assert reader.stats()["extra"]["remote"]["redis"]["failures"] == 1


@pytest.mark.parametrize("what", ["head", "body", "pointers", "other"])
def test_what_is_gone_or_nonsense_is_a_miss(what: str, url: str, opened: Callable[..., Archive]) -> None:
    one, two, writer = Prompt(), Prompt(1), opened(url)
    one.put(writer)
    two.put(writer)
    blobs = behind(writer).tier.blobs
    first, second = (writer.remotes.lookup(each.ids)[0].run_id for each in (one, two))
    if what == "head":
        blobs.delete([f"v1/r/{first}/head"], {}, 20.0)
    elif what == "body":
        blobs.delete([], {f"v1/r/{first}/body": 1 << 20}, 20.0)
    elif what == "pointers":
        blobs.put({f"v1/b/{block_id.hex()}": b"nonsense" for block_id in one.ids}, 20.0)
    else:  # another run's
        blobs.put({f"v1/b/{b.hex()}": Whereabouts(second, at).encode() for at, b in enumerate(one.ids)}, 20.0)
    reader = opened(url)
    assert one.loads(reader) == {}
    assert sum(two.loads(reader).values()) == LENGTH
    one.put(reader)
    reader.flush()
    assert sum(one.loads(opened(url)).values()) in ((LENGTH,) if what != "body" else (LENGTH, 0))


# Small things


def test_reports_add_up(url: str, opened: Callable[..., Archive]) -> None:
    one, two = opened(url), opened(url)
    for archive, asked in ((one, 3), (two, 4)):
        behind(archive).books.report(behind(archive).replica, {"requests": 1})
        behind(archive).books.report(behind(archive).replica, {"requests": asked})
    reports = behind(one).books.reports()
    assert sorted(report["requests"] for report in reports.values()) == [3, 4]


def test_a_breaker_opens_waits_longer_each_time_and_closes() -> None:
    now = [0.0]
    breaker = Breaker(clock=lambda: now[0])
    assert breaker.wait() == float("inf")
    assert breaker.failed()
    assert not breaker.failed()
    assert not breaker.probe(lambda: None)  # not due yet
    pauses = []

    def fail() -> None:
        raise OSError

    for _ in range(12):
        pauses.append(breaker.wait())
        now[0] += breaker.wait()
        assert not breaker.probe(fail)
    assert pauses[0] < pauses[3] < pauses[-1] <= 1.25 * LONGEST_PAUSE
    now[0] += breaker.wait()
    assert breaker.probe(lambda: None)
    assert breaker.closed
    assert breaker.opened == 1


def test_small_values_survive_their_bytes() -> None:
    place = Whereabouts("ab" * 16, 7, ("cd" * 16, "ef" * 16))
    assert Whereabouts.decode(place.encode()) == place
    assert Whereabouts.decode(b"short") is None
    mark = Mark("ab" * 16, "", 12345, 1234567890.25)
    assert Mark.parse(str(mark)) == mark
    with pytest.raises(ValueError, match="unpack"):
        Mark.parse("nonsense")


def test_passwords_are_never_shown(opened: Callable[..., Archive], caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cr3t-word"
    caplog.set_level(logging.DEBUG, "keepwarm")
    url = f"redis://user:{secret}@127.0.0.1:{free_port()}/0?prefix={secret}"
    archive = opened(url, limits=Limits(timeout=0.5))
    Prompt().put(archive)
    assert secret not in caplog.text + str(archive.stats())
    assert redacted(url) == url.replace(f"user:{secret}@", "").partition("?")[0]
    for wrong in (f"http://user:{secret}@host/", f"nonsense{secret}", ""):
        with pytest.raises(ConfigError) as caught:
            opened(wrong)
        assert f":{secret}" not in str(caught.value)
