"""Engines that share a remote tier: the same answer to the bit, whatever the service does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.models import tiny
from tests.helpers.remotes import RedisServer, S3Server, redis_server, s3_server

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.errors import ConfigError

pytestmark = pytest.mark.slow

SETTINGS = {"step": 32, "min_step": 16, "max_ram": "64MiB", "remote_timeout": 20.0, "remote_load_timeout": 20.0}
_NUMBERS = count()


def prompt(seed: int, length: int = 150) -> list[int]:
    return [(7 * at + 31 * seed) % 900 + 10 for at in range(length)]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty remote; `@over("redis", ...)` chooses the services."""
    if request.param == "redis":
        return f"{request.getfixturevalue('redis').url}?prefix=engine{next(_NUMBERS)}:"
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        return server.bucket(f"engine{next(_NUMBERS)}")
    return f"file://{tmp_path}/objects"


def over(*services: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("url", services, indirect=True)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return tiny("llama"), tokenizer


@pytest.fixture
def engine(model: Any) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(remote: str | list[str] | None = None, **settings: Any) -> Engine:
        made.append(Engine.from_pretrained(model, remote=remote, **(SETTINGS | settings)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(engine: Engine, seed: int = 0, **arguments: Any) -> Any:
    return engine.generate(prompt(seed), max_new_tokens=4, trace=True, **arguments)


def eventually(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@over("redis", "s3", "file")
def test_another_replica_answers_from_the_remote_to_the_bit(
    url: str, engine: Callable[..., Engine], tmp_path: Path
) -> None:
    cold = ask(engine())
    one = engine(url)
    assert ask(one).logits_digest == cold.logits_digest
    one.flush()
    other = engine(url, store=tmp_path / "other")
    tier = url.partition(":")[0]
    hit = ask(other)
    assert hit.cached_by_tier == {tier: 128}
    assert hit.exactness == "exact"
    assert (hit.logits_digest, hit.token_ids) == (cold.logits_digest, cold.token_ids)
    assert other.stats().cached_by_tier[tier] == 128
    # What came from afar is kept nearer: after a restart without the remote it is on disk.
    other.close()
    again = engine(store=tmp_path / "other")
    near = ask(again)
    assert near.cached_by_tier == {"disk": 149 if again.pipeline.grid.inside else 128}
    assert near.logits_digest == cold.logits_digest


@over("redis")
def test_prefix_reuse_walks_along_the_remote(url: str, engine: Callable[..., Engine]) -> None:
    one = engine(url)
    ask(one)
    one.flush()
    other = engine(url, reuse="prefix", step=48)
    tokens = prompt(0)[:100] + [5] * 20
    found = other.generate(tokens, max_new_tokens=2)
    assert sum(found.cached_by_tier.values()) == 100
    assert found.exactness == "prefix"


@over("file")
def test_warming_brings_what_is_stored_here_to_the_remote(
    url: str, engine: Callable[..., Engine], tmp_path: Path
) -> None:
    before = engine(store=tmp_path / "store")
    before.warm(prompt(3))
    before.close()
    one = engine(url, store=tmp_path / "store")
    report = one.warm(prompt(3), name="three")
    assert report.new_blocks == 0
    one.flush()
    (behind,) = one.pipeline.archive.remotes
    eventually(lambda: "three" in behind.books.names())
    other = engine(url)
    assert sum(ask(other, 3).cached_by_tier.values()) == (149 if other.pipeline.grid.inside else 128)


@over("redis")
def test_tenants_do_not_meet_and_a_purge_reaches_the_remote(url: str, engine: Callable[..., Engine]) -> None:
    one = engine(url)
    ask(one, salt="a")
    ask(one, 1)
    one.flush()
    other = engine(url)
    for salt in (None, "b"):
        assert ask(other, salt=salt).cached_tokens == 0
    assert ask(other, salt="a").cached_tokens == 128
    other.flush()
    assert one.purge("a").runs > 0
    (behind,) = other.pipeline.archive.remotes  # another replica follows
    behind._purges = {}
    behind.do(behind.follow_purges)
    behind.flush()
    assert ask(other, salt="a").cached_tokens == 0
    assert ask(other, 1).cached_by_tier == {url.partition(":")[0]: 128}


def test_killing_the_service_loses_no_answer_and_it_comes_back(engine: Callable[..., Engine], tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        one = engine(server.url)
        cold = {seed: ask(engine(), seed).logits_digest for seed in range(4)}
        assert ask(one, 0).logits_digest == cold[0]
        one.flush()
        server.kill()
        assert ask(one, 1).logits_digest == cold[1]  # its write fails, and waits
        eventually(lambda: one.stats().extra["remote"]["redis"]["state"] == "failing")
        assert ask(one, 2).logits_digest == cold[2]
        server.start()  # empty, on the same port
        eventually(lambda: one.stats().extra["remote"]["redis"]["state"] == "working")
        one.flush()
        assert ask(one, 3).logits_digest == cold[3]
        one.flush()
        other = engine(server.url)
        hits = {seed: ask(other, seed) for seed in cold}
        assert {seed: hit.logits_digest for seed, hit in hits.items()} == cold
        assert [hits[seed].cached_tokens for seed in cold] == [0, 128, 128, 128]


@over("redis")
def test_a_lying_service_is_a_miss_and_the_run_is_removed(url: str, engine: Callable[..., Engine]) -> None:
    cold = ask(engine())
    one = engine(url)
    ask(one)
    one.flush()
    (behind,) = one.pipeline.archive.remotes
    for mark in behind.books.marks():
        key = f"v1/r/{mark.run_id}/body"
        head = behind.books._head_now(mark.run_id)
        assert head is not None
        body = bytearray(behind.tier.blobs.body(key, head.body_bytes, 20.0, whole=True).read(head.body_bytes, 0))
        body[len(body) // 2] ^= 1
        behind.tier.blobs.put_body(key, memoryview(bytes(body)), 20.0)
    other = engine(url)
    wrong = ask(other)
    assert wrong.logits_digest == cold.logits_digest
    assert other.stats().corrupt >= 1
    other.flush()
    third = engine(url)  # the damaged run was replaced by a good one
    good = ask(third)
    assert good.logits_digest == cold.logits_digest
    assert third.stats().corrupt == 0


def test_passwords_are_never_shown() -> None:
    secret = "s3cr3t-word"
    config = EngineConfig.build(remote=f"redis://user:{secret}@host/0")
    assert secret not in repr(config) + str(config.model_dump())
    assert config.remote_urls == (f"redis://user:{secret}@host/0",)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.build(remote=[5, f"redis://:{secret}@host/"])
    assert secret not in str(caught.value)
