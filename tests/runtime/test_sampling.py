"""What a request says of how its tokens are chosen and when its answer ends, alone and in a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.models import tiny

from keepwarm import Batcher, Engine
from keepwarm.core.request import Decoding
from keepwarm.errors import ConfigError, PromptTooLong
from keepwarm.runtime.sampling import token_at

PROMPT = "One, two, three, four, five, six, seven."


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=64, min_step=4, max_pages="2MiB") as engine:
        yield engine


def said(engine: Engine, length: int = 24, **choice: Any) -> list[int]:
    return list(engine.generate(PROMPT, max_new_tokens=length, **choice).token_ids)


def test_a_stop_token_ends_an_answer_but_not_too_early(engine: Engine) -> None:
    plain = said(engine)
    last = plain[9]
    first = plain.index(last)
    ended = engine.generate(PROMPT, max_new_tokens=24, stop_token_ids=[last])
    assert list(ended.token_ids) == plain[: first + 1]
    assert ended.finish_reason == "stop"
    late = said(engine, stop_token_ids=[last], min_tokens=first + 3)
    assert late[:first] == plain[:first]
    assert last not in late[: first + 3]
    assert len(late) > first + 3
    text = engine.generate(PROMPT, max_new_tokens=1).text
    assert said(engine, stop=[text], min_tokens=5)[:6] == plain[:6]


def test_the_models_own_end_can_be_passed_over(engine: Engine) -> None:
    end = next(iter(engine.pipeline.stop_tokens))
    ended = said(engine, logit_bias={end: 100})
    assert ended == [end], "it is chosen as soon as it is likely"
    assert said(engine, 5, logit_bias={end: 100}, ignore_eos=True) == [end] * 5
    assert end not in said(engine, 5, logit_bias={end: 100}, min_tokens=5)[:5]


def test_penalties_count_the_answers_tokens_alone(engine: Engine) -> None:
    token = said(engine, 1)[0]
    pushed = said(engine, 8, logit_bias={token: 100}, frequency_penalty=2.0)
    assert pushed == [token] * 8, "2 a time is too little"
    once = said(engine, 4, logit_bias={token: 1}, presence_penalty=100.0, ignore_eos=True)
    assert once[0] == token, "the prompt's own tokens are not penalized"
    assert Counter(once).most_common(1)[0][1] == 1


def test_the_likeliest_alone_is_greedy(engine: Engine) -> None:
    greedy = said(engine)
    assert said(engine, temperature=1.0, seed=1, min_p=1.0) == greedy
    assert said(engine, temperature=1.0, seed=1, top_k=1) == greedy
    assert said(engine, presence_penalty=0.0, repetition_penalty=1.0, min_p=None) == greedy


@pytest.mark.host_memory("all but the last token is reused by invariant arithmetic alone")
def test_cold_and_warm_alone_and_in_a_batch_the_same_tokens_are_chosen(engine: Engine) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3, "min_p": 0.2, "frequency_penalty": 1.5},
        {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"presence_penalty": 1.0, "logit_bias": {7: 2.5}},
        {"stop_token_ids": said(engine)[4:5], "min_tokens": 12},
        {"ignore_eos": True, "logit_bias": dict.fromkeys(engine.pipeline.stop_tokens, 5.0)},
        {},
    ]
    asked = [{"max_new_tokens": 16, "trace": True} | one for one in asked]
    said(engine)
    cold = [engine.generate(PROMPT, reuse="off", **one) for one in asked]
    warm = [engine.generate(PROMPT, **one) for one in asked]
    with Batcher(engine) as batch:
        tickets = [batch.submit(PROMPT, fit=bool(number % 2), **one) for number, one in enumerate(asked)]
        together = [ticket.result(60) for ticket in tickets]
    assert all(not one.cached_tokens for one in cold)
    assert all(one.cached_tokens == one.prompt_tokens - 1 for one in warm)
    for each in (warm, together):
        assert [one.token_ids for one in each] == [one.token_ids for one in cold]
        assert [one.logits_digest for one in each] == [one.logits_digest for one in cold]


def test_a_batch_cuts_an_answer_to_the_room_there_is(engine: Engine) -> None:
    length = engine.count_tokens(PROMPT)
    window = engine.pipeline.model.context_window
    assert window is not None
    with Batcher(engine) as batch:
        with pytest.raises(PromptTooLong, match="lower max_new_tokens"):
            batch.submit(PROMPT, max_new_tokens=10**6)
        ticket = batch.submit(PROMPT, max_new_tokens=10**6, fit=True)
        assert ticket.max_new_tokens == min(window, 32 * batch.pool.capacity) - length
        ticket.cancel()
        assert batch.submit(PROMPT, max_new_tokens=2, fit=True).max_new_tokens == 2
        with pytest.raises(PromptTooLong, match=r"too long: \d+ tokens > \d+ maximum"):
            batch.submit([5] * (window + 1), max_new_tokens=2, fit=True)


@pytest.mark.parametrize(
    ("choice", "match"),
    [
        ({"min_p": 0.1}, "min_p need temperature"),
        ({"min_p": 2, "temperature": 1}, r"\[0, 1\]"),
        ({"stop_token_ids": [-1]}, "token ids"),
        ({"logit_bias": {1: 101}}, "-100 to 100"),
        ({"logit_bias": dict.fromkeys(range(2000), 1)}, "1024 tokens each, got 0 and 2000"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"ignore_eos": True, "response_schema": {}}, "leave out one or the other"),
        ({"presence_penalty": "much"}, "presence_penalty must be a number"),
        ({"logit_bias": [3]}, "an object of numbers by token id"),
        ({"logit_bias": {3: "much"}}, "-100 to 100"),
        ({"logit_bias": {3: float("nan")}}, "-100 to 100"),
        ({"stop_token_ids": 3}, "a list of token ids"),
    ],
)
def test_what_cannot_be(choice: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Decoding(**choice)


def test_tokens_that_the_model_does_not_know(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        engine.generate(PROMPT, logit_bias={10**7: 1})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    few=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40),
    count=st.integers(1, 1600),
    point=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53])),
)
def test_a_drawn_token_is_the_one_at_its_point(few: list[float], count: int, point: float) -> None:
    """Whatever the shares are; one that has no share is never drawn."""
    shares = torch.tensor((few * count)[:count], dtype=torch.float32)
    shares[count // 2] += 1e-3
    shares /= shares.sum()
    token = token_at(shares, point)
    assert shares[token] > 0
    ends = shares.double().cumsum(0)
    at, begin = point * float(ends[-1]), float(ends[token]) - float(shares[token])
    assert begin - 1e-12 <= at <= float(ends[token]) + 1e-12


def test_tokens_are_drawn_as_often_as_their_shares_say() -> None:
    shares = torch.tensor([0.5, 0.0, 0.25, 0.25])
    points = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1].tolist()
    assert Counter(token_at(shares, point) for point in points) == {0: 2000, 2: 1000, 3: 1000}


def test_what_is_no_number_is_refused(tokenizer: Any) -> None:
    model = tiny("llama")
    model.lm_head.weight.data[7] = float("nan")
    with (
        Engine.from_pretrained((model, tokenizer)) as engine,
        pytest.raises(RuntimeError, match="no token can be drawn"),
    ):
        engine.generate(PROMPT, max_new_tokens=2, temperature=1.0)
