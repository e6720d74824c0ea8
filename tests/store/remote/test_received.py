"""What a Redis server sends, received and verified by the compiled reader: to the bit, or a miss in bounded time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.remotes import RedisServer, redis_server

from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.reads import Coming
from keepwarm.errors import CorruptRun
from keepwarm.runtime.native.reads import CachedReads, cached_reads
from keepwarm.store import Archive
from keepwarm.store.remote import reader as remotereading
from keepwarm.store.remote import redis
from keepwarm.store.remote.limits import Limits
from keepwarm.testing.kv import MemoryKV, blocks_of, namespace, prompt

SHAPE = KVGeometry((LayerGeometry(3, 16, 8),) * 5, "bfloat16")
LENGTH, STEP = 96, 8
_NUMBERS = count()


class Receiving(MemoryKV):
    """A sink that has it received; `took` says how often that worked."""

    def __init__(self, reader: CachedReads, team: int = 1) -> None:
        super().__init__(SHAPE, LENGTH)
        self._reader = reader
        self._team = team
        self.took = self.asked = 0

    def receive(self, coming: Coming) -> bool:
        """Part of `ReceivingSink`."""
        self.asked += 1
        reads = coming.reads()
        assert reads is not None
        if not coming.receive(reads, partial(self._reader.receive, team=self._team)):
            return False
        self.took += 1
        for layer in range(len(SHAPE.layers)):
            self.commit(layer, coming.start, coming.end)
        return True


@pytest.fixture(scope="module")
def reader() -> CachedReads:
    found = cached_reads()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def opened(server: RedisServer) -> Iterator[Callable[[], Archive]]:
    """Opens archives over one part of the server, with nothing nearer."""
    made: list[Archive] = []
    url = f"{server.url}?prefix=received{next(_NUMBERS)}:"
    limits = Limits(timeout=20.0, load_timeout=1.5)

    def open_() -> Archive:
        made.append(Archive.open(None, max_ram=0, max_disk=0, remotes=[url], limits=limits))
        return made[-1]

    yield open_
    for each in made:
        each.close()


TOKENS = prompt(LENGTH)
BLOCKS = blocks_of(TOKENS, STEP)
IDS = [block.exact for block in BLOCKS]
KV = MemoryKV.random(SHAPE, LENGTH)


def stored(opened: Callable[[], Archive]) -> Archive:
    """An archive that has to fetch two runs from the server."""
    writer = opened()
    for blocks in (BLOCKS[:5], BLOCKS[5:]):
        writer.put(KV, blocks, namespace())
        writer.flush()
    return opened()


def body_key(archive: Archive) -> tuple[redis.RedisBlobs, str]:
    (behind,) = archive.remotes
    blobs = behind.tier.blobs
    assert isinstance(blobs, redis.RedisBlobs)
    return blobs, f"v1/r/{archive.lookup(IDS)[-1].run_id}/body"


@pytest.mark.parametrize("at_once", [1, 3000, 2 << 20])  # rows of one head in one block, in several, a layer
@pytest.mark.parametrize("piece", [777, 16 << 20])
@pytest.mark.parametrize("team", [1, 3])
def test_to_the_bit(
    at_once: int,
    piece: int,
    team: int,
    reader: CachedReads,
    opened: Callable[[], Archive],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remotereading, "_AT_ONCE", at_once)
    monkeypatch.setattr(redis, "PIECE", piece)
    archive = stored(opened)
    for first, last in ((0, len(IDS)), (0, 3), (2, 9), (6, 8)):
        refs = archive.lookup(IDS)[first:last]
        sink, start, end = Receiving(reader, team), refs[0].start, refs[-1].end
        assert archive.load(refs, TOKENS[start:end], end, sink) == {"redis": end - start}
        assert sink.same(KV, start, end)
        assert not any(part[:, :start].any() or part[:, end:].any() for pair in sink.arrays for part in pair)
        assert sink.took == sink.asked == len({ref.run_id for ref in refs})
        assert len(sink.commits) == len(SHAPE.layers) * sink.took


def test_part_of_a_block_comes_in_the_usual_way(reader: CachedReads, opened: Callable[[], Archive]) -> None:
    archive, sink = stored(opened), Receiving(reader)
    refs = archive.lookup(IDS)[:2]
    archive.load(refs, TOKENS[:13], 13, sink)
    assert sink.same(KV, 0, 13)
    assert sink.asked == 0


@pytest.mark.parametrize("what", ["damaged", "short", "gone"])
def test_anything_else_is_a_miss(what: str, reader: CachedReads, opened: Callable[[], Archive]) -> None:
    archive, sink = stored(opened), Receiving(reader)
    blobs, key = body_key(archive)
    refs = archive.lookup(IDS)
    size = SHAPE.bytes_per_token * (LENGTH - 5 * STEP)
    body = bytearray(blobs.body(key, size, 20.0, whole=True).read(size, 0))
    body[size // 2] ^= 1
    if what == "gone":
        blobs.delete([], {key: size}, 20.0)
    else:
        blobs.put_body(key, memoryview(bytes(body if what == "damaged" else body[: size // 2])), 20.0)
    with pytest.raises(CorruptRun):
        archive.load(refs, TOKENS, LENGTH, sink)
    assert (sink.asked, sink.took) == (2, 1)
    assert archive.stats()["corrupt"] == (0 if what == "gone" else 1)
    assert len(archive.lookup(IDS)) == 5  # the other run is used still


@pytest.mark.parametrize("how", ["stops", "dies"])
def test_a_server_that_fails_meanwhile(how: str, reader: CachedReads, tmp_path: Path) -> None:
    """One that stops answering costs the time-out, one that dies nothing; the breaker opens, and it is used again."""
    with redis_server(tmp_path) as server:
        limits = Limits(timeout=20.0, load_timeout=0.5)

        def opened() -> Archive:
            return Archive.open(None, max_ram=0, max_disk=0, remotes=[server.url], limits=limits)

        archive, sink = stored(opened), Receiving(reader, team=3)
        (behind,) = archive.remotes
        refs = archive.lookup(IDS)
        real = reader.receive

        class Failing(CachedReads):
            def receive(self, reads, replies, *, team):  # type: ignore[no-untyped-def]
                if how == "stops":
                    os.kill(server.pid, signal.SIGSTOP)
                else:
                    server.kill()
                return real(reads, replies, team=team)

        sink._reader = Failing(reader._library, reader._hashing)
        threading.Timer(2.0, os.kill, [server.pid, signal.SIGCONT]).start() if how == "stops" else None
        started = time.monotonic()
        with pytest.raises(CorruptRun):
            archive.load(refs, TOKENS, LENGTH, sink)
        assert time.monotonic() - started < 10
        assert sink.took == 0
        assert not behind.tier.working
        assert archive.stats()["corrupt"] == 0
        if how == "stops":
            deadline = time.monotonic() + 20
            while not behind.tier.working:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            again = Receiving(reader)
            archive.load(archive.lookup(IDS), TOKENS, LENGTH, again)
            assert again.same(KV, 0, LENGTH)
            assert again.took == 2
        archive.close()


def test_layers_of_different_shapes_come_in_the_usual_way(reader: CachedReads, opened: Callable[[], Archive]) -> None:
    from keepwarm.testing.kv import UNEVEN

    kv, found = MemoryKV.random(UNEVEN, LENGTH), []

    class Sink(MemoryKV):
        def receive(self, coming: Coming) -> bool:
            found.append(coming.reads())
            return False

    writer = opened()
    writer.put(kv, BLOCKS, namespace())
    writer.flush()
    archive, sink = opened(), Sink(UNEVEN, LENGTH)
    archive.load(archive.lookup(IDS), TOKENS, LENGTH, sink)
    assert sink.same(kv, 0, LENGTH)
    assert found == [None]
    assert np.array_equal(sink.arrays[0][0], kv.arrays[0][0])
