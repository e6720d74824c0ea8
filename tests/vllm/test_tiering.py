"""vLLM's tiering on the CPU side over the store: chunks go down, and come back in another process's place."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

CHUNK, SLOTS = 4096, 16


def config(model: Path) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0",), 0),),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig(str(model), "float32"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


class Tier:
    """A tier over a primary memory of its own, driven as the tiering manager drives it."""

    def __init__(self, model: Path, store: Path) -> None:
        self.memory = np.zeros((SLOTS, CHUNK), np.uint8)
        named = {"type": "KeepwarmTier", "module_path": "keepwarm.integrations.vllm.tiering"}
        kind = SecondaryTierFactory.get_tier_class(named)
        self.tier = kind(
            SimpleNamespace(config=config(model)), memoryview(self.memory), "KeepwarmTier", store=str(store),
            max_disk="64MiB",
        )  # fmt: skip
        self.request = ReqContext("request")
        self.tier.on_new_request(self.request)
        self.number = 0

    def find(self, key: bytes) -> bool:
        deadline = time.monotonic() + 20
        while (found := self.tier.lookup(key, self.request)) is LookupResult.RETRY:
            self.tier.on_schedule_end(None)
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return bool(found is LookupResult.HIT)

    def move(self, keys: list[bytes], slots: list[int], *, load: bool) -> Any:
        self.number += 1
        job = TransferJob(self.number, keys, np.array(slots), load, self.request)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.number
        return result


def test_chunks_outlive_the_process(demo_folder: Path, tmp_path: Path) -> None:
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(8)]
    data = np.random.default_rng(0).integers(0, 256, (8, CHUNK), np.uint8)
    first = Tier(demo_folder, tmp_path / "store")
    first.memory[:8] = data
    assert not first.find(keys[0])
    assert first.move(keys, list(range(8)), load=False).success
    first.memory[:] = 0  # the slots are vLLM's again
    first.tier.shutdown()

    second = Tier(demo_folder, tmp_path / "store")
    assert all(second.find(key) for key in keys)
    assert not second.find(make_offload_key(bytes([99]) * 32, 0))
    assert second.move(keys, list(range(8, 16)), load=True).success
    assert np.array_equal(second.memory[8:], data)
    assert not second.memory[:8].any()
    second.tier.shutdown()


def test_a_damaged_chunk_is_a_failed_load(demo_folder: Path, tmp_path: Path) -> None:
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(3)]
    tier = Tier(demo_folder, tmp_path / "store")
    tier.memory[:3] = 7
    assert tier.move(keys, [0, 1, 2], load=False).success
    tier.tier.shutdown()
    for path in (tmp_path / "store" / "runs").iterdir():
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    again = Tier(demo_folder, tmp_path / "store")
    result = again.move(keys, [0, 1, 2], load=True)
    assert not result.success
    assert result.successful_keys == ()
    again.tier.shutdown()
