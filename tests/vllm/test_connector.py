"""A real vLLM on CPU with the embedded model, over a store that outlives it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError
from tests.helpers.remotes import RedisServer, redis_server, s3_server
from tests.helpers.vllm_process import PAGE, answers, ask, cached, ids, start, whole

pytest.importorskip("vllm")

PREFIX = 640


HEAD = ids(PREFIX, 1)
PROMPTS = [HEAD + ids(n, 100 + n) for n in (5, 31, 32, 33, 70)]
SALTED = [[*HEAD, 7]]
LONG = ids(2010, 5)
OTHERS = [ids(n, 200 + n) for n in (1, 31, 32, 33, 300)]


@pytest.fixture(scope="module")
def run(demo_folder: Path) -> Any:
    return partial(start, demo_folder)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server
        with suppress(RedisError):  # a test starts another one on the same port
            Redis(port=server.port).shutdown(nosave=True)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as server:
        yield server.bucket("vllm")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"store": str(tmp_path_factory.mktemp("store")), "max_disk": "1GiB", "max_ram": "128MiB"}


@pytest.fixture(scope="module")
def first(run: Any, store: dict[str, Any], redis: RedisServer, bucket: str) -> list[Any]:
    """The instance that computes: answers of a cold prefix, and of vLLM's own hit on it. It stores everywhere."""
    steps = ask([HEAD]), ask(PROMPTS), ask(OTHERS, together=True), ask(SALTED, salt="a"), {"abort": ids(900, 3)}
    remotes = {"remote": [redis.url, bucket], "remote_timeout": 20, "remote_load_timeout": 60, "load_timeout": 60}
    found: list[Any] = run(store | remotes, *steps, ask([OTHERS[-1]]), ask([LONG, LONG]), {"flush": True})
    return found


def test_what_is_stored_is_published_as_an_event_of_vllm(run: Any, tmp_path: Path) -> None:
    import msgspec
    import zmq
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    endpoint = f"ipc://{tmp_path}/events"
    prompt = PROMPTS[-1]
    found = []
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        later = ({"flush": True}, {"sleep": 2}, ask([ids(8, 2)])) * 3  # steps publish what is stored by then
        steps = ask([HEAD]), ask([prompt]), ask(SALTED, salt="a"), *later
        run({"store": str(tmp_path / "store"), "max_disk": "1GiB"}, *steps, events=endpoint)
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while socket.poll(2000):
            found += decoder.decode(socket.recv_multipart()[-1]).events
    stored = [event for event in found if isinstance(event, BlockStored)]
    ours = [event for event in stored if event.medium == "STORAGE"]
    known = _extra_keys(event for event in stored if event.medium != "STORAGE")
    first, second, salted = ours
    end = whole(len(prompt))
    start = end - len(second.block_hashes) * PAGE
    assert start in (0, PREFIX)  # 0: the first was not in the store yet
    assert first.token_ids == HEAD
    assert second.token_ids == prompt[start:end]
    assert first.parent_block_hash is None
    assert second.parent_block_hash == (first.block_hashes[-1] if start else None)
    assert salted.extra_keys[0] == ("a",)
    assert _extra_keys(ours).items() <= known.items()  # named and told apart as in vLLM's own events


def _extra_keys(events: Iterable[Any]) -> dict[Any, Any]:
    """Return what blocks' names hold beside tokens, by name."""
    pairs = (zip(event.block_hashes, event.extra_keys, strict=True) for event in events)
    return {name: keys for pair in pairs for name, keys in pair}


def test_a_new_process_is_served_from_the_store(run: Any, store: dict[str, Any], first: list[Any]) -> None:
    """After a restart: the same tokens as vLLM's own prefix hit gave, and vLLM itself says how many were cached."""
    steps = ask(PROMPTS), ask(OTHERS, together=True), ask(SALTED, salt="a"), ask(SALTED, salt="b")
    again = run(store, *steps)
    assert cached(first[1]) == [PREFIX] * len(PROMPTS)  # vLLM's own
    assert answers(again[0]) == answers(first[1])
    assert cached(again[0]) == [whole(len(prompt)) for prompt in PROMPTS]
    assert answers(again[1]) == answers(first[2])
    assert cached(again[1]) == [whole(len(prompt)) for prompt in OTHERS]
    assert cached(again[2]) == [PREFIX]
    assert cached(again[3]) == [0]  # another tenant's is not found
    assert answers(again[3]) == answers(again[2]) == answers(first[3])


def test_without_vllms_own_cache_and_under_preemption(run: Any, store: dict[str, Any], first: list[Any]) -> None:
    many = [HEAD + ids(40, 300 + n) for n in range(6)]
    alone, together = run(
        store,
        ask(many, max_tokens=40),
        ask(many, max_tokens=40, together=True),
        enable_prefix_caching=False,
        max_model_len=1024,
        num_gpu_blocks_override=80,  # fewer pages than six requests need: some are preempted and come back
    )
    assert cached(alone)[0] == PREFIX
    assert min(cached(alone)[1:]) >= PREFIX
    assert [one["ids"][:8] for one in together] == [one["ids"][:8] for one in alone]


def test_another_instance_that_shares_only_redis(run: Any, redis: RedisServer, first: list[Any]) -> None:
    """And Redis is killed while it is in use: answers stay right, and it is used again when it is back."""
    only = {"remote": redis.url, "max_ram": 0, "remote_timeout": 2, "remote_load_timeout": 20, "load_timeout": 60}
    new = [ids(200, 900), ids(100, 901)]
    stop = f"kill -9 {redis.pid}"
    again = " ".join(redis.command) + " --daemonize yes >/dev/null"
    found = run(
        only,
        ask([LONG]),
        ask(PROMPTS),
        ask(OTHERS, together=True),
        ask(SALTED, salt="a"),
        ask(SALTED, salt="b"),
        {"forget": True},
        ask(PROMPTS, together=True),
        {"forget": True},
        {"shell": stop},
        ask(PROMPTS),
        ask(new[:1]),
        {"shell": again},
        {"sleep": 12},
        ask(new[1:]),
        {"forget": True},
        ask(new[1:], until=whole(len(new[1]))),  # the breaker may stay open for some more seconds
    )
    assert cached(found[0]) == [whole(len(LONG))]
    assert answers(found[0]) == answers(first[6])[1:]
    assert answers(found[1]) == answers(found[6]) == answers(found[9]) == answers(first[1])
    assert cached(found[1]) == cached(found[6]) == [whole(len(prompt)) for prompt in PROMPTS]
    assert answers(found[2]) == answers(first[2])
    assert (cached(found[3]), cached(found[4])) == ([PREFIX], [0])  # another tenant's is not found
    assert cached(found[9])[0] == 0
    assert cached(found[15]) == [whole(len(new[1]))]  # what was stored after it came back
    assert answers(found[15]) == answers(found[13])


def test_another_instance_that_shares_only_s3(run: Any, bucket: str, first: list[Any]) -> None:
    only = {"remote": bucket, "max_ram": "64MiB", "remote_timeout": 20, "remote_load_timeout": 60, "load_timeout": 60}
    long, hits, together, ours, theirs = run(
        only, ask([LONG]), ask(PROMPTS), ask(OTHERS, together=True), ask(SALTED, salt="a"), ask(SALTED, salt="b")
    )
    assert (cached(long), answers(long)) == ([whole(len(LONG))], answers(first[6])[1:])
    assert (cached(hits), answers(hits)) == ([whole(len(prompt)) for prompt in PROMPTS], answers(first[1]))
    assert (cached(together), answers(together)) == ([whole(len(prompt)) for prompt in OTHERS], answers(first[2]))
    assert (cached(ours), cached(theirs)) == ([PREFIX], [0])


def test_damaged_files_are_recomputed(run: Any, store: dict[str, Any], first: list[Any]) -> None:
    for path in (Path(store["store"]) / "runs").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    ram = store | {"max_ram": 0}
    found, _, again = run(ram, ask(PROMPTS), {"forget": True}, ask(PROMPTS))
    assert answers(found) == answers(again) == answers(first[1])
    assert cached(again) == [whole(len(prompt)) for prompt in PROMPTS]  # what was recomputed is stored anew


def test_what_is_computed_over_a_load_that_failed_is_not_stored(run: Any, tmp_path: Path) -> None:
    """The load of a stored beginning is abandoned in the step that computes what follows, and stores it."""
    begin, follows = ids(200, 950), [ids(count, 951 + count) for count in (40, 70)]
    longer, store = [begin + each for each in follows], {"store": str(tmp_path / "store"), "max_ram": 0}
    _, cold = run(store, ask([begin]), ask(longer, salt="another's"))
    failed, _ = run(store | {"load_timeout": 1e-6}, ask(longer, together=True), {"flush": True})
    (found,) = run(store, ask(longer))
    assert answers(failed) == answers(found) == answers(cold)
    assert cached(found) == [whole(len(prompt)) for prompt in longer]


def test_an_upgrade_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KV of the same weights that this version cannot use is a miss, and one line says that and why."""
    from keepwarm.integrations.vllm.identity import tell_of_others
    from keepwarm.store import Archive
    from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

    there = namespace()
    here = replace(there, model=replace(there.model, kv_layout="another"))
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 30) as archive:
        archive.put(MemoryKV.random(UNEVEN, 32, 0), blocks_of(prompt(32, 0), 16), there)
        archive.flush()
        tell_of_others(archive, [there])
        assert not caplog.messages
        tell_of_others(archive, [here])
    assert "kv_layout differs" in caplog.text


def test_a_policy_that_loses_requests_is_refused(run: Any, store: dict[str, Any]) -> None:
    from keepwarm.errors import ConfigError
    from keepwarm.integrations.vllm.settings import ConnectorSettings

    class Transfer:
        kv_connector_extra_config = store
        kv_load_failure_policy = "fail"

    with pytest.raises(ConfigError, match="set it to 'recompute'"):
        ConnectorSettings.of_transfer(Transfer())
    Transfer.kv_load_failure_policy = "recompute"
    assert ConnectorSettings.of_transfer(Transfer()).max_disk == 1 << 30
    Transfer.kv_connector_extra_config = {"stor": "x"}
    with pytest.raises(ConfigError, match="known are store"):
        ConnectorSettings.of_transfer(Transfer())
