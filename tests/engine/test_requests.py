"""Decoding, streaming, and errors that name the cure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.models import VOCABULARY, tiny

from keepwarm import Engine
from keepwarm.errors import ConfigError, EmptyPrompt, PromptError, PromptTooLong, TemplateError

PROMPT = "Once upon a time there was a small cache that kept everything warm, and"


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[Engine]:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=16, min_step=4) as engine:
        yield engine


def test_stream_gives_the_text_of_generate(engine: Engine) -> None:
    whole = engine.generate(PROMPT, max_new_tokens=12)
    pieces = list(engine.stream(PROMPT, max_new_tokens=12))
    assert "".join(p.text for p in pieces) == whole.text
    assert tuple(p.token_id for p in pieces[:-1]) == whole.token_ids
    assert [p.result is None for p in pieces] == [True] * 12 + [False]
    assert pieces[-1].result is not None
    assert pieces[-1].result.token_ids == whole.token_ids
    assert whole.finish_reason == "length"
    assert whole.ttft_ms <= whole.total_ms


def test_text_is_the_decoded_tokens(engine: Engine, tokenizer: Any) -> None:
    for seed in range(5):  # random weights speak in every script: characters split over tokens come out whole
        r = engine.generate(PROMPT, max_new_tokens=24, temperature=1.5, seed=seed)
        kept = r.token_ids[:-1] if r.finish_reason == "stop" else r.token_ids
        assert r.text == tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_an_abandoned_stream_leaves_the_engine_usable(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=12)
    next(stream)
    stream.close()
    assert (
        engine.generate(PROMPT, max_new_tokens=4).token_ids
        == engine.generate(PROMPT, max_new_tokens=4, reuse="off").token_ids
    )


def test_two_interleaved_streams(engine: Engine) -> None:
    prompts = [PROMPT, PROMPT + " then"]
    alone = [engine.generate(p, max_new_tokens=6, reuse="off").token_ids for p in prompts]
    streams = [engine.stream(p, max_new_tokens=6) for p in prompts]
    seen: list[list[int]] = [[], []]
    for _ in range(6):
        for number, stream in enumerate(streams):
            token = next(stream).token_id
            assert token is not None
            seen[number].append(token)
    assert [tuple(s) for s in seen] == alone
    for stream in streams:
        stream.close()


def test_threads_get_their_own_answers(engine: Engine) -> None:
    prompts = [f"{PROMPT} {n} {n * 7}" for n in range(6)]
    alone = [engine.generate(p, max_new_tokens=5, reuse="off", trace=True).logits_digest for p in prompts]
    digests: dict[int, str | None] = {}

    def work(n: int) -> None:
        for _ in range(3):
            digests[n] = engine.generate(prompts[n], max_new_tokens=5, trace=True).logits_digest

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [digests[n] for n in range(6)] == alone


def test_sampling_is_seeded_and_follows_transformers(engine: Engine) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 10, "temperature": 0.8, "top_p": 0.9, "top_k": 40}
    first = engine.generate(PROMPT, seed=3, repetition_penalty=1.2, **settings)
    assert engine.generate(PROMPT, seed=3, repetition_penalty=1.2, **settings).token_ids == first.token_ids
    assert engine.generate(PROMPT, seed=4, repetition_penalty=1.2, **settings).token_ids != first.token_ids


def test_repetition_penalty_equals_transformers(engine: Engine, tokenizer: Any) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    theirs = engine.pipeline.model.model.generate(
        ids, max_new_tokens=12, do_sample=False, repetition_penalty=1.7, pad_token_id=2
    )[0, ids.shape[1] :]
    ours = engine.generate(PROMPT, max_new_tokens=12, repetition_penalty=1.7)
    assert list(ours.token_ids) == theirs.tolist()


def test_top_k_one_is_greedy(engine: Engine) -> None:
    greedy = engine.generate(PROMPT, max_new_tokens=8)
    assert engine.generate(PROMPT, max_new_tokens=8, temperature=2.0, top_k=1, seed=1).token_ids == greedy.token_ids


def test_stop_strings_end_the_answer_and_are_not_part_of_it(engine: Engine) -> None:
    whole = engine.generate(PROMPT, max_new_tokens=20)
    for start in range(0, len(whole.text) - 4, 5):  # inside tokens and across them
        stop = whole.text[start : start + 4]
        for given in (stop, ["never there", stop]):
            r = engine.generate(PROMPT, max_new_tokens=20, stop=given)
            assert r.text == whole.text[: whole.text.index(stop)]
            assert r.finish_reason == "stop"
        streamed = "".join(p.text for p in engine.stream(PROMPT, max_new_tokens=20, stop=stop))
        assert streamed == whole.text[: whole.text.index(stop)]


def test_stop_token_ends_the_answer(tokenizer: Any) -> None:
    model = tiny("llama")
    with Engine.from_pretrained((model, tokenizer)) as plain:
        second = plain.generate(PROMPT, max_new_tokens=2).token_ids[1]
    model.generation_config.eos_token_id = [2, second]
    with Engine.from_pretrained((model, tokenizer)) as engine:
        r = engine.generate(PROMPT, max_new_tokens=9)
        assert r.token_ids[-1] == second
        assert r.finish_reason == "stop"
        assert len(r.token_ids) == 2


def test_the_context_window_is_named(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"too long: 2100 tokens > 2047 maximum .* window is 2048,"):
        engine.generate([5] * 2100)
    with pytest.raises(PromptTooLong, match=r"2000 tokens and 64 new ones .* window is 2048: shorten"):
        engine.generate([5] * 2000)
    with pytest.raises(PromptTooLong):
        engine.stream([5] * 2100)  # at the call, not at the first piece
    assert len(engine.generate([5] * 2047, max_new_tokens=1).token_ids) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"prompt": ""}, EmptyPrompt, "pass some text"),
        ({"prompt": []}, EmptyPrompt, "pass some text"),
        ({"messages": []}, EmptyPrompt, "at least one message"),
        ({}, ConfigError, "nothing was given"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, ConfigError, "leave out messages"),
        ({"segments": ["a"], "tools": []}, ConfigError, "leave out tools"),
        ({"prompt": [VOCABULARY]}, PromptError, "vocabulary"),
        ({"prompt": [-1]}, PromptError, "negative"),
        ({"prompt": [2**32 + 5]}, PromptError, "4294967301 is in no vocabulary"),
        ({"prompt": [0.5]}, PromptError, "token ids"),
        ({"prompt": "a", "max_new_tokens": 0}, ConfigError, "at least 1"),
        ({"prompt": "a", "temperature": -1.0}, ConfigError, "temperature"),
        ({"prompt": "a", "top_p": 0.5}, ConfigError, "temperature > 0"),
        ({"prompt": "a", "temperature": 1.0, "top_p": 0.0}, ConfigError, "top_p"),
        ({"prompt": "a", "reuse": "sometimes"}, ConfigError, "'exact'"),
        ({"prompt": "a", "reuse": "chunks", "repair": "most"}, ConfigError, "repair"),
        ({"prompt": "a", "beams": 2}, ConfigError, "unknown argument beams"),
        ({"messages": ["hello"]}, PromptError, "messages\\[0\\]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, PromptError, "content\\[0\\]"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": ["x"]}, PromptError, "tools\\[0\\]"),
        ({"messages": [{"role": "user", "content": "a"}], "documents": [3]}, PromptError, "document"),
    ],
)
def test_bad_requests_say_what_to_do(
    engine: Engine, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        engine.generate(**arguments)


def test_no_chat_template_says_so(engine: Engine, tokenizer: Any) -> None:
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with (
        Engine.from_pretrained((engine.pipeline.model.model, bare)) as other,
        pytest.raises(TemplateError, match="prompt="),
    ):
        other.generate(messages=[{"role": "user", "content": "a"}])


def test_a_closed_engine_says_so(tokenizer: Any) -> None:
    engine = Engine.from_pretrained((tiny("llama"), tokenizer))
    engine.close()
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.generate("a")


def test_stats_count_tokens_by_tier(tokenizer: Any) -> None:
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=16) as engine:
        for _ in range(3):
            engine.generate([7] * 40, max_new_tokens=1)
        stats, reused = engine.stats(), 2 * (39 if engine.pipeline.grid.inside else 32)
        assert (stats.requests, stats.prompt_tokens, stats.cached_tokens) == (3, 120, reused)
        assert stats.cached_by_tier == {"device": reused, "ram": 0, "disk": 0}
        assert stats.hit_rate == pytest.approx(reused / 120)


def test_attention_kernel_equals_float64_reference() -> None:
    from keepwarm.runtime.attention import prefix_step_attention

    torch.manual_seed(0)
    for prefix, step, heads, kv_heads in [(0, 1, 4, 4), (0, 7, 4, 2), (9, 1, 6, 2), (33, 5, 9, 3), (700, 300, 4, 1)]:
        q, k, v = (
            torch.randn(h, n, 16) for h, n in ((heads, step), (kv_heads, prefix + step), (kv_heads, prefix + step))
        )
        got = prefix_step_attention(q, k, v, scale=0.3)
        k64, v64 = (t.double().repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        scores = q.double() @ k64.transpose(1, 2) * 0.3
        mask = torch.ones(step, prefix + step).tril(prefix).bool()
        expected = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v64
        torch.testing.assert_close(got.transpose(0, 1).double(), expected, atol=1e-5, rtol=1e-5)
