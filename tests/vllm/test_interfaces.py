"""What of vLLM bears on a prefix (adapters, ranks) and what vLLM shows of the store (metrics), in a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.helpers.vllm_process import answers, ask, cached, ids, start, whole
from vllm.engine.arg_utils import EngineArgs

PROMPT = ids(200, 7)


@pytest.fixture(scope="module")
def tiny(saved: Callable[..., Path]) -> Path:
    """A model with random weights whose heads can be spread over two ranks."""
    return saved("llama", hidden_size=128, head_dim=32, max_position_embeddings=4096)


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA of the keys, whose weights are drawn at random."""
    from safetensors.torch import save_file

    folder.mkdir()
    named = "base_model.model.model.layers.{}.self_attn.k_proj.lora_{}.weight"
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (8, 128), "B": (64, 8)}
    save_file(
        {
            named.format(layer, part): torch.randn(shape, generator=generator)
            for layer in range(2)
            for part, shape in shapes.items()
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["k_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_adapters_and_metrics(tiny: Path, tmp_path: Path) -> None:
    """The base model and two adapters never find each other's KV, nor does an adapter whose files changed; vLLM's own
    metrics say what was moved."""
    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    asked = [ask([PROMPT]), ask([PROMPT], adapter=str(one)), ask([PROMPT], adapter=str(two))]
    store = {"store": str(tmp_path / "store"), "max_ram": 0}
    found = start(
        tiny,
        store,
        *asked,
        {"flush": True},
        {"forget": True},
        *asked,
        {"metrics": "vllm:keepwarm"},
        {"flush": True},
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        disable_log_stats=False,
    )
    first, again, counted = found[:3], found[5:8], found[8]
    assert [cached(each) for each in first] == [[0]] * 3
    assert [cached(each) for each in again] == [[whole(200)]] * 3
    assert [answers(each) for each in again] == [answers(each) for each in first]
    assert len({tuple(answers(each)[0]) for each in first}) == 3  # the adapters do change the answer
    assert counted["vllm:keepwarm_loaded_tokens"] == 3 * whole(200)
    assert counted["vllm:keepwarm_loaded_prefix_tokens"] == 3 * whole(200)  # vLLM's bits depend on the batch
    assert not counted.get("vllm:keepwarm_loaded_exact_tokens")
    assert counted["vllm:keepwarm_saved_tokens"] >= 3 * whole(200)
    assert "vllm:keepwarm_load_seconds" in counted  # vLLM's snapshot has whole numbers

    other = adapter(tmp_path / "three", 3)
    (one / "adapter_model.safetensors").write_bytes((other / "adapter_model.safetensors").read_bytes())
    (changed,) = start(tiny, store, ask([PROMPT], adapter=str(one)), enable_lora=True, max_loras=2, max_lora_rank=8)
    assert cached(changed) == [0]


@pytest.mark.slow
def test_ranks_keep_their_shards(tiny: Path, tmp_path: Path) -> None:
    """Two tensor parallel ranks store and load their own halves; one rank alone finds nothing of theirs."""
    store = {"store": str(tmp_path / "store"), "max_ram": 0}
    prompts = [PROMPT, PROMPT[:150]]
    (first,) = start(tiny, store, ask(prompts), tensor_parallel_size=2)
    again, other = start(tiny, store, ask(prompts), ask([ids(99, 8)]), tensor_parallel_size=2)
    assert cached(again) == [whole(200), whole(150)]
    assert answers(again) == answers(first)
    assert cached(other) == [0]
    (alone,) = start(tiny, store, ask(prompts[:1]))
    assert cached(alone) == [0]


def test_what_a_model_writes_into_its_configuration_changes_no_name(tiny: Path) -> None:
    """Some of vLLM's models do while they are built, in the workers alone; what the files and the user say does."""
    from keepwarm.errors import ConfigError
    from keepwarm.integrations.vllm.identity import Facts, shard_namespaces

    config = EngineArgs(model=str(tiny), dtype="float32", enforce_eager=True).create_engine_config()
    facts = [Facts("CPU_ATTN", "cpu", "AVX512", "LBHNC", False, 2)]
    (before,) = shard_namespaces(config, 32, facts)
    config.model_config.hf_config.attn_temperature_tuning = True
    config.model_config.hf_text_config.rope_parameters["partial_rotary_factor"] = 0.5
    assert shard_namespaces(config, 32, facts) == [before]
    config.model_config.hf_overrides = {"rope_parameters": {"rope_theta": 5.0}}
    assert shard_namespaces(config, 32, facts) != [before]
    config.model_config.hf_overrides = lambda config: config
    with pytest.raises(ConfigError, match="is a function"):
        shard_namespaces(config, 32, facts)


class _Feature:
    """What of vLLM's `MultiModalFeatureSpec` is asked."""

    def __init__(self, identifier: str, offset: int, length: int) -> None:
        self.identifier = identifier
        self.mm_position = type("Place", (), {"offset": offset, "length": length})


@pytest.mark.parametrize("offset", [0, 10, 40])
def test_images_are_part_of_the_name(offset: int) -> None:
    """Placeholders have equal token ids whatever the image: its name tells them apart, from its first page on."""
    from keepwarm.core.blocks import chain, token_ids
    from keepwarm.integrations.vllm.identity import request_keys
    from keepwarm.integrations.vllm.variants import variant_of
    from keepwarm.testing.kv import namespace

    def names(*features: Any, salt: str | None = None) -> list[bytes]:
        request = type("Request", (), {"mm_features": features, "lora_request": None, "cache_salt": salt})
        variant, keys = request_keys(request, 32)
        space = variant_of(namespace(), variant)
        return [block.exact for block in chain(token_ids(PROMPT[:128]), range(32, 129, 32), space, keys)]

    first, same, other, plain = (
        names(*found)
        for found in ([_Feature("a", offset, 50)], [_Feature("a", offset, 50)], [_Feature("b", offset, 50)], [])
    )
    page = offset // 32
    assert first == same
    assert first[:page] == other[:page] == plain[:page]
    assert not set(first[page:]) & {*other[page:], *plain[page:]}
    moved = names(_Feature("a", offset + 1, 50))
    assert not set(first[page:]) & set(moved[page:])
    assert not set(names(_Feature("a", offset, 50), salt="one")) & set(names(_Feature("a", offset, 50), salt="two"))
    assert not set(names(salt="one")) & set(names(salt="two"))
