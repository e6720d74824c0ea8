"""Models whose layers lie on several devices, or whose weights come when a layer runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_module
from tests.helpers import away
from tests.helpers.every_model import make
from tests.helpers.poison import drop
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime import device

SMALL: dict[str, Any] = {"step": 32, "min_step": 4, "settle_after": None}
HEAD = [20 + token for token in ids(96, 1, 100)]
PROMPT = [*HEAD, *[20 + token for token in ids(20, 2, 100)]]
EDITED = [*HEAD, *[20 + token for token in ids(20, 3, 100)]]


OTHERS = ("gemma3_text", "gpt2")


@pytest.fixture(params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_text", *OTHERS))])
def parted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has its second half on another device."""
    away.register()
    monkeypatch.setitem(device.PORTS, away.NAME, away.AwayPort)
    model = make(request.param)
    body = model.get_decoder()
    layers = getattr(body, "layers", None) or body.h
    for layer in list(layers)[len(layers) // 2 :]:
        away.to(layer)
    away.back(body.norm if hasattr(body, "norm") else body.ln_f)
    return model


def check(model: Any, tokenizer: Any, store: Path) -> None:
    """With the cache and without it the same answers, from each tier and in a new engine."""

    def opened(**given: Any) -> Engine:
        return Engine.from_pretrained((model, tokenizer), **{"store": store, **SMALL, **given})

    def answer(engine: Engine, prompt: list[int]) -> Any:
        return engine.generate(prompt, max_new_tokens=6, trace=True)

    with opened(reuse="off", store=None) as engine:
        cold = {tuple(each): answer(engine, each).logits_digest for each in (PROMPT, EDITED)}
    with opened() as engine:
        assert engine.pipeline.model.uncached_reason == ""
        first = answer(engine, PROMPT)
        assert (first.cached_tokens, first.logits_digest) == (0, cold[tuple(PROMPT)])
        for tier in ("device", "ram", "disk"):
            drop(engine, tier)
            edited = answer(engine, EDITED)
            assert edited.logits_digest == cold[tuple(EDITED)]
            assert edited.exactness == "exact"
            assert edited.cached_tokens >= len(HEAD)
            assert tier == "device" or tier in edited.cached_by_tier
    with opened() as engine:
        again = answer(engine, PROMPT)
        assert again.cached_tokens >= len(HEAD)
        assert set(again.cached_by_tier) == {"disk"}
        assert again.logits_digest == cold[tuple(PROMPT)]


def test_with_the_cache_and_without_it_the_same(parted: Any, tokenizer: Any, tmp_path: Path) -> None:
    check(parted, tokenizer, tmp_path / "store")


@pytest.mark.parametrize(
    "parted",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_text", *OTHERS))],
    indirect=True,
)
def test_what_lies_where_is_part_of_the_name(tokenizer: Any, parted: Any) -> None:
    whole = make(parted.config.model_type)
    names = []
    for model in (parted, whole):
        with Engine.from_pretrained((model, tokenizer), attention="model", **SMALL) as engine:
            names.append(engine.pipeline.model.namespace())
    assert names[0].arithmetic.device.startswith("away + cpu: ")
    assert names[1].arithmetic.device == "cpu"


def test_chunks_are_refused(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away.register()
    monkeypatch.setitem(device.PORTS, away.NAME, away.AwayPort)
    model = make("llama")
    away.to(model.model.layers[-1])
    away.back(model.model.norm)
    with pytest.raises(UnsupportedModel, match="several devices"):
        Engine.from_pretrained((model, tokenizer), store=tmp_path, reuse="chunks", **SMALL)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        pytest.param("memory", "llama", marks=pytest.mark.slow),
        pytest.param("memory", "qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("files", "llama", marks=pytest.mark.slow),
        ("files", "qwen3_5_text"),
    ],
)
def test_weights_that_come_when_a_layer_runs(tokenizer: Any, tmp_path: Path, kind: str, where: str) -> None:
    model = make(kind)
    if where == "memory":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path / "weights"), execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    check(model, tokenizer, tmp_path / "store")


def test_offloaded_weights_that_change_are_noticed(tokenizer: Any) -> None:
    model = make("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    with Engine.from_pretrained((model, tokenizer), **SMALL) as engine:

        def digests() -> tuple[str, str]:
            warm, cold = (
                engine.generate(PROMPT, max_new_tokens=4, trace=True, **off) for off in ({}, {"reuse": "off"})
            )
            return warm.logits_digest, cold.logits_digest

        first = digests()
        held = model.lm_head._hf_hook.weights_map.dataset
        with torch.no_grad():
            held["model.layers.0.mlp.up_proj.weight"].mul_(1.5)
        second = digests()
        remove_hook_from_module(model, recurse=True)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        third = digests()
    assert all(warm == cold for warm, cold in (first, second, third))
    assert len({first, second, third}) == 3


@pytest.mark.slow
def test_tied_weights_and_buffers_may_be_offloaded(tokenizer: Any, tmp_path: Path) -> None:
    for name in ("gemma3_text", "deepseek_v3"):  # tied weights, a buffer that was learnt
        whole, parted = make(name), make(name)
        cpu_offload(parted, execution_device=torch.device("cpu"), offload_buffers=True)
        with Engine.from_pretrained((parted, tokenizer), **SMALL) as engine:
            theirs = engine.pipeline.model.identity
        with Engine.from_pretrained((whole, tokenizer), **SMALL) as engine:
            assert engine.pipeline.model.identity.weights == theirs.weights
        check(parted, tokenizer, tmp_path / name)


def test_weights_that_were_never_loaded_are_refused(tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModel, match="not loaded"):
        Engine.from_pretrained((make("llama").to("meta"), tokenizer))
