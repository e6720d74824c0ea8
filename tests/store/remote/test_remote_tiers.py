"""Remote tiers keep the tier contract, each over a real service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.helpers.remotes import (
    AzureServer,
    RedisServer,
    S3Server,
    azure_server,
    redis_cluster,
    redis_server,
    s3_server,
)

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.store.remote import redis as redis_blobs
from keepwarm.store.remote.layout import ROOT
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.object_store import ObjectBlobs
from keepwarm.store.remote.records import _BLOCK_OVERHEAD, _RUN_OVERHEAD
from keepwarm.store.remote.redis import RedisBlobs
from keepwarm.store.remote.tier import RemoteTier
from keepwarm.store.remote.write_behind import Behind
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.header import file_bytes
from keepwarm.store.runfile.layout import Run
from keepwarm.testing.contracts import TierContract
from keepwarm.testing.kv import make_run

_NUMBERS = count()


class Remote:
    """A remote tier with its writing half, as the suite asks for it."""

    def __init__(self, tier: RemoteTier) -> None:
        self.tier = tier
        self.behind = Behind(tier, lambda block_id: None)
        self.lookup, self.children = tier.lookup, tier.children

    def put(self, run: Run) -> bool:
        return self.behind.put(run)


class RemoteContract(TierContract):
    """The contract, with what is common to the services."""

    length = 512
    step = 64
    key: StoreKey | None = None

    def make(self, folder: Path, cap: int) -> Remote:
        return Remote(self.tier(folder, Limits(timeout=20.0, load_timeout=20.0, cap=cap)))

    def tier(self, folder: Path, limits: Limits) -> RemoteTier:
        return RemoteTier(self.blobs(folder), limits=limits, key=self.key)

    def blobs(self, folder: Path) -> Any:
        raise NotImplementedError

    def close(self, tier: Remote) -> None:
        tier.behind.close()

    def load(self, tier: Remote, refs: Sequence[BlockRef], tokens: TokenIds, end: int, sink: KVSink) -> None:
        tier.tier.load(refs[0].run_id, refs[0].ordinal, [ref.id for ref in refs], tokens, end, sink)

    def cap_for(self, runs: int) -> int:
        source, blocks, _ = self.prompt()
        run = make_run(source, blocks)
        return (file_bytes(run) + _RUN_OVERHEAD + (_BLOCK_OVERHEAD + 16) * len(blocks) + 100) * runs + 2000

    def damage(self, tier: Remote, run_id: str) -> bool:
        head = tier.tier.known(run_id)
        assert head is not None
        key = f"{ROOT}r/{run_id}/body"
        blobs = tier.tier.blobs
        body = bytearray(blobs.body(key, head.body_bytes, 20.0, whole=True).read(head.body_bytes, 0))
        body[1000] ^= 4
        blobs.put_body(key, memoryview(bytes(body)), 20.0)
        return True

    def use(self, tier: Remote, run_id: str) -> None:
        tier.tier.touch([run_id])
        header = tier.tier.header(run_id)
        assert header.run_id == run_id
        tier.behind.books.merge(now=True)


class TestRedis(RemoteContract):
    options: ClassVar[tuple[str, ...]] = ()
    server: ClassVar[RedisServer]
    servers: ClassVar[list[RedisServer]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with redis_server(tmp_path_factory.mktemp("redis"), *cls.options) as cls.server:
            cls.servers = [cls.server]
            yield

    def blobs(self, folder: Path) -> RedisBlobs:
        self.url = f"{self.server.url}?prefix=test{next(_NUMBERS)}:"
        return RedisBlobs(self.url, timeout=20.0)

    def size(self, tier: Remote) -> int:
        import redis

        total = 0
        for server in self.servers:
            client = redis.Redis(port=server.port)
            for key in client.scan_iter(match=f"{self.url.partition('prefix=')[2]}*", count=10_000):
                if client.type(key) == b"string":
                    total += len(key) + client.strlen(key)
                else:
                    total += len(key) + sum(len(member) + 8 for member in client.zrange(key, 0, -1))
            client.close()
        return total


class TestRedisEncrypted(TestRedis):
    key = StoreKey(bytes(range(32)))


class TestRedisCluster(TestRedis):
    """One server that owns all slots refuses what touches keys of two slots, as a larger cluster does."""

    options: ClassVar = ("--cluster-enabled", "yes")


@pytest.mark.slow
class TestRedisClusterOfTwo(TestRedis):
    """Bodies of many pieces, all of a run on one server, runs on both."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with redis_cluster(tmp_path_factory.mktemp("redis")) as cls.servers, pytest.MonkeyPatch.context() as patch:
            patch.setattr(redis_blobs, "PIECE", 4096)
            cls.server = cls.servers[0]
            yield

    def test_both_servers_hold_runs_whole(self, roomy: Remote) -> None:
        import redis

        for seed in range(8):
            source, blocks, _ = self.prompt(seed)
            assert roomy.put(make_run(source, blocks))
        held = []
        for server in self.servers:
            keys = [key.decode() for key in redis.Redis(port=server.port).scan_iter(match="*}/body/*", count=10_000)]
            held.append({key.partition("{")[2].partition("}")[0] for key in keys})
            assert len(keys) > 4 * len(held[-1]) > 0
        assert not held[0] & held[1]


class TestS3(RemoteContract):
    server: ClassVar[S3Server]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        with s3_server() as cls.server:
            yield

    def blobs(self, folder: Path) -> ObjectBlobs:
        return ObjectBlobs(self.server.bucket(f"test{next(_NUMBERS)}"), timeout=20.0)

    def size(self, tier: Remote) -> int:
        import obstore

        store = tier.tier.blobs._reading
        return sum(meta["size"] + len(meta["path"]) for batch in obstore.list(store) for meta in batch)


@pytest.mark.slow
class TestAzure(TestS3):
    server: ClassVar[AzureServer]  # type: ignore[assignment]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        with azure_server() as cls.server:
            yield

    def blobs(self, folder: Path) -> ObjectBlobs:
        return ObjectBlobs(self.server.container(), timeout=20.0)


class TestFolder(RemoteContract):
    def blobs(self, folder: Path) -> ObjectBlobs:
        return ObjectBlobs(f"file://{folder}", timeout=20.0)

    def size(self, tier: Remote) -> int:
        root = Path(tier.tier.blobs.label.removeprefix("file://"))
        return sum(each.stat().st_size for each in root.rglob("*") if each.is_file())


class TestFolderEncrypted(TestFolder):
    key = StoreKey(bytes(range(32)))


def test_what_was_stored_is_there_for_another_replica(tmp_path: Path) -> None:
    contract = TestFolder()
    one, other = (contract.make(tmp_path / "store", 1 << 30) for _ in range(2))
    source, blocks, _ = contract.prompt()
    assert one.put(make_run(source, blocks))
    assert len(other.lookup([block.exact for block in blocks])) == len(blocks)
    contract.close(one)
    contract.close(other)
