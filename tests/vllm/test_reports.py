"""Wrong KV as vLLM's users reported it of vLLM's own offloading: under Keepwarm each of these is a miss, and right.

| report | what changes while the store stays |
|---|---|
| vllm-project/vllm#49261 | the revision of the weights |
| vllm-project/vllm#55191 | the number of tensor parallel ranks |
| vllm-project/vllm#55904 | the order of bytes in pages |
| vllm-project/vllm#56311 | RoPE scaling, also by the length that a model is given |
| vllm-project/vllm#58263 | batch-invariant mode |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.helpers.models import tiny
from tests.helpers.vllm_process import answers, ask, cached, ids, start, whole
from vllm.engine.arg_utils import EngineArgs

from keepwarm.core.blocks import chain, token_ids
from keepwarm.core.identity import Namespace
from keepwarm.integrations.vllm.identity import Facts, shard_namespaces
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.worker import WorkerHalf
from keepwarm.store import Archive
from keepwarm.store.admin.purge_epochs import Began

MODEL: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 4096}
PROMPT = ids(200, 7)
SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}
FACTS = Facts("FLASH_ATTN", "NVIDIA H100 80GB HBM3", "9.0", "LBNHC", False, 3)
PAGE = 32


@pytest.fixture(scope="module")
def model(saved: Callable[..., Path]) -> Path:
    return saved("llama", **MODEL)


@pytest.fixture
def store(tmp_path: Path) -> dict[str, Any]:
    return {"store": str(tmp_path / "store"), "max_disk": "1GiB", "max_ram": 0}


def is_a_miss_and_right(before: Callable[..., list[Any]], after: Callable[..., list[Any]], store: Any) -> None:
    """What one vLLM stored the other one does not find; it answers as without a store, and then finds its own."""
    asked = ask([PROMPT])
    (stored,) = before(store, asked)
    (alone,) = after(None, asked)
    assert answers(stored) != answers(alone)  # so that the other's KV would be seen
    (missed,) = after(store, asked)
    (found,) = after(store, asked)
    assert answers(missed) == answers(found) == answers(alone)
    assert (cached(missed), cached(found)) == ([0], [whole(len(PROMPT))])


# ---- #49261 ----


@pytest.fixture
def hub(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a model of which two revisions are in the hub's cache; they differ in their weights alone."""
    repo = tmp_path / "hub" / "models--an--id"
    for seed, name in enumerate(("main", "tuned")):
        folder = repo / "snapshots" / (str(seed + 1) * 40)
        tiny("llama", seed=seed, **MODEL).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / name).write_text(folder.name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return "an/id"


@pytest.mark.slow
def test_49261_another_revision(hub: str, store: dict[str, Any]) -> None:
    run = partial(start, Path(hub))
    is_a_miss_and_right(partial(run, revision="main"), partial(run, revision="tuned"), store)


# ---- #56311 ----


@pytest.mark.slow
def test_56311_another_rope(model: Path, store: dict[str, Any]) -> None:
    is_a_miss_and_right(partial(start, model), partial(start, model, hf_overrides=SCALED), store)


def names(model: Path, facts: Facts = FACTS, **settings: Any) -> list[bytes]:
    config = EngineArgs(model=str(model), dtype="float32", enforce_eager=True, **settings).create_engine_config()
    return [space.exact_root for space in shard_namespaces(config, PAGE, [facts] * config.parallel_config.world_size)]


def test_56311_the_length_that_chooses_among_ropes(saved: Callable[..., Path], model: Path) -> None:
    """With LongRoPE a model takes other factors where it is given more than its original length."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 1024, **factors}
    long = saved("llama", **MODEL, rope_parameters=rope)
    lengths = names(long, max_model_len=1024), names(long, max_model_len=2048)
    assert lengths[0] != lengths[1]
    assert names(model, max_model_len=1024) == names(model, max_model_len=2048)  # elsewhere it counts for nothing


# ---- #55191 ----


@pytest.mark.slow
def test_55191_another_number_of_ranks(model: Path, store: dict[str, Any]) -> None:
    """Two ranks hold other heads in a page than one, in as many bytes."""
    asked = ask([PROMPT])
    (alone,) = start(model, store, asked)
    (missed,) = start(model, store, asked, tensor_parallel_size=2)
    (found,) = start(model, store, asked, tensor_parallel_size=2)
    (again,) = start(model, store, asked)
    assert answers(missed) == answers(found) == answers(again) == answers(alone)
    assert [cached(each) for each in (missed, found, again)] == [[0], [whole(200)], [whole(200)]]


def test_55191_no_rank_has_the_name_of_another(model: Path) -> None:
    one, two = names(model), names(model, tensor_parallel_size=2)
    assert len({*one, *two}) == 3


# ---- #55904 and #58263: no processor has two layouts or batch-invariant kernels ----


def space(model: Path, facts: Facts) -> Namespace:
    config = EngineArgs(model=str(model), dtype="float32", enforce_eager=True).create_engine_config()
    return shard_namespaces(config, PAGE, [facts])[0]


@pytest.mark.parametrize("other", [replace(FACTS, layout="LBHNC"), replace(FACTS, batch_invariant=True)])
def test_55904_58263_another_layout_or_mode(model: Path, other: Facts, tmp_path: Path) -> None:
    """Workers whose pages have as many bytes, but in another order, or of other kernels, share a store."""
    import torch

    tokens, pages = token_ids(PROMPT[: 4 * PAGE]), (3, 4, 0, 2)
    prefix = Prefix("request", tokens, pages, {}, "none", Began("another store", 0))

    def worker(archive: Archive, facts: Facts) -> tuple[WorkerHalf, torch.Tensor]:
        half = WorkerHalf(archive, space(model, facts), 0, PAGE, timeout=20.0, keeps=False)
        shape = (6, 2, PAGE, 8) if facts.layout == "LBHNC" else (6, PAGE, 2, 8)
        memory = torch.zeros(shape)
        half.register({"layer": memory if facts.layout == "LBHNC" else memory.transpose(1, 2)})
        return half, memory

    def found(archive: Archive, facts: Facts) -> Any:
        named = chain(tokens, range(PAGE, len(tokens) + 1, PAGE), space(model, facts))
        return archive.lookup(named.exact)

    with Archive.open(tmp_path / "store", max_ram=0, max_disk=1 << 26) as archive:
        writer, memory = worker(archive, FACTS)
        memory.copy_(torch.randn(memory.shape))
        writer.save(Step(saves=[Save(prefix, 0)]))
        archive.flush()
        assert found(archive, other) == ()
        reader, there = worker(archive, FACTS)
        reader.start(Step(loads=[Load(prefix, 0, (found(archive, FACTS),))]))
        reader.wait_for("layer")
        reader.end_of_step()
        assert reader.take_failed() == set()
        assert torch.equal(there[list(pages)], memory[list(pages)])


def test_58263_the_mode_is_that_of_the_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(model=str(model), dtype="float32", enforce_eager=True).create_engine_config()
    assert not Facts.of_worker(config).batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert Facts.of_worker(config).batch_invariant
