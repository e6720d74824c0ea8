"""Both tiers keep the tier contract."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.core.reads import Arriving
from keepwarm.store.catalog.schema import WAL_BYTES
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.eviction import PolicyName, policy
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.retention import Rules
from keepwarm.store.runfile import reader as reading
from keepwarm.store.runfile.header import file_bytes, read_header
from keepwarm.store.runfile.source import FileSource
from keepwarm.testing.contracts import TierContract
from keepwarm.testing.kv import make_run

_CATALOGUE_ROOM = 352 << 10


class Deferring:
    """A sink over another one that puts off what can be, and is asked for it afterwards."""

    def __init__(self, sink: KVSink) -> None:
        self._sink = sink
        self.arriving: list[Arriving] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def defer(self, arriving: Arriving) -> bool:
        self.arriving.append(arriving)
        return True


class NowAndLater:
    """Runs every test with sinks that take everything at once, and with ones that ask layer by layer later."""

    later: bool

    @pytest.fixture(params=[False, True], ids=["now", "later"], autouse=True)
    def _later(self, request: pytest.FixtureRequest) -> None:
        self.later = request.param


class TestRam(TierContract):
    policy: PolicyName = "s3fifo"

    def make(self, folder: Path, cap: int) -> RamTier:
        return RamTier(cap, policy=policy(self.policy, cap))

    def close(self, tier: RamTier) -> None:
        pass

    def load(self, tier: RamTier, refs: Sequence[BlockRef], tokens: TokenIds, end: int, sink: KVSink) -> None:
        held = tier.find(refs[0].id)
        assert held is not None
        tier.load(held[0], refs[0].ordinal, refs[-1].ordinal, tokens, end, sink)

    def size(self, tier: RamTier) -> int:
        total = sum(run.data.nbytes + run.tokens.nbytes for run in tier.runs())
        assert total == tier.nbytes
        return total

    def cap_for(self, runs: int) -> int:
        source, blocks, _ = self.prompt()
        return make_run(source, blocks).nbytes * runs + 100

    def damage(self, tier: RamTier, run_id: str) -> bool:
        return False

    def use(self, tier: RamTier, run_id: str) -> None:
        for _ in range(3):
            tier.touch(run_id)


class TestRamLRU(TestRam):
    policy = "lru"


class TestRamLFU(TestRam):
    policy = "lfu"


class TestDisk(NowAndLater, TierContract):
    # Wide enough that a run outweighs the catalogue's own pages, so that "fits three" has one meaning.
    length = 2048
    step = 256
    policy: PolicyName = "s3fifo"

    def make(self, folder: Path, cap: int) -> DiskTier:
        return DiskTier.open(folder, cap, rules=Rules(disk_policy=self.policy))

    def close(self, tier: DiskTier) -> None:
        tier.close()

    def load(self, tier: DiskTier, refs: Sequence[BlockRef], tokens: TokenIds, end: int, sink: KVSink) -> None:
        deferring = Deferring(sink)
        target = deferring if self.later else sink
        tier.load(refs[0].run_id, refs[0].ordinal, [ref.id for ref in refs], tokens, end, target)
        for arriving in deferring.arriving:
            for layer in range(len(self.geometry.layers)):
                arriving.ready(layer, None)

    def size(self, tier: DiskTier) -> int:
        return tier.size_on_disk()

    def cap_for(self, runs: int) -> int:
        source, blocks, _ = self.prompt()
        return file_bytes(make_run(source, blocks)) * runs + WAL_BYTES + _CATALOGUE_ROOM

    def damage(self, tier: DiskTier, run_id: str) -> bool:
        fd = os.open(tier.files.path(run_id), os.O_RDWR)
        try:
            at = read_header(FileSource(fd)).data_offset + 1000
            old = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([old[0] ^ 4]), at)
        finally:
            os.close(fd)
        return True

    def use(self, tier: DiskTier, run_id: str) -> None:
        for _ in range(3):
            tier.index.database.touch([run_id])


class TestDiskLRU(TestDisk):
    policy = "lru"


class TestDiskLFU(TestDisk):
    policy = "lfu"


class TestDiskReadingPieceByPiece(TestDisk):
    """As on a run so large that the gaps between heads are not read over."""

    @pytest.fixture(autouse=True)
    def _no_gaps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reading, "_GAP", 0)
        monkeypatch.setattr(reading, "_MAX_PARTS", 3)
