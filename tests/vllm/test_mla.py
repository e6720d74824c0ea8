"""MLA: every tensor parallel rank holds the same KV. The first one stores it, under one name, and all load it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.helpers.models import made
from tests.helpers.vllm_pages import PAGE, PAGES, SPECS
from tests.helpers.vllm_pages import made as vllms_pages
from tests.helpers.vllm_process import answers, ask, cached, ids, start, whole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from keepwarm.core.blocks import chain, token_ids
from keepwarm.integrations.vllm.hybrid.groups import is_replicated
from keepwarm.integrations.vllm.identity import Facts, shard_namespaces
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.scheduler import SchedulerHalf
from keepwarm.integrations.vllm.worker import WorkerHalf
from keepwarm.runtime import device
from keepwarm.store import Archive
from keepwarm.store.admin.purge_epochs import Began
from keepwarm.testing.device import AdversarialPort
from keepwarm.testing.kv import namespace

TOKENS = token_ids(range(4 * PAGE))
FROM, TO = (7, 8, 2, 0), (1, 2, 3, 9)
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 4096,
}


def prefix(pages: tuple[int, ...]) -> Prefix:
    return Prefix("request", TOKENS, pages, {}, "none", Began("another store", 0))


def worker(archive: Archive, rank: int, seed: int | None = None) -> tuple[WorkerHalf, torch.Tensor]:
    """A rank's half over pages that vLLM made for MLA."""
    raw, views = vllms_pages(SPECS["MLA"], KVCacheLayout.LBNHC, None)
    if seed is not None:
        raw.random_(-100, 100, generator=torch.Generator().manual_seed(seed))
    half = WorkerHalf(archive, namespace(), rank, PAGE, timeout=20.0, keeps=False, stores=rank == 0)
    half.register({f"layer {at}": view for at, view in enumerate(views)}, PAGES)
    return half, torch.stack([view.view(torch.int8) for view in views])


def test_what_the_first_rank_stores_all_load(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        (first, source), (second, target) = worker(archive, 0, 1), worker(archive, 1, 2)
        before = target.clone()
        ended = Step(saves=[Save(prefix(FROM), 0, last=True)])
        second.save(ended)
        archive.flush()
        assert list(archive.contents.entries()) == []  # the second rank stores nothing, and yet gives its pages back
        assert second.take_saved() == {"request"}
        first.save(ended)
        archive.flush()
        assert [entry.tokens for entry in archive.contents.entries()] == [len(TOKENS)]
        half = SchedulerHalf(archive, [namespace()] * 2, PAGE, save_generated=False)
        found = half._look_up(TOKENS, {}, "none")
        assert [len(refs) for refs in found] == [4, 4]
        second.start(Step(loads=[Load(prefix(TO), 0, found)]))
        second.wait_for("layer 0")
        second.end_of_step()
        assert second.take_failed() == set()
        there = second._pages._views  # type: ignore[union-attr]
        rest = sorted(set(range(PAGES)) - set(TO))
        for layer, view in enumerate(there):
            assert (view.view("int8")[list(TO)] == source[layer][list(FROM)].numpy()).all()
            assert (view.view("int8")[rest] == before[layer][rest].numpy()).all()
        half.close()


def test_on_a_device_the_other_ranks_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    port = AdversarialPort()
    monkeypatch.setitem(device.PORTS, "cpu", lambda _: port)
    with Archive.open(None, max_ram=1 << 24, max_disk=0) as archive:
        raw, views = vllms_pages(SPECS["MLA"], KVCacheLayout.LBNHC, None)
        adopted = port.adopt(raw)
        half = WorkerHalf(archive, namespace(), 1, PAGE, timeout=20.0, keeps=False, stores=False)
        half.register({f"layer {at}": view for at, view in enumerate(views)}, PAGES)
        half.save(Step(saves=[Save(prefix(FROM), 0, last=True)]))
        half.start(Step())
        assert half.take_saved() == {"request"}
        archive.flush()
        named = chain(TOKENS, range(PAGE, len(TOKENS) + 1, PAGE), namespace())
        assert archive.lookup(named.exact) == ()
        half.close()
        del adopted


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    made("DeepseekV2Config", "DeepseekV2ForCausalLM", DEEPSEEK, torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def nodes(count: int = 1, backend: Any = "mp", *, ranks: int = 2) -> Any:
    """Of vLLM's `ParallelConfig` what is asked."""
    return SimpleNamespace(tensor_parallel_size=ranks, nnodes_within_dp=count, distributed_executor_backend=backend)


@pytest.mark.parametrize(("count", "backend"), [(2, "mp"), (1, "ray"), (1, "external_launcher"), (1, object)])
def test_ranks_that_may_be_on_other_machines_store_for_themselves(count: int, backend: Any) -> None:
    """They do not reach the first one's folder. A remote tier they do reach."""
    groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], SPECS["MLA"])])
    assert not is_replicated(groups, nodes(count, backend), shares=False)
    assert is_replicated(groups, nodes(count, backend), shares=True)
    assert is_replicated(groups, nodes(), shares=False)


@pytest.mark.parametrize(("kind", "ranks", "same"), [("MLA", 2, True), ("MLA", 1, False), ("grouped", 2, False)])
def test_ranks_with_the_same_kv_have_one_name(saved: Callable[..., Path], kind: str, ranks: int, same: bool) -> None:
    groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], SPECS[kind])])
    assert is_replicated(groups, nodes(ranks=ranks), shares=False) == same
    model = saved("llama", hidden_size=128, head_dim=32)
    config = EngineArgs(model=str(model), dtype="float32", tensor_parallel_size=2).create_engine_config()
    facts = [Facts("FLASH_ATTN_MLA", "NVIDIA H100 80GB HBM3", "9.0", "LBNHC", False, 3)] * 2
    names = {space.exact_root for space in shard_namespaces(config, PAGE, facts, replicated=same)}
    assert len(names) == (1 if same else 2)


@pytest.mark.slow
def test_two_ranks_of_a_real_model_store_once(deepseek: Path, tmp_path: Path) -> None:
    store = {"store": str(tmp_path / "store"), "max_disk": "1GiB", "max_ram": 0}
    prompts = [ids(200, 7), ids(150, 8)]
    settings = {"dtype": "bfloat16", "tensor_parallel_size": 2}
    asked = ask(prompts, scores=True)
    _, own = start(deepseek, store, asked, asked, **settings)  # the second answers are of vLLM's own prefix hits
    with Archive.open(tmp_path / "store", max_ram=0, max_disk=1 << 30) as archive:
        assert sum(entry.tokens for entry in archive.contents.entries()) == whole(200) + whole(150)
    (again,) = start(deepseek, store, asked, **settings)
    assert cached(again) == cached(own) == [whole(200), whole(150)]
    assert answers(again) == answers(own)
    assert [each["scores"] for each in again] == [each["scores"] for each in own]
