"""Remote services that fail, stall, fill up, come back or vanish: a miss in bounded time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import obstore
import pytest
from tests.helpers.remote_archives import LENGTH, NUMBERS, PATIENT, Prompt, Watched, behind, eventually
from tests.helpers.remotes import RedisServer, free_port, redis_cluster, redis_server, s3_server

from keepwarm.errors import ConfigError, CorruptRun
from keepwarm.store import Archive
from keepwarm.store.remote import tier as remote
from keepwarm.store.remote.circuit_breaker import LONGEST_PAUSE, Breaker
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.tiers import open_blobs
from keepwarm.store.remote.write_behind import Behind
from keepwarm.testing.kv import UNEVEN, MemoryKV


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


@pytest.mark.slow
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
    url = f"{redis.url}?prefix=stall{next(NUMBERS)}:"
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


@pytest.mark.slow
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
