"""The connector's worker half over pages of its own, without an engine: every way from the store into vLLM's pages."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.remotes import RedisServer, redis_server

pytest.importorskip("vllm")

from keepwarm.core.blocks import chain, token_ids
from keepwarm.core.identity import salt_key
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.worker import WorkerHalf
from keepwarm.runtime.native.reads import CachedReads
from keepwarm.store import Archive
from keepwarm.store.admin.purge_epochs import Began
from keepwarm.store.remote.limits import Limits
from keepwarm.testing.kv import namespace

PAGE, HEADS, WIDTH, LAYERS, PAGES = 16, 3, 8, 5, 40
TOKENS = token_ids(range(10 * PAGE))
BEFORE = Began("another store", 0)  # so that it counts from when it is handed over
FROM, TO = (3, 4, 5, 9, 20, 21, 30, 2, 1, 0), (11, 12, 30, 31, 5, 0, 39, 7, 8, 9)


def prefix(pages: tuple[int, ...]) -> Prefix:
    return Prefix("request", TOKENS, pages, {}, "none", BEFORE)


def memory(seed: int | None) -> dict[str, torch.Tensor]:
    """Per layer `[pages, heads, page, width]`, whose heads do not lie side by side in every layer."""
    made: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        whole = torch.zeros(PAGES, 2, HEADS, PAGE, WIDTH, dtype=torch.bfloat16)
        if seed is not None:
            whole.copy_(torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed + layer)))
        made[f"layer {layer}"] = whole[:, layer % 2]
    return made


class Worker:
    """A worker half with pages of its own."""

    def __init__(
        self, archive: Archive, *, seed: int | None = None, keeps: bool = False, timeout: float = 20.0
    ) -> None:
        self.archive, self.views = archive, memory(seed)
        self.half = WorkerHalf(archive, namespace(), 0, PAGE, timeout=timeout, keeps=keeps)
        self.half.register(self.views)

    def save(self) -> None:
        self.half.save(Step(saves=[Save(prefix(FROM), 0)]))
        self.archive.flush()

    def load(self, first: int = 0, *, apart: bool = False) -> None:
        """Bring the pages from the `first` one on, as one step of vLLM does."""
        blocks = chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())
        refs = self.archive.lookup([block.exact for block in blocks])
        assert len(refs) == len(TO)
        self.begin(refs[first:], first, apart)
        if apart:
            deadline = time.monotonic() + 20
            while not self.half.take_arrived():
                assert time.monotonic() < deadline
                time.sleep(0.005)
        else:
            self.half.wait_for("layer 0")
            self.half.end_of_step()

    def begin(self, refs: Any, first: int = 0, apart: bool = False) -> None:
        self.half.start(Step(loads=[Load(prefix(TO), first * PAGE, (refs,), apart)]))

    def same(self, other: Worker, first: int = 0) -> bool:
        """Whether the pages from the `first` one on hold what the other's do, and no other page was written to."""
        places, rest = list(TO[first:]), sorted(set(range(PAGES)) - set(TO[first:]))
        return all(
            torch.equal(mine[places], theirs[list(FROM[first:])]) and not mine[rest].any()
            for mine, theirs in zip(self.views.values(), other.views.values(), strict=True)
        )


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which compiled reads were made, and whether they did it."""
    made: list[str] = []
    for name in ("__call__", "receive"):
        real = getattr(CachedReads, name)

        def noted(self: Any, *arguments: Any, real: Any = real, name: str = name, **named: Any) -> bool:
            done = real(self, *arguments, **named)
            made.append(f"{name.strip('_')} {done}")
            return bool(done)

        monkeypatch.setattr(CachedReads, name, noted)
    return made


def opened(where: str, folder: Path, redis: RedisServer, *, max_ram: int = 0) -> Archive:
    remotes = [f"{redis.url}?prefix={folder.name}:"] if where == "redis" else []
    return Archive.open(
        folder / "store" if where == "disk" else None,
        max_ram=max_ram,
        max_disk=1 << 26,
        remotes=remotes,
        limits=Limits(timeout=20.0, load_timeout=20.0),
    )


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("where", ["disk", "redis"])
def test_to_the_bit(
    where: str, keeps: bool, apart: bool, first: int, reads: list[str], redis: RedisServer, tmp_path: Path
) -> None:
    with opened(where, tmp_path, redis) as archive:
        writer = Worker(archive, seed=1)
        writer.save()
    with opened(where, tmp_path, redis, max_ram=1 << 24 if keeps else 0) as archive:
        reader = Worker(archive, keeps=keeps)
        reader.load(first, apart=apart)
        assert reader.half.take_failed() == set()
        assert reader.same(writer, first)
        expected = {"disk": [] if apart else ["call True"], "redis": ["receive True"]}[where]
        assert reads == expected
        if keeps and where == "redis" and not first:
            archive.flush()
            again = Worker(archive)
            again.load()  # from RAM now
            assert again.same(writer)
            assert reads == expected


def test_what_came_before_a_purge_is_not_saved(tmp_path: Path) -> None:
    """Two processes over one folder: the scheduler's says when the request came, the worker's saves its KV."""

    def salted(began: Began) -> Save:
        return Save(Prefix("request", TOKENS, FROM, {0: salt_key("mine")}, "none", began), 0)

    def opened() -> Archive:
        return Archive.open(tmp_path, max_ram=0, max_disk=1 << 26)

    with opened() as scheduler, opened() as archive:
        worker, began = Worker(archive, seed=1), scheduler.epochs.began(scheduler.epoch())
        scheduler.purge(salt_key("mine"))
        worker.half.save(Step(saves=[salted(began)]))
        archive.flush()
        assert archive.contents.entries() == []
        worker.half.save(Step(saves=[salted(scheduler.epochs.began(scheduler.epoch()))]))
        archive.flush()
        assert len(archive.contents.entries()) == 1


@pytest.mark.parametrize("keeps", [False, True])
def test_a_signal_while_redis_stalls(keeps: bool, redis: RedisServer, tmp_path: Path) -> None:
    """The model's thread heeds it, and the loader ends, long before the deadline."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    limits = Limits(timeout=600.0, load_timeout=600.0)
    with opened("redis", tmp_path, redis) as archive:
        Worker(archive, seed=1).save()
    remotes, before = [f"{redis.url}?prefix={tmp_path.name}:"], signal.signal(signal.SIGUSR1, interrupt)
    with Archive.open(None, max_ram=1 << 24 if keeps else 0, max_disk=0, remotes=remotes, limits=limits) as archive:
        reader = Worker(archive, keeps=keeps, timeout=600.0)
        blocks = chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())
        refs = archive.lookup([block.exact for block in blocks])
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            reader.begin(refs)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                reader.half.wait_for("layer 0")
            reader.half.close()
        finally:
            os.kill(redis.pid, signal.SIGCONT)
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("where", ["disk", "redis"])
def test_without_the_compiled_reader(
    where: str, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepwarm.integrations.vllm.worker.cached_reads", lambda: None)
    with opened(where, tmp_path, redis) as archive:
        writer, reader = Worker(archive, seed=1), Worker(archive)
        writer.save()
        reader.load()
        assert reader.same(writer)


def test_pages_that_cannot_be_read_into(tmp_path: Path, redis: RedisServer, reads: list[str]) -> None:
    """Token slots that do not lie side by side: through the staging memory."""
    with opened("disk", tmp_path, redis) as archive:
        writer, reader = Worker(archive, seed=1), Worker(archive)
        writer.save()
        apart = {
            name: torch.zeros(PAGES, HEADS, PAGE, 2, WIDTH, dtype=torch.bfloat16)[:, :, :, 0] for name in reader.views
        }
        reader.views = apart
        reader.half.register(apart)
        reader.load()
        assert reader.same(writer)
        assert reads == []


@pytest.mark.parametrize("where", ["disk", "redis"])
def test_damage_is_reported_and_no_other_page_is_touched(where: str, redis: RedisServer, tmp_path: Path) -> None:
    with opened(where, tmp_path, redis) as archive:
        writer = Worker(archive, seed=1)
        writer.save()
        (ref, *_) = archive.lookup([chain(TOKENS[:PAGE], [PAGE], namespace())[0].exact])
        if where == "disk":
            (path,) = (tmp_path / "store" / "runs").iterdir()
            content = bytearray(path.read_bytes())
            content[-100] ^= 1
            path.write_bytes(content)
        else:
            (behind,) = archive.remotes
            key, size = f"v1/r/{ref.run_id}/body", len(TOKENS) * 2 * HEADS * WIDTH * LAYERS
            body = bytearray(behind.tier.blobs.body(key, size, 20.0, whole=True).read(size, 0))
            body[-100] ^= 1
            behind.tier.blobs.put_body(key, memoryview(bytes(body)), 20.0)
        reader = Worker(archive)
        reader.load()
        assert reader.half.take_failed() == set(TO)
        rest = sorted(set(range(PAGES)) - set(TO))
        assert not any(view[rest].any() for view in reader.views.values())


def test_nothing_is_written_after_a_load_was_given_up(tmp_path: Path) -> None:
    """A Redis server that stops in the middle: the step goes on after `load_timeout`, and the pages are vLLM's."""
    with redis_server(tmp_path) as server, opened("redis", tmp_path, server) as archive:
        writer, reader = Worker(archive, seed=1), Worker(archive, timeout=0.5)
        writer.save()
        refs = archive.lookup([block.exact for block in chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())])
        os.kill(server.pid, signal.SIGSTOP)
        started = time.monotonic()
        reader.begin(refs)
        reader.half.wait_for("layer 0")
        reader.half.end_of_step()
        assert time.monotonic() - started < 10
        assert reader.half.take_failed() == set(TO)
        before = [view.clone() for view in reader.views.values()]
        os.kill(server.pid, signal.SIGCONT)
        time.sleep(1.0)
        assert all(torch.equal(a, b) for a, b in zip(before, reader.views.values(), strict=True))
        reader.half.close()


def test_a_load_that_the_model_comes_for_too_late_is_not_the_servers_fault(redis: RedisServer, tmp_path: Path) -> None:
    with opened("redis", tmp_path, redis) as archive:
        writer, late, again = Worker(archive, seed=1), Worker(archive, timeout=0.5), Worker(archive)
        writer.save()
        refs = archive.lookup([block.exact for block in chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())])
        late.begin(refs)
        time.sleep(1.0)
        late.half.wait_for("layer 0")
        late.half.end_of_step()
        assert late.half.take_failed() == set(TO)
        assert not any(view.any() for view in late.views.values())
        (behind,) = archive.remotes
        assert behind.tier.working
        assert archive.stats()["corrupt"] == 0
        again.load()
        assert again.same(writer)
        late.half.close()


def test_a_load_that_ends_after_the_step_went_on_has_failed(tmp_path: Path, redis: RedisServer) -> None:
    """The layers were computed without it."""
    with opened("disk", tmp_path, redis) as archive:
        Worker(archive, seed=1).save()
        late, go_on, real = Worker(archive, timeout=0.3), threading.Event(), archive.load
        late.half._native = None
        refs = archive.lookup([block.exact for block in chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())])

        def load(*arguments: Any) -> dict[str, int]:
            assert go_on.wait(20)
            return real(*arguments)

        archive.load = load  # type: ignore[method-assign]
        late.begin(refs)
        late.half.wait_for("layer 0")
        go_on.set()
        (loading,) = late.half._loading
        assert loading._future is not None
        wait([loading._future])
        late.half.end_of_step()
        assert late.half.take_failed() == set(TO)
        assert not any(view.any() for view in late.views.values())
        late.half.close()


def test_two_loads_of_one_step_arrive(redis: RedisServer, tmp_path: Path) -> None:
    with opened("redis", tmp_path, redis) as archive:
        writer, reader = Worker(archive, seed=1), Worker(archive)
        writer.save()
        refs = archive.lookup([block.exact for block in chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())])
        halves = [
            Load(Prefix("one", TOKENS[: 5 * PAGE], TO[:5], {}, "none", BEFORE), 0, (refs[:5],)),
            Load(prefix((*FROM[:5], *TO[5:])), 5 * PAGE, (refs[5:],)),
        ]
        reader.half.start(Step(loads=halves))
        reader.half.wait_for("layer 0")
        reader.half.end_of_step()
        assert reader.half.take_failed() == set()
        assert reader.same(writer)
