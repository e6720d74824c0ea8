"""Chunk reuse: found anywhere, positioned right, repaired by the rule, and never taken for more than it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.documents import ASK, DOCUMENTS, OFF, ask, make
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.core.blocks import token_ids
from keepwarm.errors import ConfigError, UnsupportedModel
from keepwarm.runtime.blend.scatter import Rows, Watch

OTHERS = [{"role": "system", "content": "Be brief, and name the pier."}, {"role": "user", "content": "When?"}]


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[Engine]:
    with make(tokenizer) as engine:
        for document in DOCUMENTS:
            engine.warm(documents=[document])
        yield engine


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        pytest.param("", "\n\n", marks=pytest.mark.slow),
        pytest.param("\n\n", "", marks=pytest.mark.slow),
        ("\n", " \n"),
        ("", ""),
    ],
)
def test_segments_are_found_whatever_separates_them(tokenizer: Any, before: str, behind: str) -> None:
    texts = [f"{before}# {each['title']}\n\n{each['text'].strip()}{behind}" for each in DOCUMENTS]
    with make(tokenizer) as engine:
        for text in texts:
            engine.warm(segments=[text])
        engine.flush()
        result = engine.generate(segments=["A header.", *reversed(texts), "\nWhen?"], max_new_tokens=1)
        assert result.exactness == "blended"
        assert result.blended_tokens >= 0.9 * sum(len(engine.pipeline.tokenizer.encode(text)[0]) for text in texts)


def test_documents_are_found_in_any_order_after_an_uncached_header(engine: Engine) -> None:
    for number, order in enumerate(itertools.permutations(DOCUMENTS)):
        header = [{"role": "system", "content": f"You are clerk {number}. Answer in one sentence."}, ASK[1]]
        result = engine.generate(messages=header, documents=list(order), max_new_tokens=1)
        segments = engine.explain(messages=header, documents=list(order)).segments
        documents = [segment for segment in segments if segment.kind == "document"]
        assert result.exactness == "blended"
        assert result.blended_tokens >= 0.9 * sum(segment.end - segment.start for segment in documents)
        assert result.cached_tokens == sum(result.cached_by_tier.values())
        assert result.cached_tokens - result.blended_tokens < documents[0].start  # headers begin alike


@pytest.mark.parametrize("repair", ["deviation:1", "impact:1", "leading:1000", "seam:1000"])
def test_repairing_everything_is_a_full_prefill(engine: Engine, repair: str) -> None:
    blended = ask(engine, DOCUMENTS[::-1], repair=repair)
    cold = ask(engine, DOCUMENTS[::-1], reuse="off")
    assert blended.exactness == "blended"
    assert blended.repaired_tokens == blended.blended_tokens > 100
    assert blended.divergence == 0.0
    assert blended.token_ids == cold.token_ids
    if engine.pipeline.model.runner.lean is not None:  # its rows do not depend on what is computed together
        assert blended.logits_digest == cold.logits_digest


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral"))]
)
def test_repairing_everything_through_transformers(family: str, tokenizer: Any) -> None:
    with make(tokenizer, family, attention="model") as engine:
        engine.warm(documents=DOCUMENTS)
        blended, cold = ask(engine, repair="deviation:1"), ask(engine, reuse="off")
        assert blended.repaired_tokens == blended.blended_tokens > 100
        assert blended.token_ids == cold.token_ids


@pytest.mark.parametrize("repair", ["none", "seam:8", "leading:8", "deviation:0.2", "attention:0.2", "impact:0.2"])
def test_strategies_keep_to_their_budget(engine: Engine, repair: str) -> None:
    result = ask(engine, repair=repair)
    expected = {
        "none": 0,
        "seam:8": 6 * 8,
        "leading:8": 3 * 8,
        **dict.fromkeys(("deviation:0.2", "attention:0.2", "impact:0.2"), round(0.2 * result.blended_tokens)),
    }
    assert result.repaired_tokens == expected[repair]
    assert (result.divergence is None) == (repair == "none")
    assert {"select", "repair"} <= set(result.timings)
    assert ask(engine, repair=repair).logits_digest == result.logits_digest


def test_without_documents_it_is_exact(engine: Engine) -> None:
    chunks = engine.generate(messages=ASK, **OFF)
    again = engine.generate(messages=ASK, **OFF)
    cold = engine.generate(messages=ASK, **OFF, reuse="off")
    assert [chunks.exactness, again.exactness] == ["exact", "exact"]
    assert chunks.logits_digest == again.logits_digest == cold.logits_digest
    assert chunks.blended_tokens == 0


def test_a_blended_answer_is_never_found_as_a_prefix(tokenizer: Any) -> None:
    with make(tokenizer) as engine:
        engine.warm(documents=DOCUMENTS)
        before = engine.stats()
        first_chunk = engine.explain(messages=ASK, documents=DOCUMENTS).chunks[0].start
        blended = ask(engine)
        engine.flush()
        assert blended.exactness == "blended"
        assert engine.stats().cached_tokens == before.cached_tokens
        assert engine.stats().extra["chunks"]["tokens"] == blended.blended_tokens
        for reuse in ("exact", "prefix"):
            result = ask(engine, reuse=reuse)
            if reuse == "exact":
                assert result.cached_tokens <= first_chunk
            cold = ask(engine, reuse="off")
            assert result.logits_digest == cold.logits_digest
            assert result.exactness == "exact"


def test_the_header_before_the_first_chunk_is_stored_and_exact(tokenizer: Any) -> None:
    with make(tokenizer, step=16, min_step=4) as engine:
        engine.warm(documents=DOCUMENTS)
        long = [{"role": "system", "content": "Answer in one sentence. " * 20}, ASK[1]]
        first = engine.generate(messages=long, documents=DOCUMENTS, max_new_tokens=1)
        engine.flush()
        again = engine.generate(messages=long, documents=DOCUMENTS[::-1], max_new_tokens=1)
        assert first.cached_tokens == first.blended_tokens
        assert again.cached_tokens - again.blended_tokens >= 48
        warm = engine.generate(messages=long, **OFF, reuse="exact")
        assert warm.cached_tokens >= 48
        assert warm.logits_digest == engine.generate(messages=long, **OFF, reuse="off").logits_digest


def test_salts_keep_chunks_apart(tokenizer: Any) -> None:
    with make(tokenizer) as engine:
        engine.warm(documents=DOCUMENTS, salt="one")
        assert ask(engine, salt="one").blended_tokens > 100
        assert ask(engine, salt="two").blended_tokens == 0
        assert ask(engine).blended_tokens == 0
        engine.purge("one")
        assert ask(engine, salt="one").blended_tokens == 0


def test_a_damaged_chunk_is_computed(tokenizer: Any, tmp_path: Path) -> None:
    with make(tokenizer, store=tmp_path) as engine:
        engine.warm(documents=DOCUMENTS)
        engine.pipeline.archive.clear_ram()
        for path in (tmp_path / "runs").iterdir():
            raw = bytearray(path.read_bytes())
            raw[-100] ^= 0xFF
            path.write_bytes(bytes(raw))
        result, cold = ask(engine), ask(engine, reuse="off")
        assert result.blended_tokens == 0
        assert result.exactness == "exact"
        assert result.logits_digest == cold.logits_digest
        assert engine.stats().corrupt > 0


def test_chunks_survive_a_restart(tokenizer: Any, tmp_path: Path) -> None:
    with make(tokenizer, store=tmp_path) as engine:
        engine.warm(documents=DOCUMENTS, name="documents")
        here = ask(engine)
    with make(tokenizer, store=tmp_path) as engine:
        there = ask(engine)
        assert set(there.cached_by_tier) == {"disk"}
        assert there.logits_digest == here.logits_digest


def test_what_was_met_is_learnt_when_idle(tokenizer: Any) -> None:
    with make(tokenizer, learn_chunks=True) as engine:
        first = ask(engine)
        assert first.exactness == "exact"
        assert engine.pipeline.chunks.wait_until_idle(60)
        second = ask(engine, DOCUMENTS[::-1])
        assert second.blended_tokens > 100
        # computed as `warm` does it: answers do not depend on how a chunk came
        elsewhere: Any = {"messages": OTHERS, "documents": DOCUMENTS[::-1], **OFF}
        second = engine.generate(**elsewhere)
        with make(tokenizer) as other:
            other.warm(documents=DOCUMENTS)
            assert other.generate(**elsewhere).logits_digest == second.logits_digest


def test_a_bound_falls_back_to_exact(tokenizer: Any) -> None:
    with make(tokenizer, max_divergence=1e-6, repair="leading:4") as engine:
        engine.warm(documents=DOCUMENTS)
        result, cold = ask(engine), ask(engine, reuse="off")
        assert result.exactness == "exact"
        assert result.cached_tokens == 0
        assert result.logits_digest == cold.logits_digest
        assert engine.stats().extra["chunks"]["fallbacks"] == 1
        with pytest.raises(ConfigError, match="max_divergence"):
            ask(engine, repair="none")


def test_shadow_runs_tell_how_far_answers_are_off(tokenizer: Any) -> None:
    with make(tokenizer, shadow=0.5) as engine:
        engine.warm(documents=DOCUMENTS)
        for _ in range(4):
            ask(engine, repair="deviation:1")
        assert engine.pipeline.chunks.wait_until_idle(60)
        found = engine.stats().extra["chunks"]
        assert found["shadows"] == 2
        assert found["shadow_first_token_kl"]["max"] < 1e-5
        assert found["shadow_agreement"] == 1.0


def test_explain_says_what_would_be_reused(engine: Engine) -> None:
    told = engine.explain(messages=ASK, documents=DOCUMENTS)
    result = ask(engine)
    assert len(told.chunks) == 3
    assert told.cached_tokens == result.cached_tokens
    assert result.blended_tokens == sum(chunk.end - chunk.start for chunk in told.chunks)
    assert told.exactness == "blended"


def test_long_documents_are_several_blocks(tokenizer: Any) -> None:
    with make(tokenizer, step=32, min_step=4) as engine:
        engine.warm(documents=DOCUMENTS)
        result = ask(engine, DOCUMENTS[::-1], repair="leading:4")
        assert result.repaired_tokens == 12
        assert result.blended_tokens > 100


@pytest.mark.parametrize("chunker", ["fixed", "semantic", "document", "content"])
def test_raw_text_is_divided_by_the_chunker(chunker: str, tokenizer: Any) -> None:
    text = "\n\n".join(document["text"] for document in DOCUMENTS)
    with make(tokenizer, chunker=chunker, chunk_size=48, chunk_least=16) as engine:
        engine.warm(prompt=text)
        result = engine.generate(prompt="Another beginning of a few words.\n\n" + text + " Why?", max_new_tokens=1)
        assert result.cached_tokens == result.blended_tokens
        if chunker == "content":
            assert result.blended_tokens > 30


def test_models_without_rotary_positions_are_refused(tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModel, match="no rotary positions"):
        make(tokenizer, "gpt2")
    with make(tokenizer, "gpt2", reuse="exact") as engine:
        assert ask(engine).exactness == "exact"
        with pytest.raises(UnsupportedModel, match="no rotary positions"):
            ask(engine, reuse="chunks")


def test_windowed_models_are_refused(tokenizer: Any) -> None:
    model = tiny("mistral", sliding_window=32)
    with pytest.raises(UnsupportedModel, match="sliding window"):
        make(tokenizer, model=model)


def test_a_batch_answers_as_the_engine_does(engine: Engine) -> None:
    orders = [DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[1:]]
    ask(engine)  # stores the beginning
    alone = [ask(engine, order, repair="impact:0.15") for order in orders]
    with Batcher(engine) as batcher:
        tickets = [batcher.submit(messages=ASK, documents=order, repair="impact:0.15", **OFF) for order in orders]
        for ticket, wanted in zip(tickets, alone, strict=True):
            result = ticket.result(60)
            assert result.exactness == "blended"
            assert result.blended_tokens == wanted.blended_tokens > 50
            assert result.repaired_tokens == wanted.repaired_tokens > 0
            assert result.cached_tokens == wanted.cached_tokens  # which tiers depends on the arenas there are
            assert result.divergence == wanted.divergence
            assert result.logits_digest == wanted.logits_digest


def test_a_batch_falls_back_and_learns(tokenizer: Any) -> None:
    with make(tokenizer, max_divergence=1e-6, repair="leading:4", learn_chunks=True) as engine:
        with Batcher(engine) as batcher:
            assert batcher.submit(messages=ASK, documents=DOCUMENTS, **OFF).result(60).exactness == "exact"
            assert engine.pipeline.chunks.wait_until_idle(60)
            ticket = batcher.submit(messages=ASK, documents=DOCUMENTS[::-1], **OFF)
            result = ticket.result(60)
        assert result.exactness == "exact"
        assert ticket.plan is not None
        assert not ticket.plan.relocates
        assert result.logits_digest == ask(engine, DOCUMENTS[::-1], reuse="off").logits_digest
        assert engine.stats().extra["chunks"]["fallbacks"] == 1


def test_a_hint_says_what_is_worth_keeping(tokenizer: Any) -> None:
    ids = [3 + i * 7919 % 40_000 for i in range(120)]
    with make(tokenizer, reuse="exact", step=32) as engine:
        for expected in (0, 50):
            assert engine.generate(ids, max_new_tokens=1, cacheable_prefix=50).cached_tokens == expected
            engine.flush()
        assert engine.generate(ids[:90] + [7] * 9, max_new_tokens=1, cacheable_prefix=50).cached_tokens == 50
        with pytest.raises(ConfigError, match="cacheable_prefix"):
            engine.generate(ids, cacheable_prefix=-1)


def test_a_hint_under_prefix_reuse(tokenizer: Any) -> None:
    """Whole blocks and a part of one are taken, and the first alone is worth keeping."""
    ids = [3 + i * 7919 % 40_000 for i in range(120)]
    with make(tokenizer, reuse="prefix", step=32) as engine:
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        for number in range(3):
            found = engine.generate([*ids[:110], *[7 + number] * 9], max_new_tokens=1, cacheable_prefix=32)
            assert found.cached_tokens >= 96


@pytest.mark.parametrize("repair", ["", "some", "seam:1.5", "leading:-1", "deviation:1.1", "none:1", "deviation:nan"])
def test_bad_rules_are_refused(engine: Engine, repair: str) -> None:
    with pytest.raises(ConfigError, match="repair must be"):
        ask(engine, repair=repair)


def test_kv_of_other_contexts_is_reused_only_when_asked_for(tokenizer: Any) -> None:
    for contexts, reused in (("neutral", False), ("any", True)):
        with make(tokenizer, chunk_contexts=contexts) as engine:
            assert ask(engine).exactness == "exact"
            engine.flush()
            for salt in (None, "another tenant"):
                result = ask(engine, DOCUMENTS[::-1], salt=salt)
                found = reused and salt is None
                assert result.exactness == ("blended" if found else "exact")
                assert (result.blended_tokens > 100) is found
            blended = ask(engine, DOCUMENTS[::-1], repair="impact:1")
            assert blended.token_ids == ask(engine, DOCUMENTS[::-1], reuse="off").token_ids


def test_a_chunk_of_a_neutral_start_goes_before_one_of_another_context(tokenizer: Any) -> None:
    with make(tokenizer, chunk_contexts="any") as engine, make(tokenizer) as neutral:
        ask(engine)
        for each in (engine, neutral):
            each.warm(documents=DOCUMENTS)
        one, other = (
            each.generate(messages=OTHERS, documents=DOCUMENTS[::-1], repair="none", **OFF)
            for each in (engine, neutral)
        )
        assert one.logits_digest == other.logits_digest


def test_the_lean_decoder_shows_the_attention_that_transformers_computes(tokenizer: Any) -> None:
    model = tiny("llama", torch.float32)
    found = []
    for attention in ("auto", "model"):
        with make(tokenizer, model=model, attention=attention) as engine:
            rows, arena = Rows(engine.pipeline.model.runner), engine.pipeline.pool.acquire(None, 64)
            tokens, places = token_ids(range(3, 43)), np.arange(40)
            rows.run(tokens[:30], places[:30], arena)
            mass = torch.zeros(len(arena.layers), 33)
            scattered = np.array([4, 17, 30, 31, 32])
            rows.run(tokens[scattered], scattered, arena, watch=Watch(mass, scattered[-4:], 1))
            before = arena.layers[1].values[0, :, :30].clone()
            arena.layers[1].plane(1).put(0, torch.zeros_like(before))
            rows.run(tokens[:30], places[:30], arena, layers=2)  # ends with the second layer's keys and values
            torch.testing.assert_close(arena.layers[1].values[0, :, :30], before)
            found.append(mass)
            arena.seek(0)
            engine.pipeline.pool.release(arena)
    assert not found[0][0].any()
    seen = found[0][1:].sum(1)  # each head of each row gives a probability of one
    torch.testing.assert_close(seen, torch.full_like(seen, 4 * model.config.num_attention_heads))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)
