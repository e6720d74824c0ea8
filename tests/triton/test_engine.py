"""An engine on the Triton decoder: what is stored is found up to the first token that differs, with the bits of a cold
run, on the host's memory and on a device that does everything as late as it may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.lean_families import lean_family
from tests.helpers.models import tiny
from tests.helpers.on_triton import SMALL
from tests.helpers.poison import drop
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.core.results import Generation
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime import decoders, device
from keepwarm.runtime.stepping import Decoder
from keepwarm.testing.device import AdversarialPort

PROMPT = ids(70, 1, SMALL)
EDITED = [*PROMPT[:45], *ids(20, 2, SMALL)]
MODELS = {"llama": lambda: tiny("llama", vocab_size=SMALL), "gemma3": lambda: lean_family("gemma3", torch.bfloat16)}


@pytest.fixture(scope="module", params=["host", "adversarial"])
def port(request: pytest.FixtureRequest) -> Iterator[None]:
    made: list[AdversarialPort] = []

    def make(where: torch.device) -> AdversarialPort:
        made.append(AdversarialPort(where))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "adversarial":
            patch.setitem(device.PORTS, "cpu", make)
        yield
    assert [fault for each in made for fault in each.faults] == []


@pytest.fixture(scope="module")
def llama() -> Any:
    return MODELS["llama"]()


def opened(model: Any, tokenizer: Any, **given: Any) -> Engine:
    return Engine.from_pretrained((model, tokenizer), attention="triton", max_pages="2MiB", **given)


def decoder(engine: Engine) -> Decoder:
    found = engine.pipeline.model.runner.lean
    assert found is not None
    return found


def ask(engine: Engine, prompt: list[int], **how: Any) -> Generation:
    return engine.generate(prompt, max_new_tokens=4, ignore_eos=True, trace=True, **how)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_hits_have_the_bits_of_a_cold_run_at_any_token(name: str, port: None, tokenizer: Any, tmp_path: Path) -> None:
    model = MODELS[name]()
    with opened(model, tokenizer, store=tmp_path) as engine:
        cold, edited = (ask(engine, each, reuse="off") for each in (PROMPT, EDITED))
        first = ask(engine, PROMPT)
        assert (first.cached_tokens, first.logits_digest) == (0, cold.logits_digest)
        for tier in ("device", "ram", "disk"):
            drop(engine, tier)
            found = ask(engine, EDITED)
            assert (found.exactness, found.logits_digest) == ("exact", edited.logits_digest)
            assert found.cached_tokens >= 45
    with opened(model, tokenizer, store=tmp_path) as engine:
        longer = [*PROMPT, *cold.token_ids[:-1], *ids(3, 5, SMALL)]
        again = ask(engine, longer)
        assert again.cached_tokens == len(PROMPT) + 3, "generated tokens are found, too"
        assert (again.exactness, set(again.cached_by_tier)) == ("exact", {"disk"})
        assert again.logits_digest == ask(engine, longer, reuse="off").logits_digest


@pytest.mark.slow
def test_batches_answer_as_requests_alone(port: None, llama: Any, tokenizer: Any, tmp_path: Path) -> None:
    prompts = [[*PROMPT[:48], *ids(5 + i, 10 + i, SMALL)] for i in range(3)]
    with opened(llama, tokenizer, store=tmp_path) as engine, Batcher(engine) as batcher:
        alone = [ask(engine, prompt, reuse="off") for prompt in prompts]
        for _ in range(2):
            tickets = [batcher.submit(prompt, max_new_tokens=4, ignore_eos=True, trace=True) for prompt in prompts]
            found = [ticket.result(120) for ticket in tickets]
            assert [each.logits_digest for each in found] == [each.logits_digest for each in alone]
        assert all(each.cached_tokens >= len(prompt) - 1 for each, prompt in zip(found, prompts, strict=True))


@pytest.mark.slow
def test_chunks_are_moved_and_repaired(port: None, llama: Any, tokenizer: Any, tmp_path: Path) -> None:
    chunk = ids(48, 7, SMALL)
    with opened(llama, tokenizer, store=tmp_path, reuse="chunks", chunk_size=16, chunk_least=8) as engine:
        engine.warm([*ids(16, 8, SMALL), *chunk, *ids(8, 9, SMALL)])
        found = ask(engine, [*ids(32, 10, SMALL), *chunk, *ids(6, 11, SMALL)])
        assert found.exactness == "blended"
        assert found.cached_tokens > 0


@pytest.mark.slow
def test_its_arithmetic_has_a_name_and_changed_weights_are_used(tokenizer: Any) -> None:
    model = tiny("llama", vocab_size=SMALL)
    with opened(model, tokenizer) as engine:
        loaded = engine.pipeline.model
        assert loaded.attention == f"triton:{decoder(engine).digest}"
        before, answer = loaded.namespace(), ask(engine, PROMPT)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
        after = ask(engine, PROMPT)
        assert loaded.namespace() != before
        assert after.logits_digest != answer.logits_digest
        with opened(model, tokenizer, reuse="off") as other:
            assert after.logits_digest == ask(other, PROMPT).logits_digest


def test_what_the_kernels_do_not_run_is_refused_with_a_reason(tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModel, match="recurrent states: take attention='auto'"):
        opened(lean_family("lfm2"), tokenizer)
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel is not one of"):
        opened(tiny("gpt2"), tokenizer)


def test_an_engine_loads_and_answers(tokenizer: Any, tmp_path: Path) -> None:
    """To load it, the self-test and the comparison with transformers have to pass."""
    model = tiny("llama", vocab_size=SMALL)
    with opened(model, tokenizer) as engine:
        found = engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT])).logits[0, -1]
        assert found.token_ids[0] == int(logits.argmax())
        assert found.exactness == "exact"
        with pytest.raises(UnsupportedModel, match="adapters need the compiled"):
            engine.adapters.load("one", tmp_path)


@pytest.mark.slow
def test_an_engine_with_experts_reuses_up_to_the_first_token_that_differs(tokenizer: Any) -> None:
    with opened(lean_family("mixtral", torch.bfloat16), tokenizer) as engine:
        edited = ask(engine, EDITED, reuse="off")
        ask(engine, PROMPT)
        found = ask(engine, EDITED)
        assert (found.exactness, found.cached_tokens) == ("exact", 45)
        assert found.logits_digest == edited.logits_digest


@pytest.mark.slow
def test_they_are_the_default_where_they_were_seen(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But not in float32, and not for models that they do not run."""
    monkeypatch.setitem(device.PORTS, "cpu", AdversarialPort)
    monkeypatch.setattr(decoders, "was_seen", lambda device: True)

    def name(model: Any) -> str:
        with Engine.from_pretrained((model, tokenizer)) as engine:
            lean = engine.pipeline.model.runner.lean
            return "" if lean is None else lean.name

    assert name(tiny("llama", torch.bfloat16, vocab_size=SMALL)) == "triton"
    assert name(tiny("llama", vocab_size=SMALL)) == ""
    with caplog.at_level("INFO"):
        assert name(lean_family("lfm2", torch.bfloat16)) == ""
    assert "recurrent states" in caplog.text
    monkeypatch.setattr(decoders, "variance", lambda *given, **named: "steps that end elsewhere")
    assert name(tiny("llama", torch.bfloat16, vocab_size=SMALL)) == ""
    assert "not invariant (steps that end elsewhere). Please report this" in caplog.text


def test_encoded_kv_is_refused(llama: Any, tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModel, match="kv_in_memory='encoded' needs.*on the kernels for GPUs"):
        opened(llama, tokenizer, reuse="prefix", kv_codec="int8", kv_in_memory="encoded")
