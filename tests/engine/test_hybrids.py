"""Models with recurrent state: reuse up to a snapshot, answers equal to the bit with the cache and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.every_model import make
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine, attach
from keepwarm.errors import UnsupportedModel

SMALL: dict[str, Any] = {"step": 32, "min_step": 4, "settle_after": None}
SOME = "qwen3_5_text"  # layers with KV and layers with a state
OTHERS = ("xlstm", "falcon_h1", "granitemoehybrid", "nemotron_h", "lfm2")
FAMILIES = [SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def text(count: int, seed: int) -> list[int]:
    """Token ids that the models have and that are no special ones of the tokenizer."""
    return [20 + token for token in ids(count, seed, 100)]


A = text(150, 1)
EDITED = [*A[:100], *text(40, 2)]
LONGER = [*A, *text(50, 3)]
ALL = {"a": A, "edited": EDITED, "longer": LONGER}
REACHED = {True: [149, 139, 199], False: [128, 128, 192]}  # by the same again: on the kernels to the last token


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


@pytest.fixture(scope="module")
def cold(model: Any, tokenizer: Any) -> dict[str, str]:
    """Digests of runs without the cache."""
    with Engine.from_pretrained((model, tokenizer), **SMALL) as engine:
        return {name: digest(engine, prompt, reuse="off") for name, prompt in ALL.items()}


@pytest.fixture
def engine(model: Any, tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def make_one(**settings: Any) -> Engine:
        opened.append(Engine.from_pretrained((model, tokenizer), **{"store": tmp_path, **SMALL, **settings}))
        return opened[-1]

    yield make_one
    for each in opened:
        each.close()


def digest(engine: Engine, prompt: list[int], **arguments: Any) -> str:
    return str(engine.generate(prompt, max_new_tokens=4, trace=True, **arguments).logits_digest)


def test_warm_and_restarted_equal_cold(engine: Callable[..., Engine], cold: dict[str, str]) -> None:
    first = engine()
    for _ in range(2):
        for name, prompt in ALL.items():
            result = first.generate(prompt, max_new_tokens=4, trace=True)
            assert result.logits_digest == cold[name]
            assert result.exactness == "exact"
    reached = REACHED[first.pipeline.model.runner.is_invariant]
    assert [first.generate(prompt, max_new_tokens=4).cached_tokens for prompt in ALL.values()] == reached
    first.close()
    second = engine()
    for name, prompt in ALL.items():
        result = second.generate(prompt, max_new_tokens=4, trace=True)
        assert result.logits_digest == cold[name]
        assert result.cached_tokens >= 128
        assert "disk" in result.cached_by_tier or "device" in result.cached_by_tier


def test_where_prompts_part_the_next_one_goes_on(engine: Callable[..., Engine]) -> None:
    few = engine(snapshot_budget=1e-9)
    if not few.pipeline.model.geometry.layers:
        pytest.skip("a model without any KV has eight snapshots at least")
    few.generate(LONGER, max_new_tokens=1)  # two snapshots, at 192 and at 160, or on the kernels at 199 and at 160
    first = few.generate(EDITED, max_new_tokens=1)
    if few.pipeline.model.geometry.layers:  # a model without any KV has more of them
        assert first.cached_tokens < 96
        assert first.miss is not None
        assert first.miss.reason == "no_snapshot"
    end = 100 if few.pipeline.model.runner.is_invariant else 96
    assert few.generate([*A[:100], *text(40, 9)], max_new_tokens=1).cached_tokens == end


def test_several_at_once_answer_as_one(engine: Callable[..., Engine], cold: dict[str, str]) -> None:
    with Batcher(engine()) as batch:
        for _ in range(2):
            tickets = {name: batch.submit(prompt, max_new_tokens=4, trace=True) for name, prompt in ALL.items()}
            results = {name: ticket.result(60) for name, ticket in tickets.items()}
            assert {name: result.logits_digest for name, result in results.items()} == cold
        assert all(result.cached_tokens >= 96 for result in results.values())


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_a_weaker_label_is_said(engine: Callable[..., Engine], cold: dict[str, str]) -> None:
    lossy = engine(kv_codec="int8", reuse="prefix")
    lossy.generate(A, max_new_tokens=4)
    lossy.close()
    again = engine(kv_codec="int8", reuse="prefix")
    result = again.generate(LONGER, max_new_tokens=4)
    if again.pipeline.model.geometry.layers:
        assert (result.exactness, result.cached_tokens) == ("quantized", 150)


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_encrypted(engine: Callable[..., Engine], cold: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_STORE_KEY", "ab" * 32)
    one = engine()
    assert digest(one, A, salt="tenant") == cold["a"]
    one.close()
    again = engine()
    result = again.generate(A, max_new_tokens=4, trace=True, salt="tenant")
    assert (result.logits_digest, result.cached_by_tier) == (
        cold["a"],
        {"disk": REACHED[again.pipeline.model.runner.is_invariant][0]},
    )
    assert again.generate(A, max_new_tokens=4, salt="other").cached_tokens == 0


def test_a_purge_takes_the_snapshots_along(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.generate(A, max_new_tokens=1, salt="tenant")
    one.flush()
    stored = one.stats().blocks["disk"]
    assert stored > 4  # blocks and snapshots
    one.purge("tenant")
    assert one.stats().blocks["disk"] == 0


def test_plain_generate(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    prompt = torch.tensor([A])
    theirs = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with attach(model, tokenizer, store=tmp_path, **SMALL) as attached:
        own = attached.engine.pipeline.model.form.own is not None  # which generate makes itself
        for expected in (0, 128, 128):
            assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), theirs)
            assert attached.cached_tokens == (0 if own else expected)
            assert bool(attached.uncached_reason) == own


def test_chunks_are_refused(model: Any, tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModel, match="recurrent state"):
        Engine.from_pretrained((model, tokenizer), reuse="chunks")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_what_goes_on_token_by_token_is_cut_once(name: str, tokenizer: Any, tmp_path: Path) -> None:
    model = make(name, vocab_size=tokenizer.vocab_size)
    segments = ["boats " * 60, "and a question"]
    with Engine.from_pretrained((model, tokenizer), **SMALL) as bare:
        theirs = bare.generate(segments=segments, max_new_tokens=4, trace=True, reuse="off")
    for tier in ("device", "disk"):
        with Engine.from_pretrained((model, tokenizer), store=tmp_path, **SMALL) as engine:
            if tier == "device":
                engine.generate(segments=segments, max_new_tokens=4)
            result = engine.generate(segments=segments, max_new_tokens=4, trace=True)
            assert result.logits_digest == theirs.logits_digest
            assert result.cached_by_tier == {tier: result.last_cut}
            assert result.last_cut >= 60


@pytest.mark.parametrize("name", [pytest.param("mamba", marks=pytest.mark.slow), "jamba"])
def test_what_comes_before_a_question_may_be_warmed(name: str, tokenizer: Any, tmp_path: Path) -> None:
    model = make(name, vocab_size=tokenizer.vocab_size)
    head = "boats" + " boats" * 60
    with Engine.from_pretrained((model, tokenizer), store=tmp_path, **SMALL) as engine:
        report = engine.warm(segments=[head])
        assert report.shared_tokens == report.tokens
        asked = engine.generate(segments=[head, " and a question"], max_new_tokens=4)
        assert asked.cached_tokens == report.tokens


@pytest.mark.parametrize("name", [pytest.param("mamba", marks=pytest.mark.slow), "jamba"])
def test_a_raw_prompt_again_goes_on_near_its_end(name: str, tokenizer: Any, tmp_path: Path) -> None:
    model = make(name)
    with Engine.from_pretrained((model, tokenizer), store=tmp_path, **SMALL) as engine:
        assert engine.warm(A).shared_tokens == 0  # a longer one is cut elsewhere
        cold = digest(engine, A, reuse="off")
        again = engine.generate(A, max_new_tokens=4, trace=True)
        assert (again.logits_digest, again.cached_tokens) == (cold, 144)
        assert "token by token" in (again.miss.detail if again.miss else "token by token")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zaya", "inkling_text"])
def test_nothing_goes_on_where_windows_lack_what_they_attend_to(name: str, tokenizer: Any, tmp_path: Path) -> None:
    """A model with windows and a state goes on at a snapshot, which may lie where a hit did not load its windows."""
    model = make(name)
    edited = [*A[:140], *text(40, 5)]
    settings = SMALL | {"store": tmp_path, "snapshot_budget": 1e-9}
    with Engine.from_pretrained((model, tokenizer), **SMALL) as engine:
        cold = digest(engine, edited, reuse="off")
    with Engine.from_pretrained((model, tokenizer), **settings) as engine:
        engine.generate(A, max_new_tokens=4)
    with Engine.from_pretrained((model, tokenizer), **settings) as engine:
        for memory, _ in (part for arena in engine.pipeline.pool._idle for part in arena.memories):
            memory.tensor.fill_(0xFF)  # NaN
        engine.generate(LONGER, max_new_tokens=4)
        engine.flush()
        for _ in range(2):
            again = engine.generate(edited, max_new_tokens=4, trace=True)
            assert (again.logits_digest, again.exactness) == (cold, "exact")
            assert again.cached_tokens
            engine.flush()
