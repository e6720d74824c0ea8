"""What must never be reused, or only with a weaker label: states of the process and the model that shape KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

import keepwarm
from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.core.geometry import KVGeometry
from keepwarm.errors import ConfigError
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.testing.kv import MemoryKV

PROMPT = ids(60, 8)


def reused(engine: Engine) -> int:
    """Of it, the second time: all but its last token where rows are invariant, whole steps elsewhere."""
    return 59 if engine.pipeline.grid.inside else 48


def test_training_mode_runs_uncached(tokenizer: Any) -> None:
    model = tiny("gpt2")
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        model.train()
        r = engine.generate(PROMPT, max_new_tokens=1)
        assert "eval()" in r.uncached_reason
        model.eval()
        assert engine.generate(PROMPT, max_new_tokens=1).cached_tokens == 48


def test_autocast_of_the_caller_changes_nothing(tokenizer: Any) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=16) as engine:
        plain = engine.generate(PROMPT, max_new_tokens=3, trace=True, reuse="off")
        with torch.autocast("cpu", torch.bfloat16):
            inside = engine.generate(PROMPT, max_new_tokens=3, trace=True)
        assert inside.logits_digest == plain.logits_digest


def test_autocast_and_unknown_inputs_keep_attach_uncached(tokenizer: Any) -> None:
    model = tiny("llama")
    prompt = torch.tensor([PROMPT])
    with keepwarm.attach(model, tokenizer, step=16) as attached:
        model.generate(prompt, max_new_tokens=2, pad_token_id=2)
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(prompt, max_new_tokens=2, pad_token_id=2)
        assert "autocast" in attached.uncached_reason
        assert "pixel_values" in attached._why_uncached(prompt, (), {"pixel_values": torch.zeros(1)})
        padded = torch.tensor([[*PROMPT, 7]])
        model.generate(padded, max_new_tokens=2, pad_token_id=7)
        assert "pad tokens" in attached.uncached_reason
        settings = transformers.GenerationConfig(max_new_tokens=70, pad_token_id=2, do_sample=False)
        assert model.generate(prompt, settings, past_key_values=None).shape[1] <= 130
        assert attached.uncached_reason == ""
        assert attached.cached_tokens == 48
        static = transformers.GenerationConfig(max_new_tokens=2, pad_token_id=2, cache_implementation="static")
        model.generate(prompt, generation_config=static)
        assert "cache_implementation" in attached.uncached_reason
    with pytest.raises(ConfigError, match="kernels="):
        keepwarm.attach(model, tokenizer, attention="auto")


def test_matmul_precision_is_part_of_the_arithmetic(tokenizer: Any) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=16, attention="model") as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            assert engine.explain(PROMPT).cached_tokens == 0
        finally:
            torch.set_float32_matmul_precision(before)
        assert engine.explain(PROMPT).cached_tokens == 48


@pytest.mark.slow
def test_an_adapter_added_later_is_noticed(tokenizer: Any) -> None:
    import peft

    model = tiny("llama")
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
        assert engine.generate(PROMPT, max_new_tokens=1).cached_tokens == 0
        assert engine.pipeline.model.identity.lora != "none"


def test_an_exchanged_parameter_is_noticed(tokenizer: Any) -> None:
    model = tiny("llama")
    with Engine.from_pretrained((model, tokenizer), step=16) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        layer = model.model.layers[0].self_attn.v_proj
        layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.1)
        assert engine.generate(PROMPT, max_new_tokens=1).cached_tokens == 0


def test_another_attention_of_the_model_is_another_arithmetic(tokenizer: Any) -> None:
    model = tiny("llama")
    with Engine.from_pretrained((model, tokenizer), step=16, attention="model") as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        model.set_attn_implementation("eager")
        assert engine.explain(PROMPT).cached_tokens == 0


def test_a_salt_learns_nothing_of_another(tokenizer: Any) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=16) as engine:
        engine.generate(PROMPT, max_new_tokens=1, salt="one")
        engine.flush()
        mine = engine.explain(PROMPT, salt="two").miss
        nothing = engine.explain(ids(60, 99), salt="two").miss
        assert mine is not None
        assert nothing is not None
        assert (mine.reason, mine.detail) == (nothing.reason, nothing.detail)


def test_integers_are_numbers_and_nonsense_is_refused_before_anything_runs(tokenizer: Any) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=16) as engine:
        assert engine.generate(PROMPT, max_new_tokens=2, temperature=1, top_k=5, seed=1, repetition_penalty=1)
        for bad in ({"temperature": float("nan")}, {"temperature": "hot"}, {"stop": [3]}, {"top_p": True}):
            with pytest.raises(ConfigError):
                engine.stream(PROMPT, **bad)
        with pytest.raises(ConfigError, match="unknown argument sead"):
            engine.explain(PROMPT, sead=3)


def test_arenas_made_in_inference_mode_serve_outside_of_it(tokenizer: Any) -> None:
    model = tiny("llama")
    with keepwarm.attach(model, tokenizer, step=16):
        long = torch.tensor([ids(1500, 1)])
        with torch.inference_mode():
            first = model.generate(long, max_new_tokens=3, do_sample=False, pad_token_id=2)
        again = model.generate(long, max_new_tokens=3, do_sample=False, pad_token_id=2)
        assert first.tolist() == again.tolist()


@pytest.mark.parametrize(
    ("attention", "tier"),
    [
        ("auto", "ram"),
        pytest.param("auto", "disk", marks=pytest.mark.slow),
        pytest.param("model", "ram", marks=pytest.mark.slow),
        ("model", "disk"),
    ],
)
def test_kv_of_fewer_layers_under_the_right_names_is_computed_again(
    tokenizer: Any, tmp_path: Path, tier: str, attention: str
) -> None:
    """As a bundle or a store that others may write to could bring it, with every checksum in order."""
    with Engine.from_pretrained(
        (tiny("llama"), tokenizer), step=16, attention=attention, store=tmp_path, max_ram=(tier == "ram") << 28
    ) as engine:
        engine.generate(ids(60, 3), max_new_tokens=1)  # an arena that holds other KV
        cold = engine.generate(PROMPT, max_new_tokens=3, trace=True, reuse="off")
        linked = engine.pipeline.linked(engine.pipeline.prepare(PROMPT, {"max_new_tokens": 3}).compiled)
        geometry = engine.pipeline.model.geometry
        fewer = KVGeometry(geometry.layers[:-1], geometry.dtype)
        engine.pipeline.archive.put(MemoryKV.random(fewer, len(PROMPT)), linked.blocks, linked.namespace)
        engine.flush()
        first = engine.generate(PROMPT, max_new_tokens=3, trace=True)
        assert (first.cached_tokens, first.logits_digest) == (0, cold.logits_digest)
        again = engine.generate(PROMPT, max_new_tokens=3, trace=True)
        assert (again.cached_tokens, again.logits_digest) == (reused(engine), cold.logits_digest)


@pytest.mark.parametrize(
    ("back", "attention"),
    [
        pytest.param(False, "auto", id="there-auto"),
        pytest.param(False, "model", id="there-model", marks=pytest.mark.slow),
        pytest.param(True, "auto", id="there and back-auto", marks=pytest.mark.slow),
        pytest.param(True, "model", id="there and back-model"),
    ],
)
def test_what_was_computed_while_the_weights_changed_is_stored_under_no_name(
    tokenizer: Any, attention: str, back: bool
) -> None:
    """A request's names are given when it is linked. `back`: its first and last look see the same weights."""
    model = tiny("llama")
    weight = model.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()

    def put(value: torch.Tensor) -> None:
        with torch.no_grad():
            weight.copy_(value)

    with Engine.from_pretrained((model, tokenizer), step=16, attention=attention) as engine:
        cold = engine.generate(PROMPT, max_new_tokens=3, trace=True, reuse="off")
        linked = engine.pipeline.linked(engine.pipeline.prepare(PROMPT, {"max_new_tokens": 3}).compiled)
        with engine.pipeline.lease(linked, engine.pipeline.config.reuse, 64) as placed:
            first, *others = placed.plan.computes
            engine.pipeline.model.runner.extend(
                linked.prompt.tokens[first.start : first.end], placed.arena.cache, first.start
            )
            put(kept * 1.5)
            engine.generate(ids(30, 2), max_new_tokens=1)  # somebody else's, with the new weights
            for span in others:
                engine.pipeline.model.runner.extend(
                    linked.prompt.tokens[span.start : span.end], placed.arena.cache, span.start
                )
            if back:
                put(kept)
                engine.generate(ids(30, 2), max_new_tokens=1)
            placed.computed_to = others[-1].end
        put(kept)
        again = engine.generate(PROMPT, max_new_tokens=3, trace=True)
        assert (again.cached_tokens, again.logits_digest) == (0, cold.logits_digest)
        assert engine.generate(PROMPT, max_new_tokens=3).cached_tokens == reused(engine)


def test_an_answer_of_a_batch_while_the_weights_changed_is_stored_under_no_name(tokenizer: Any) -> None:
    model = tiny("llama")
    weight = model.model.layers[0].input_layernorm.weight  # read in place, not packed
    kept = weight.detach().clone()
    with Engine.from_pretrained((model, tokenizer), step=16) as engine, Batcher(engine) as batcher:
        pieces = iter(batcher.submit(PROMPT, max_new_tokens=400))
        answer = [next(pieces).token_id]
        with torch.no_grad():
            weight.mul_(1.5)
        answer += [piece.token_id for piece in pieces if piece.token_id is not None]
        with torch.no_grad():
            weight.copy_(kept)
        engine.flush()
        more = [*PROMPT, *answer]
        cold = engine.generate(more, max_new_tokens=2, trace=True, reuse="off")
        assert engine.generate(more, max_new_tokens=2, trace=True).logits_digest == cold.logits_digest


# ---- arenas ----

GEOMETRY = KVGeometry.uniform(2, 2, 4, "float32")


def test_late_fills_never_land_on_newer_bytes() -> None:
    arena = Arena(GEOMETRY, 32, HostPort())
    old = torch.full((2, 10, 16), 1, dtype=torch.uint8).numpy()
    for layer in range(2):
        for kv in (0, 1):
            arena.fill(layer, kv, 0, old)
    arena.seek(4)  # the request was relinked: only four positions are kept
    new = torch.full((1, 2, 3, 4), 7.0)
    for layer in range(2):
        keys, values = arena.cache.update(new, new, layer)
        for seen in (keys, values):
            assert seen.shape[2] == 7
            assert (seen[:, :, 4:] == 7.0).all()
            assert (seen[:, :, :4].contiguous().view(torch.uint8) == 1).all()
