"""Quantized KV end to end: every tier, honest labels, and never mixed with what another codec stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepwarm import Engine
from keepwarm.core.request import Request
from keepwarm.errors import ConfigError

IDS = np.random.default_rng(0).integers(5, 9999, 700).tolist()
CODECS = ("int8", "int4", "fp8")


@pytest.fixture(scope="module")
def folder(saved: Callable[..., Path]) -> Path:
    return saved("llama")


def opened(folder: Path, codec: str, store: Path | None = None, **settings: Any) -> Engine:
    settings = {"reuse": "prefix", "step": 128, "min_step": 8} | settings
    return Engine.from_pretrained(folder, kv_codec=codec, store=store, **settings)


def kv(engine: Engine, prompt: list[int], cached: int) -> np.ndarray[Any, Any]:
    """The KV that a request finds in place."""
    linked = engine.pipeline.linked(engine.pipeline.prompts.compile(Request(prompt), 1))
    with engine.pipeline.lease(linked, engine.pipeline.config.reuse, len(prompt) + 1) as placed:
        assert placed.plan.cached_tokens == cached
        placed.arena.materialize()
        layers = range(len(engine.pipeline.model.geometry.layers))
        found = [placed.arena.read(layer, part, 0, cached).copy() for layer in layers for part in (0, 1)]
    return np.stack(found)


@pytest.mark.parametrize("codec", ["int8", *(pytest.param(codec, marks=pytest.mark.slow) for codec in CODECS[1:])])
def test_reuse_from_ram_and_disk_is_quantized_and_equal_in_both(folder: Path, tmp_path: Path, codec: str) -> None:
    with opened(folder, codec, tmp_path) as engine:
        cold = engine.generate(IDS, max_new_tokens=4, trace=True)
        assert (cold.exactness, cold.cached_tokens) == ("exact", 0)
        engine.flush()
        engine.pipeline.pool.forget()
        ram = engine.generate(IDS, max_new_tokens=4, trace=True)
        assert ram.cached_by_tier.keys() == {"ram"}
        assert ram.exactness == "quantized"
        assert ram.cached_tokens == len(IDS) - 1
        assert ram.logits_digest != cold.logits_digest
        if not engine.pipeline.grid.inside:  # it completed the last step, and stored that anew
            engine.flush()
            engine.pipeline.pool.forget()
            ram = engine.generate(IDS, max_new_tokens=4, trace=True)
    with opened(folder, codec, tmp_path) as engine:
        disk = engine.generate(IDS, max_new_tokens=4, trace=True)
        assert disk.cached_by_tier.keys() == {"disk"}
        assert disk.exactness == "quantized"
        assert disk.logits_digest == ram.logits_digest
        explained = engine.explain(IDS)
        assert explained.exactness == "quantized"


def test_a_block_may_be_taken_in_part(folder: Path) -> None:
    codec = "int4"
    with opened(folder, codec) as engine, opened(folder, "raw") as raw:
        for each in (engine, raw):
            each.generate(IDS, max_new_tokens=1)
            each.flush()
            each.pipeline.pool.forget()
        prompt = [*IDS[:200], 7, 7, 7]
        mine, theirs = (kv(each, prompt, 200).view(np.float32) for each in (engine, raw))
        scale = np.abs(theirs).max()
        assert 0 < np.abs(mine - theirs).max() < 0.2 * scale
        result = engine.generate(prompt, max_new_tokens=1)
        assert (result.cached_tokens, result.exactness) == (200, "quantized")


def test_what_this_engine_still_holds_as_computed_is_exact(folder: Path) -> None:
    with opened(folder, "int4") as engine:
        cold = engine.generate(IDS, max_new_tokens=2, trace=True, reuse="exact")
        again = engine.generate(IDS, max_new_tokens=2, trace=True, reuse="exact")
        assert again.cached_by_tier.keys() == {"device"}
        assert (again.exactness, again.logits_digest) == ("exact", cold.logits_digest)
        engine.flush()
        engine.pipeline.pool.forget()
        third = engine.generate(IDS, max_new_tokens=2, trace=True, reuse="exact")  # lossy KV is a miss here
        assert (third.cached_tokens, third.logits_digest) == (0, cold.logits_digest)


def test_what_is_computed_on_quantized_kv_is_never_taken_for_exact(folder: Path, tmp_path: Path) -> None:
    longer = IDS + IDS[:300]
    with opened(folder, "int4", tmp_path) as engine:
        engine.generate(IDS, max_new_tokens=1)
        engine.flush()
        engine.pipeline.pool.forget()
        assert engine.generate(longer, max_new_tokens=1).exactness == "quantized"
        warm = engine.generate(longer, max_new_tokens=2, trace=True, reuse="exact")
        cold = engine.generate(longer, max_new_tokens=2, trace=True, reuse="off")
        assert warm.logits_digest == cold.logits_digest
        engine.flush()
        engine.pipeline.pool.forget()
        assert engine.generate(longer, max_new_tokens=1).cached_tokens > len(IDS)


@pytest.mark.slow
def test_codecs_do_not_share_a_block(folder: Path, tmp_path: Path) -> None:
    for codec in ("raw", "int4"):
        with opened(folder, codec, tmp_path) as engine:
            difference = engine.explain(IDS).miss
            assert difference is not None
            assert difference.reason == ("never_stored" if codec == "raw" else "model_changed")
            assert ("codec" in difference.detail) == (codec != "raw")
            assert engine.generate(IDS, max_new_tokens=1).cached_tokens == 0
    with opened(folder, "raw", tmp_path, reuse="exact") as engine:
        assert engine.generate(IDS, max_new_tokens=1).exactness == "exact"
        assert engine.stats().cached_tokens > 0


@pytest.mark.slow
def test_bytes_in_ram_and_on_disk(saved: Callable[..., Path], tmp_path: Path) -> None:
    import torch

    # bfloat16 and heads of 64, as the models have that the bounds are meant for
    wide = saved("llama", torch.bfloat16, hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64)
    sizes = {}
    prompt = (IDS * 3)[:2000]
    for codec in ("raw", *CODECS):
        with opened(wide, codec, tmp_path / codec, step=2048, dtype="bfloat16") as engine:
            engine.warm(prompt)
            engine.flush()
            sizes[codec] = engine.stats().bytes["ram"] - 4 * len(prompt)
    assert sizes["int8"] <= 0.55 * sizes["raw"]
    assert sizes["fp8"] <= 0.55 * sizes["raw"]
    assert sizes["int4"] <= 0.30 * sizes["raw"]


def test_short_blocks_get_runs_of_their_own(folder: Path, tmp_path: Path) -> None:
    with opened(folder, "int4", tmp_path, step=256) as engine:
        engine.warm(IDS[:515])  # 8 pages, and 3 tokens
        engine.flush()
        runs = engine.pipeline.archive.contents.entries()
        assert sorted(entry.tokens for entry in runs) == [3, 512]
        engine.pipeline.pool.forget()
        assert engine.generate([*IDS[:515], 9, 9], max_new_tokens=1).cached_tokens == 515
        engine.pipeline.archive.compact()
        engine.pipeline.archive.clear_ram()
        engine.pipeline.pool.forget()
        result = engine.generate([*IDS[:515], 8, 8], max_new_tokens=1)
        assert result.cached_by_tier == {"disk": 515}


def test_damage_is_a_miss(folder: Path, tmp_path: Path) -> None:
    with opened(folder, "int4", tmp_path) as engine:
        engine.generate(IDS, max_new_tokens=1)
    (file,) = (tmp_path / "runs").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 4
    file.write_bytes(data)
    with opened(folder, "int4", tmp_path) as engine:
        result = engine.generate(IDS, max_new_tokens=1)
        assert (result.cached_tokens, result.exactness) == (0, "exact")
        assert engine.stats().corrupt == 1


def test_kv_that_is_not_finite_is_not_stored(folder: Path) -> None:
    import torch

    with opened(folder, "int4") as engine:
        weight = engine.pipeline.model.model.model.layers[0].self_attn.v_proj.weight
        with torch.no_grad():
            weight[0, 0] = float("inf")
        engine.generate(IDS, max_new_tokens=1)
        engine.flush()
        assert engine.stats().bytes["ram"] == 0
        assert engine.stats().store_errors > 0


def test_exact_reuse_of_lossy_kv_is_refused_at_the_edge(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_codec='raw'"):
        Engine.from_pretrained(folder, kv_codec="int4")
    with pytest.raises(ConfigError, match="kv_codec"):
        Engine.from_pretrained(folder, kv_codec="int3", reuse="prefix")


@pytest.mark.slow
def test_encrypted_stores_and_bundles_carry_encoded_runs(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    with opened(folder, "int8", tmp_path / "a", store_key_file=key) as engine:
        engine.warm(IDS, name="mine")
        engine.flush()
        engine.pipeline.archive.contents.export("mine", tmp_path / "bundle")
        digest = engine.generate([*IDS, 4], max_new_tokens=1, reuse="off", trace=True).logits_digest
    with opened(folder, "int8", tmp_path / "b") as engine:
        engine.pipeline.archive.contents.import_(tmp_path / "bundle")
        result = engine.generate([*IDS, 4], max_new_tokens=1, trace=True)
        assert (result.exactness, result.cached_tokens) == ("quantized", len(IDS))
        assert result.logits_digest != digest
