"""Remote services that hold damage, nonsense or half of what was written: a miss, counted, and removed for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.remote_archives import LENGTH, NUMBERS, Prompt, behind, damage, eventually
from tests.helpers.remotes import RedisServer, redis_server

from keepwarm.errors import RemoteUnavailable
from keepwarm.store import Archive
from keepwarm.store.remote.heads import Whereabouts
from keepwarm.store.remote.layout import LAYOUT_KEY
from keepwarm.store.remote.limits import Limits


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
    url = f"{redis.url}?prefix=lies{next(NUMBERS)}:"
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
