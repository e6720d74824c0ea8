"""Drafted tokens: the same answers, to the bit of each step's logits, whatever was drafted and however it is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.adapters import adapter
from tests.helpers.lean_families import lean_family
from tests.helpers.models import VOCABULARY, tiny
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine
from keepwarm.core.drafts import StepCosts
from keepwarm.errors import ConfigError
from keepwarm.pipeline import answering

pytestmark = pytest.mark.host_memory("drafts are the lean decoder's")

NEW = 24
TWO = dict.fromkeys((11, 12), 30.0)  # with this bias an answer has only these tokens
HOW: list[dict[str, Any]] = [
    {},
    {"logit_bias": TWO},
    {"logit_bias": TWO, "temperature": 1.3, "seed": 4},
    {"temperature": 0.8, "seed": 5, "top_k": 4},
    {"logit_bias": TWO, "temperature": 1.0, "seed": 6, "frequency_penalty": 0.7, "presence_penalty": 0.1},
    {"logit_bias": TWO, "repetition_penalty": 1.2, "min_tokens": 9},
    {"logit_bias": TWO, "stop_token_ids": [12]},
    {"logit_bias": TWO, "logprobs": 3},
]


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is decides nothing here: steps cost what they cost at least."""
    monkeypatch.setattr(StepCosts, "saw", lambda *_: None)


def models() -> dict[str, Any]:
    return {
        "llama": tiny("llama"),
        "bfloat16": tiny("qwen2", torch.bfloat16),
        "windows": lean_family("gemma3", vocab_size=VOCABULARY),
        "experts": lean_family("qwen3-moe", vocab_size=VOCABULARY),
    }


@pytest.fixture(scope="module", params=["llama", "bfloat16", "windows", "experts"])
def engines(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[tuple[Engine, Engine]]:
    """One without drafts, and one with them."""
    model = models()[request.param]
    with (
        Engine.from_pretrained((model, tokenizer), draft_tokens=0, reuse="off") as plain,
        Engine.from_pretrained((model, tokenizer), max_pages="2MiB") as drafting,
    ):
        yield plain, drafting


def repetitive(parts: Sequence[int]) -> list[int]:
    """A prompt made of a few passages."""
    return [token for part in parts for token in ids(5 + part, part)]


def same(one: Any, other: Any) -> None:
    assert one.token_ids == other.token_ids
    assert one.logits_digest == other.logits_digest
    assert (one.text, one.finish_reason, one.logprobs) == (other.text, other.finish_reason, other.logprobs)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.integers(0, 4), min_size=1, max_size=9), how=st.sampled_from(HOW), new=st.integers(1, NEW))
def test_answers_are_those_without_drafts(
    engines: tuple[Engine, Engine], parts: list[int], how: dict[str, Any], new: int
) -> None:
    given = {"max_new_tokens": new, "trace": True, "ignore_eos": True, **how}
    plain, drafting = (engine.generate(repetitive(parts), **given) for engine in engines)
    assert plain.drafted_tokens == 0
    assert drafting.accepted_tokens <= drafting.drafted_tokens
    same(plain, drafting)


def test_a_repeated_token_is_drafted_and_right(engines: tuple[Engine, Engine]) -> None:
    # What an earlier test was answered to the same prompt would be drafted first: nothing is recalled with reuse off.
    found = engines[1].generate(repetitive([1]), max_new_tokens=NEW, logit_bias={11: 90.0}, reuse="off")
    assert found.token_ids == (11,) * NEW
    assert found.accepted_tokens > NEW // 2


def test_answers_in_a_batch(engines: tuple[Engine, Engine]) -> None:
    prompts = [repetitive(parts) for parts in ([1, 2, 1, 2], [1, 2, 3], [4, 4, 4, 4])]
    hows = [{"max_new_tokens": NEW, "trace": True, "ignore_eos": True, **how} for how in HOW]
    asked = [(prompt, how) for how in hows for prompt in prompts]
    alone = [engines[0].generate(prompt, **how) for prompt, how in asked]
    for at_once in (1, 2, 6):
        with Batcher(engines[1]) as batcher:
            for first in range(0, len(asked), at_once):
                tickets = [batcher.submit(prompt, **how) for prompt, how in asked[first : first + at_once]]
                found = [ticket.result(120) for ticket in tickets]
                for one, other in zip(alone[first:], found, strict=False):
                    same(one, other)
            engines[1].flush()  # pages are held until they are stored
            assert batcher.stats().pages.referenced == 0


def test_a_prompt_that_goes_on_from_an_answer(engines: tuple[Engine, Engine]) -> None:
    """What was drafted and wrong is in no later answer: neither from this arena, nor from the store."""
    plain, drafting = engines
    prompt = repetitive([3, 1, 3, 1])
    given = {"max_new_tokens": NEW, "trace": True, "ignore_eos": True, "logit_bias": TWO}
    first = drafting.generate(prompt, **given)
    more = [*prompt, *first.token_ids, *ids(3, 9)]
    for forget in (False, True):
        if forget:
            drafting.flush()
            drafting.pipeline.pool.forget()
        second = drafting.generate(more, **given)
        assert second.cached_tokens >= len(prompt) + NEW - 2
        assert second.exactness == "exact"
        same(plain.generate(more, **given), second)


def test_a_client_that_leaves_within_a_draft(engines: tuple[Engine, Engine]) -> None:
    plain, drafting = engines
    prompt = repetitive([2, 4, 2])
    given = {"max_new_tokens": NEW, "trace": True, "ignore_eos": True, "logit_bias": TWO}
    for pieces in range(1, 12):
        stream = drafting.stream(prompt, **given)
        tokens = [next(stream).token_id for _ in range(pieces)]
        stream.close()
        more = [*prompt, *(token for token in tokens if token is not None), 7]
        same(plain.generate(more, **given), drafting.generate(more, **given))


@pytest.mark.parametrize("where", ["arena", "ram", "disk", "restart"])
def test_an_answer_given_before_is_drafted_whole(tokenizer: Any, tmp_path: Path, where: str) -> None:
    """Wherever it is kept; and a tenant's is drafted for that tenant alone."""
    pair = (tiny("llama"), tokenizer)
    given: dict[str, Any] = {"max_new_tokens": 60, "trace": True, "ignore_eos": True, "temperature": 1.5, "seed": 1}
    prompt = ids(45, 3)
    with Engine.from_pretrained(pair, store=tmp_path) as engine:
        first = engine.generate(prompt, **given)
        engine.flush()
        if where in ("ram", "disk"):
            engine.pipeline.pool.forget()
        if where == "disk":
            engine.pipeline.archive.clear_ram()
        if where != "restart":
            again = engine.generate(prompt, **given)
            other = engine.generate(prompt, **given, salt="another tenant")
    if where == "restart":
        with Engine.from_pretrained(pair, store=tmp_path) as engine:
            again = engine.generate(prompt, **given)
            other = engine.generate(prompt, **given, salt="another tenant")
    same(first, again)
    assert again.accepted_tokens > 40
    assert other.accepted_tokens <= first.accepted_tokens + 3


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("length", [40, 64, 70, 96, 100])
def test_prompts_that_part_in_their_last_page(tokenizer: Any, tmp_path: Path, length: int, codec: Any) -> None:
    """Each is drafted its own answer from the store, wherever its page begins and whatever lies beside it."""
    given: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.5, "seed": 2}
    stored: dict[str, Any] = {} if codec == "raw" else {"kv_codec": codec, "reuse": "prefix"}
    head = ids(length - 8, 5)
    prompts = [[*head, *ids(2, 20 + number), *ids(6, 6)] for number in range(3)]
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path, **stored) as engine:
        first = [engine.generate(prompt, **given) for prompt in prompts]
        engine.flush()
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path, **stored) as engine:
        for prompt, before in zip(prompts, first, strict=True):
            again = engine.generate(prompt, **given)
            if codec == "raw":
                assert again.token_ids == before.token_ids
            if again.token_ids == before.token_ids:
                assert again.accepted_tokens > 20


def test_a_public_header_and_a_salt(tokenizer: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.5, "seed": 3, "salt": "tenant"}
    prompt = ids(77, 8)
    with Engine.from_pretrained((tiny("llama"), tokenizer), store=tmp_path) as engine:
        first = engine.generate(prompt, **given)
        engine.flush()
        engine.pipeline.pool.forget()
        again = engine.generate(prompt, **given)
    same(first, again)
    assert again.accepted_tokens > 20


def test_a_prediction_is_drafted_and_changes_nothing(engines: tuple[Engine, Engine]) -> None:
    plain, drafting = engines
    given: dict[str, Any] = {"max_new_tokens": 40, "trace": True, "ignore_eos": True, "temperature": 1.5, "seed": 8}
    prompt = ids(31, 17)
    before = plain.generate(prompt, **given)
    for prediction in (before.text, "something else entirely", ""):
        same(before, drafting.generate(prompt, **given, prediction=prediction, reuse="off"))
    text = "one two three four five six seven eight nine ten eleven twelve"
    tokens = drafting.pipeline.tokenizer.encode(text, add_special_tokens=False)[0]
    forced: dict[str, Any] = {"logit_bias": {tokens[0]: 100.0}, "max_new_tokens": 2, "prediction": text}
    assert drafting.generate(prompt, **forced).token_ids == plain.generate(prompt, **forced).token_ids
    with pytest.raises(ConfigError, match="prediction must be a text"):
        drafting.generate(prompt, prediction=["a"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="surrogate"):
        drafting.generate(prompt, prediction="\ud800")
    long = drafting.generate(prompt, prediction="word " * 2_000_000, max_new_tokens=2)
    assert len(long.token_ids) == 2


def test_a_store_that_cannot_be_asked_fails_no_answer(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise OSError("no")

    given: dict[str, Any] = {"max_new_tokens": NEW, "trace": True, "ignore_eos": True, "logit_bias": TWO}
    prompt = repetitive([2, 2, 0, 2])
    plain = engines[0].generate(prompt, **given)
    monkeypatch.setattr(answering, "recalled", failing)
    same(plain, engines[1].generate(prompt, **given))
    with Batcher(engines[1]) as batcher:
        same(plain, batcher.submit([*prompt], **given).result(120))
    assert "cannot be looked up" in caplog.text


def test_json_that_a_grammar_allows(engines: tuple[Engine, Engine]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["xyxy", "yxyx"]}}, "required": ["a"]}
    given: dict[str, Any] = {"max_new_tokens": 40, "trace": True, "response_schema": schema}
    same(*(engine.generate(messages=[{"role": "user", "content": "go"}], **given) for engine in engines))


def test_an_adapter(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    folder = adapter(tmp_path / "one", model)
    given = {"max_new_tokens": NEW, "trace": True, "ignore_eos": True, "logit_bias": TWO}
    found = []
    for draft_tokens in (0, 7):
        with Engine.from_pretrained((model, tokenizer), draft_tokens=draft_tokens, adapters={"one": folder}) as engine:
            found.append(engine.generate(repetitive([1, 2, 1]), adapter="one", **given))
    assert found[1].drafted_tokens > 0
    same(*found)


def test_a_recurrent_state_has_no_drafts(tokenizer: Any) -> None:
    with Engine.from_pretrained((lean_family("lfm2", vocab_size=VOCABULARY), tokenizer)) as engine:
        assert engine.generate(repetitive([1, 1, 1]), max_new_tokens=NEW, logit_bias=TWO).drafted_tokens == 0


def test_a_number_out_of_range_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="draft_tokens"):
        Engine.from_pretrained((tiny("llama"), tokenizer), draft_tokens=8)
