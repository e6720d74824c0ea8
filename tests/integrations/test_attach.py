"""Plain `model.generate` through the cache, against the same model unattached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.every_model import make
from tests.helpers.models import FAMILIES, tiny
from tests.helpers.prompts import ids

import keepwarm
from keepwarm.errors import ConfigError, UnsupportedModel

SETTINGS: dict[str, Any] = {"step": 16, "min_step": 4}
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": True, "temperature": 0.7, "top_k": 20},
)


def answers(model: Any, prompt: torch.Tensor) -> list[list[int]]:
    """What plain `generate` answers in every way of choosing tokens."""
    found = []
    for way in WAYS:
        torch.manual_seed(0)
        found.append(model.generate(prompt, max_new_tokens=8, pad_token_id=2, **way)[0].tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_unattached_model(family: str, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny(family)
    head = ids(50, 1)
    prompts = [torch.tensor([head + ids(n, 10 + n)]) for n in (1, 9, 16, 30)]

    def all_answers() -> list[list[int]]:
        return [answer for prompt in prompts for answer in answers(model, prompt)]

    plain = all_answers()
    for _ in range(2):  # the second time in a new engine over the same store
        with keepwarm.attach(model, tokenizer, store=tmp_path, **SETTINGS) as attached:
            assert all_answers() == plain
            assert attached.cached_tokens >= 48
            assert attached.prompt_tokens == 80
            assert attached.uncached_reason == ""
    assert all_answers() == plain
    assert "generate" not in model.__dict__


def test_cold_and_warm_logits_are_equal_to_the_bit(tokenizer: Any) -> None:
    model = tiny("qwen3", torch.bfloat16)
    prompt = torch.tensor([ids(61, 3)])
    seen: list[list[torch.Tensor]] = []

    class Spy:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen[-1].append(scores.clone())
            return scores

    with keepwarm.attach(model, tokenizer, **SETTINGS) as attached:
        for _ in range(2):
            seen.append([])
            model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=2, logits_processor=[Spy()])
        assert attached.cached_tokens == 48
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"input_ids": torch.tensor([[5, 6], [7, 8]])}, "one sequence"),
        ({"input_ids": torch.tensor([[5, 6]]), "num_beams": 2}, "beams"),
        ({"input_ids": torch.tensor([[2, 6]]), "attention_mask": torch.tensor([[0, 1]])}, "padding"),
        ({"input_ids": torch.tensor([[5, 6]]), "use_cache": False}, "use_cache"),
        ({"input_ids": torch.tensor([[5, 6]]), "return_dict_in_generate": True}, "hand out"),
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "no input_ids"),
    ],
)
def test_what_cannot_be_cached_runs_as_before(tokenizer: Any, arguments: dict[str, Any], says: str) -> None:
    model = tiny("llama")
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 2}
    plain = model.generate(**arguments, **settings)
    with keepwarm.attach(model, tokenizer, **SETTINGS) as attached:
        through = model.generate(**arguments, **settings)
        assert says in attached.uncached_reason
    if isinstance(plain, torch.Tensor):
        assert torch.equal(plain, through)


@pytest.mark.parametrize(("name", "says"), [("mamba", "token by"), ("jamba", "token by"), ("mamba2", "a state alone")])
def test_what_generate_cannot_continue_runs_as_before(name: str, says: str, tokenizer: Any) -> None:
    model = make(name)
    prompt = torch.tensor([[20 + token for token in ids(60, 1, 100)]])
    plain = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with keepwarm.attach(model, tokenizer, **SETTINGS) as attached:
        for _ in range(2):
            assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), plain)
            assert says in attached.uncached_reason


def test_streamers_and_stopping_work_through_it(tokenizer: Any) -> None:
    import transformers

    model = tiny("llama")
    prompt = torch.tensor([ids(40, 5)])
    with keepwarm.attach(model, tokenizer, **SETTINGS):
        streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
        model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=2, streamer=streamer)
        streamed = "".join(streamer)
        whole = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=2)
        assert streamed == tokenizer.decode(whole[0, 40:])


def test_attaching_twice_is_an_error(tokenizer: Any) -> None:
    model = tiny("llama")
    with keepwarm.attach(model, tokenizer), pytest.raises(ConfigError, match="detach"):
        keepwarm.attach(model, tokenizer)


def test_why_no_more_was_reused_is_told(tokenizer: Any) -> None:
    model = tiny("llama")
    with keepwarm.attach(model, tokenizer) as attached:  # in steps of 1,024 tokens
        for _ in range(2):
            model.generate(torch.tensor([ids(60, 1)]), max_new_tokens=2, pad_token_id=2)
            assert attached.cached_tokens == 0
            assert attached.miss is not None
            assert (attached.miss.reason, attached.miss.lost_tokens) == ("within_a_step", 0)
        for reused in (0, 1024):
            model.generate(torch.tensor([ids(1200, 2)]), max_new_tokens=2, pad_token_id=2)
            assert attached.cached_tokens == reused
        assert attached.miss is not None
        assert (attached.miss.reason, attached.miss.position) == ("within_a_step", 1024)
    with keepwarm.attach(model, tokenizer, kernels="own") as attached:
        for other in (1, 2):
            model.generate(torch.tensor([[*ids(60, 1), *ids(9, other)]]), max_new_tokens=2, pad_token_id=2)
        assert attached.miss is not None
        assert (attached.miss.reason, attached.miss.position) == ("tokens_differ", attached.cached_tokens)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_own_kernels_reuse_to_the_token_and_store_the_answer(family: str, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny(family)
    prompt, other = torch.tensor([ids(60, 1)]), torch.tensor([[*ids(45, 1), *ids(9, 2)]])
    plain, plain_other = answers(model, prompt), answers(model, other)
    reused = []
    for time in (1, 2):  # the second time in a new engine over the same store
        with keepwarm.attach(model, tokenizer, kernels="own", store=tmp_path) as attached:
            assert answers(model, prompt) == plain
            reused.append(attached.cached_tokens)
            assert answers(model, other) == plain_other
            assert (attached.cached_tokens, attached.exactness) == (53, "exact")
            turn = torch.tensor([[*plain[0], *ids(5, 2 + time)]])
            model.generate(turn, max_new_tokens=2, do_sample=False, pad_token_id=2)
            assert attached.cached_tokens == 66 + time, "all that was run of prompt and answer"
    assert reused == [59, 59]
    assert "forward" not in model.__dict__
    assert answers(model, prompt) == plain


def test_own_kernels_answer_to_the_bit_cold_and_warm(tokenizer: Any) -> None:
    model = tiny("qwen3", torch.bfloat16)
    prompt = torch.tensor([ids(61, 3)])
    seen: list[list[torch.Tensor]] = []

    class Spy:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen[-1].append(scores.clone())
            return scores

    def ask() -> None:
        seen.append([])
        model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=2, logits_processor=[Spy()])

    ask()
    with keepwarm.attach(model, tokenizer, kernels="own") as attached:
        ask()
        ask()
        assert attached.cached_tokens == 60
    plain, cold, warm = (torch.stack(each) for each in seen)
    assert torch.equal(cold, warm)
    assert torch.allclose(plain[0], cold[0], atol=0.1)


def test_own_kernels_leave_the_model_to_itself(tokenizer: Any) -> None:
    """What does not go through the cache, and what a processor runs beside, is the model's own."""
    model = tiny("llama")
    prompt = torch.tensor([ids(40, 5)])
    plain = model(prompt).logits

    class Beside:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert torch.equal(model(prompt).logits, plain)
            return scores

    with keepwarm.attach(model, tokenizer, kernels="own") as attached:
        model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=2, logits_processor=[Beside()])
        assert attached.uncached_reason == ""
        model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=2, num_beams=2)
        assert "beams" in attached.uncached_reason
        model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=2, assistant_model=tiny("llama"))
        assert "assistant_model" in attached.uncached_reason
        model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=2, output_attentions=True)
        assert "attentions" in attached.uncached_reason
        assert torch.equal(model(prompt).logits, plain)


def test_own_kernels_are_refused_where_they_do_not_run(tokenizer: Any) -> None:
    model = tiny("gpt2")
    with pytest.raises(UnsupportedModel, match="own"):
        keepwarm.attach(model, tokenizer, kernels="own")
    assert "generate" not in model.__dict__
    with pytest.raises(ConfigError, match="'model' or 'own'"):
        keepwarm.attach(model, tokenizer, kernels="fast")  # type: ignore[arg-type]


def test_what_changes_the_prompt_after_it_was_looked_up_is_not_cached(tokenizer: Any) -> None:
    model = tiny("llama")
    prompt = torch.tensor([[1, *ids(40, 5)]])
    with keepwarm.attach(model, tokenizer, kernels="own") as attached:
        assert "token_healing" in attached._why_uncached(prompt, (), {"token_healing": True})


@pytest.mark.slow
def test_an_adapter_that_comes_later_runs_on_the_models_own_kernels(tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    model = tiny("llama")
    prompt = torch.tensor([ids(40, 5)])
    with keepwarm.attach(model, tokenizer, kernels="own") as attached:
        model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=2)
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
        for _ in range(2):
            model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=2)
            assert "changed" in attached.uncached_reason
