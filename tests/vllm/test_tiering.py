"""vLLM's tiering on the CPU side over the store: chunks go down, and come back in another process's place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from keepwarm.errors import ConfigError

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

    def __init__(self, model: Path, store: Path, told: OffloadingConfig | None = None, **settings: Any) -> None:
        """`told` is what vLLM says of itself."""
        self.memory = np.zeros((SLOTS, CHUNK), np.uint8)
        named = {"type": "KeepwarmTier", "module_path": "keepwarm.integrations.vllm.tiering"}
        kind = SecondaryTierFactory.get_tier_class(named)
        self.tier = kind(
            SimpleNamespace(config=told or config(model)),
            memoryview(self.memory),
            "KeepwarmTier",
            store=str(store),
            max_disk="64MiB",
            **settings,
        )
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


class Tiering:
    """vLLM's own `TieringOffloadingManager`, as its configuration makes it, with the store as its second tier."""

    def __init__(self, model: Path, store: Path, engine: str) -> None:
        tier = {"type": "KeepwarmTier", "module_path": "keepwarm.integrations.vllm.tiering", "store": str(store)}
        settings = {"cpu_bytes_to_use": SLOTS * CHUNK, "secondary_tiers": [tier | {"max_disk": "64MiB"}]}
        spec = TieringOffloadingSpec(replace(config(model), engine_id=engine, extra_config=settings))
        self.manager = spec.get_manager()
        self.memory = np.frombuffer(self.manager.primary_tier.get_kv_memoryview(), np.uint8).reshape(-1, CHUNK)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def save(self, keys: list[bytes], data: Any) -> None:
        """What vLLM does with KV that left the device."""
        request = ReqContext("save")
        self.manager.on_new_request(request)
        prepared = self.manager.prepare_store(keys, request)
        assert prepared is not None
        self.memory[prepared.store_spec.chunk_ids] = data
        self.manager.complete_store(keys, request)
        self.manager.on_request_finished(request)
        self.step()

    def load(self, keys: list[bytes]) -> Any:
        """The chunks' bytes as vLLM would move them to the device; None when one is not stored."""
        request = ReqContext("load")
        self.manager.on_new_request(request)
        deadline = time.monotonic() + 20
        while (answers := {self.manager.lookup(key, request) for key in keys}) != {LookupResult.HIT}:
            self.step()
            if LookupResult.MISS in answers:
                return None
            assert time.monotonic() < deadline, answers
            time.sleep(0.005)
        found = self.memory[self.manager.prepare_load(keys, request).chunk_ids].copy()
        self.manager.complete_load(keys, request)
        self.manager.on_request_finished(request)
        self.step()
        return found

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()


def test_vllms_tiering_manager_over_the_store(demo_folder: Path, tmp_path: Path) -> None:
    """Chunks go to the store as they enter vLLM's first tier, outlive its evictions and its process, and come back
    through its promotions; one that is damaged is a miss."""
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(3 * SLOTS)]
    data = np.random.default_rng(1).integers(0, 256, (len(keys), CHUNK), np.uint8)
    first = Tiering(demo_folder, tmp_path / "store", "first")
    for at in range(0, len(keys), 8):  # three times what vLLM's first tier holds
        first.save(keys[at : at + 8], data[at : at + 8])
        first.manager.secondary_tiers[0].drain_jobs()
        first.step()
    assert np.array_equal(first.load(keys[:8]), data[:8])
    first.close()

    second = Tiering(demo_folder, tmp_path / "store", "second")
    for at in range(0, len(keys), 8):
        assert np.array_equal(second.load(keys[at : at + 8]), data[at : at + 8])
    assert second.load([make_offload_key(bytes([99]) * 32, 0)]) is None
    second.close()

    for path in (tmp_path / "store" / "runs").iterdir():
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    third = Tiering(demo_folder, tmp_path / "store", "third")
    found = [third.load([key]) for key in keys]
    assert all(each is None or np.array_equal(each[0], row) for each, row in zip(found, data, strict=True))
    assert any(each is None for each in found)
    third.close()


def test_what_vllm_does_not_tell_the_tier_is_told_by_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another RoPE, another revision's files and vLLM's batch-invariant mode are other names."""
    from keepwarm.integrations.vllm.settings import TierSettings
    from keepwarm.integrations.vllm.tiering import _namespace

    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def name(**settings: Any) -> bytes:
        told = TierSettings.of({"store": str(tmp_path)} | settings, "secondary_tiers")
        return _namespace(config(tmp_path), CHUNK, told).exact_root

    plain = name()
    assert name(hf_overrides={"rope_parameters": {"rope_theta": 5.0}}) != plain
    assert name(hf_overrides={}) == plain
    (tmp_path / "config.json").write_text('{"rope_theta": 5.0}')
    others = {"quantization": "fp8"}, {"quantization_config": {"ignore": ["a"]}}, {"hf_config_path": str(tmp_path)}
    assert len({plain, *(name(**each) for each in others)}) == 4
    with pytest.raises(ConfigError, match="name a folder with a config.json"):
        name(hf_config_path=str(tmp_path.parent))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert name() != plain


def test_chunks_of_another_configuration_are_not_found(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's users reported of its own tiers (`test_reports.py`): another layout of pages (#55904), another number
    of ranks (#55191), another RoPE (#56311), batch-invariant mode (#58263)."""
    key, store = make_offload_key(bytes(32), 0), tmp_path / "store"
    plain = replace(config(demo_folder), kv_cache_layout="LBNHC")

    def found(told: OffloadingConfig = plain, **settings: Any) -> bool:
        tier = Tier(demo_folder, store, told, **settings)
        try:
            return tier.find(key)
        finally:
            tier.tier.shutdown()

    first = Tier(demo_folder, store, plain)
    assert first.move([key], [0], load=False).success
    first.tier.shutdown()
    assert found()
    assert not found(replace(plain, kv_cache_layout="LBHNC"))
    ranks = replace(plain.parallel, tp_size=2, world_size=2)
    assert not found(replace(plain, parallel=ranks))  # even where vLLM holds that the bytes do not depend on it
    assert not found(hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not found()


@pytest.fixture
def long(saved: Callable[..., Path]) -> Path:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 1024, **factors}
    return saved("llama", hidden_size=128, head_dim=32, max_position_embeddings=4096, rope_parameters=rope)


SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}


def offloading(model: Path, store: Path, tier: dict[str, Any], **settings: Any) -> Any:
    """vLLM's offloading with Keepwarm's tier, as vLLM's scheduler makes it."""
    from keepwarm.integrations.vllm.offloading import KeepwarmOffloadingConnector

    named = {"type": "KeepwarmTier", "module_path": "keepwarm.integrations.vllm.tiering", "store": str(store)}
    loaded = {"dtype": "float32", "enforce_eager": True} | settings
    made = EngineArgs(model=str(model), **loaded).create_engine_config()
    made.kv_transfer_config = KVTransferConfig(
        kv_connector="KeepwarmOffloadingConnector",
        kv_connector_module_path="keepwarm.integrations.vllm.offloading",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 22,
            "secondary_tiers": [named | {"max_disk": "64MiB"} | tier],
        },
    )
    spec = FullAttentionSpec(block_size=made.cache_config.block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)
    pages = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KeepwarmOffloadingConnector(made, KVConnectorRole.SCHEDULER, pages)


def test_the_tier_is_told_how_the_model_is_loaded(demo_folder: Path, long: Path, tmp_path: Path) -> None:
    """Another RoPE, and another length where LongRoPE goes by it, are other names without a word from the user."""

    def name(model: Path, **settings: Any) -> bytes:
        connector = offloading(model, tmp_path / "store", {}, **settings)
        try:
            (tier,) = connector.connector_scheduler.manager.secondary_tiers
            return bytes(tier._stored._namespace.exact_root)
        finally:
            connector.shutdown()

    plain = name(demo_folder, max_model_len=1024)
    assert name(demo_folder, max_model_len=2048) == plain
    assert name(demo_folder, max_model_len=1024, hf_overrides=SCALED) != plain
    assert name(long, max_model_len=1024) != name(long, max_model_len=2048)
    online = {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor_static"}}
    ways: tuple[dict[str, Any], ...] = ({}, {"quantization": "fp8"}, {"quantization": "fp8_per_tensor"}, online)
    (tmp_path / "other").mkdir()
    told = json.loads((demo_folder / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (tmp_path / "other" / "config.json").write_text(json.dumps(told))
    ways += ({"hf_config_path": str(tmp_path / "other")},)
    assert len({name(demo_folder, max_model_len=1024, dtype="bfloat16", **way) for way in ways}) == len(ways)


def test_a_tier_that_is_told_otherwise_is_refused(demo_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'hf_overrides' is .*leave it out"):
        offloading(demo_folder, tmp_path, {"hf_overrides": SCALED})
    with pytest.raises(ConfigError, match="no tier of type KeepwarmTier"):
        offloading(demo_folder, tmp_path, {"type": "fs"})
