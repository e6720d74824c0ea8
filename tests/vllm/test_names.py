"""What the names of KV are made of, and how the scheduler learns it from the workers."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from keepwarm.errors import ConfigError
from keepwarm.integrations.vllm.connector import KeepwarmConnector, WorkerFacts
from keepwarm.integrations.vllm.identity import Facts, shard_namespaces
from keepwarm.integrations.weights import weights_folder
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, prompt

FACTS = Facts("FLASH_ATTN", "NVIDIA H100 80GB HBM3", "9.0", "LBNHC", False, 3)
OTHERS = [
    replace(FACTS, attention="FLASHINFER"),
    replace(FACTS, device="NVIDIA H200"),
    replace(FACTS, capability="10.0"),
    replace(FACTS, layout="LBHNC"),
    replace(FACTS, batch_invariant=True),
    replace(FACTS, form=2),
    replace(FACTS, compiled="otherwise"),
    replace(FACTS, drafter="another model's"),
]


@pytest.fixture(scope="module")
def config(saved: Callable[..., Path]) -> Any:
    folder = saved("llama", hidden_size=128, head_dim=32, max_position_embeddings=4096)
    return EngineArgs(model=str(folder), dtype="float32", enforce_eager=True).create_engine_config()


def test_all_that_bears_on_the_bits_is_in_the_name(config: Any) -> None:
    (name,) = shard_namespaces(config, 32, [FACTS])
    others = [shard_namespaces(config, 32, [other])[0] for other in OTHERS]
    assert len({each.exact_root for each in (name, *others)}) == 1 + len(OTHERS)


def test_facts_are_those_of_the_layers(config: Any) -> None:
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASHINFER"))
    here = SimpleNamespace(
        device_config=config.device_config,
        cache_config=SimpleNamespace(kv_cache_layout="LBHNC"),
        compilation_config=SimpleNamespace(static_forward_context={"0": layer, "1": layer, "moe": object()}),
        speculative_config=None,
    )
    found = Facts.of_worker(here)
    assert (found.attention, found.layout, found.device) == ("FLASHINFER", "LBHNC", "cpu")


def test_facts_that_are_absent_change_no_name() -> None:
    assert list(FACTS.described()) == ["attention", "device", "capability", "layout", "batch_invariant", "form"]


def speculating(config: Any, method: str, drafter: Path | None = None, *, layers: tuple[str, ...] = ("0",)) -> Any:
    """The model with a drafter whose layers joined its own."""
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    model = SimpleNamespace(model=str(drafter), revision=None, dtype=torch.float32, quantization=None)
    told = SimpleNamespace(
        method=method,
        uses_draft_kv_cache=lambda: drafter is not None,
        draft_model_config=model,
        draft_parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    return SimpleNamespace(
        device_config=config.device_config,
        cache_config=SimpleNamespace(kv_cache_layout="LBHNC"),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(layers, layer)),
        speculative_config=told,
    )


def test_a_drafter_is_in_the_name(config: Any, saved: Callable[..., Path], tmp_path: Path) -> None:
    """Its layers join those of the model, so that a page has more of them, and KV of the drafter's own weights."""
    one, two = saved("llama", hidden_size=128, head_dim=32), tmp_path / "two"
    two.mkdir()
    (two / "model.safetensors").write_bytes(b"other weights")
    both = ("0", "drafter's")
    made = [
        speculating(config, "eagle", one, layers=both),
        speculating(config, "eagle", two, layers=both),
        speculating(config, "mtp", one, layers=both),
        speculating(config, "eagle", one, layers=(*both, "another")),
    ]
    told = [Facts.of_worker(each).drafter for each in made]
    assert len({"", *told}) == 5
    assert Facts.of_worker(made[0]).drafter == told[0]


def test_drafts_from_the_prompt_bear_on_bits_alone(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have the model's layers only: names are those of a vLLM without drafts, unless bits count."""
    told = speculating(config, "ngram")
    assert Facts.of_worker(told).drafter == ""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "ngram" in Facts.of_worker(told).drafter


def test_how_vllm_compiles_is_in_the_name_where_bits_count(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"))

    def compiled(**changed: Any) -> str:
        compilation, whole = copy(config.compilation_config), copy(config)
        for field, value in changed.items():
            setattr(compilation, field, value)
        compilation.static_forward_context = {"0": layer}
        whole.compilation_config, whole.speculative_config = compilation, None
        return Facts.of_worker(whole).compiled

    assert compiled() == ""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert compiled() == compiled() != ""
    assert compiled(custom_ops=["+rms_norm"]) not in ("", compiled())
    monkeypatch.setenv("VLLM_DP_RANK", "1")
    replica = compiled()
    monkeypatch.delenv("VLLM_DP_RANK")
    assert replica == compiled()  # replicas share
    assert compiled(inductor_compile_config={"a_pass": print}) == ""
    assert "is not called exact" in caplog.text


def test_quantization_on_loading_is_in_the_name(saved: Callable[..., Path]) -> None:
    """Weights are quantized while they are loaded: their files say nothing of it."""
    folder = saved("llama", hidden_size=128, head_dim=32, max_position_embeddings=4096)

    def name(**settings: Any) -> bytes:
        made = EngineArgs(model=str(folder), dtype="bfloat16", enforce_eager=True, **settings).create_engine_config()
        (space,) = shard_namespaces(made, 32, [FACTS])
        return bytes(space.exact_root)

    ignoring = {"quantization_config": {"ignore": ["lm_head"]}}
    online = {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor_static"}}
    blocks = {"quantization": "online", "quantization_config": {"linear": "fp8_per_block_static"}}
    told = [{}, {"quantization": "fp8_per_tensor"}, {"quantization": "fp8_per_tensor", **ignoring}, online, blocks]
    assert len({name(**settings) for settings in told}) == len(told)


def connector(config: Any, folder: Path) -> Any:
    """The scheduler's connector, for a model with one group of full attention."""
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KeepwarmConnector",
        kv_connector_module_path="keepwarm.integrations.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": str(folder), "max_ram": 0},
    )
    pages = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
    groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], pages)], needs_kv_cache_zeroing=False)
    return KeepwarmConnector(config, KVConnectorRole.SCHEDULER, groups)


def test_the_scheduler_looks_up_by_the_names_of_the_workers(config: Any, tmp_path: Path) -> None:
    here, page = connector(config, tmp_path), config.cache_config.block_size
    (names,) = [space.exact_root for space in shard_namespaces(config, page, [FACTS])]
    here.set_xfer_handshake_metadata_pp_aware({(0, 0): WorkerFacts({0: FACTS})})
    assert here._names == (names,)
    assert here._at_scheduler is here._scheduler
    here.shutdown()


def test_without_a_word_from_the_workers_it_goes_by_its_own(config: Any, tmp_path: Path) -> None:
    here, page = connector(config, tmp_path), config.cache_config.block_size
    here.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})  # another connector's, under MultiConnector
    assert here._at_scheduler is not None
    assert here._names == (shard_namespaces(config, page, [Facts.of_worker(config)])[0].exact_root,)
    with_a_step = SimpleNamespace(
        kv_connector_worker_meta=WorkerFacts({0: FACTS}), invalid_block_ids=set(), finished_sending=None
    )
    here.update_connector_output(with_a_step)
    assert here._names == (shard_namespaces(config, page, [FACTS])[0].exact_root,)
    here.shutdown()


def test_nothing_is_said_of_others_before_the_workers_told_their_names(
    config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What they stored would differ from the names that the scheduler can think of alone."""
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 24) as archive:
        (stored,) = shard_namespaces(config, config.cache_config.block_size, [FACTS])
        blocks = blocks_of(prompt(512, 0), config.cache_config.block_size, stored)
        archive.put(MemoryKV.random(UNEVEN, 512, 0), blocks, stored)
        archive.flush()
    here = connector(config, tmp_path)
    here.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    assert here._at_scheduler is not None
    here._hear(WorkerFacts({0: FACTS}))
    assert "this vLLM cannot use" not in caplog.text
    here._hear(WorkerFacts({0: OTHERS[0]}))
    assert "this vLLM cannot use" in caplog.text
    here.shutdown()


def test_another_revision_is_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    repo, hashes = tmp_path / "models--an--id", {"main": "1" * 40, "tuned": "2" * 40}
    for name, commit in hashes.items():
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / name).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text("{}")
    assert weights_folder("an/id").name == hashes["main"]
    assert weights_folder("an/id", "tuned").name == hashes["tuned"]
    assert weights_folder("an/id", hashes["tuned"]).name == hashes["tuned"]
    with pytest.raises(ConfigError, match="at revision 'gone'"):
        weights_folder("an/id", "gone")
