"""Models with recurrent state on the compiled kernels: exact from every snapshot, wherever it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.lean import compiled
from tests.helpers.lean_families import lean_family
from tests.helpers.models import VOCABULARY
from tests.helpers.prompts import ids

from keepwarm import Batcher, Engine, attach
from keepwarm.errors import UnsupportedModel

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the compiled kernels keep the state in the host's memory"),
]

COUNT = 330  # tokens: ten pages and a part of one
SETTINGS: dict[str, Any] = {"settle_after": None, "snapshot_budget": 100.0}  # a snapshot at the end of every page


def text(count: int, seed: int) -> list[int]:
    """Token ids that the models have and that are no special ones of the tokenizer."""
    return [20 + token for token in ids(count, seed, 100)]


A = text(COUNT, 1)
EDITS = {at: [*A[:at], *text(40, at)] for at in (31, 33, 64, 97, 200, 329)}
ALL = {0: A, **EDITS, 400: [*A, *text(70, 3)]}
# where an edit goes on: before the last token of the first prompt, else at the end of the last page before a difference
REACHED = {0: 329, 31: 0, 33: 32, 64: 64, 97: 96, 200: 192, 329: 329, 400: 329}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("lfm2", torch.float32), marks=pytest.mark.slow),
        ("qwen3.5", torch.float32),
        pytest.param(("lfm2-last", torch.bfloat16), marks=pytest.mark.slow),
        pytest.param(("qwen3-next", torch.bfloat16), marks=pytest.mark.slow),
        pytest.param(("lfm2-moe", torch.bfloat16), marks=pytest.mark.slow),
    ],
    ids=["lfm2", "qwen3.5", "lfm2-last", "qwen3-next", "lfm2-moe"],
)
def model(request: pytest.FixtureRequest) -> Any:
    return lean_family(*request.param, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def cold(model: Any, tokenizer: Any) -> dict[int, str]:
    """Digests of runs without the cache."""
    with Engine.from_pretrained((model, tokenizer), **SETTINGS) as engine:
        assert engine.pipeline.model.runner.is_invariant
        return {name: digest(engine, prompt, reuse="off") for name, prompt in ALL.items()}


@pytest.fixture
def engine(model: Any, tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def make_one(**settings: Any) -> Engine:
        opened.append(Engine.from_pretrained((model, tokenizer), **{"store": tmp_path, **SETTINGS, **settings}))
        return opened[-1]

    yield make_one
    for each in opened:
        each.close()


def digest(engine: Engine, prompt: list[int], **arguments: Any) -> str:
    return str(engine.generate(prompt, max_new_tokens=4, trace=True, **arguments).logits_digest)


def test_every_snapshot_is_exact_from_memory_and_from_disk(engine: Callable[..., Engine], cold: dict[int, str]) -> None:
    first = engine()
    first.generate(A, max_new_tokens=4)
    for prompt in EDITS.values():  # from the device, and what a step keeps on its way
        first.generate(prompt, max_new_tokens=1)
    for forgotten in (False, True):
        for name, prompt in ALL.items():
            if forgotten:
                first.pipeline.pool.forget()  # from RAM
            result = first.generate(prompt, max_new_tokens=4, trace=True)
            assert (result.logits_digest, result.exactness) == (cold[name], "exact")
            assert result.cached_tokens >= REACHED[name]
    first.close()
    for settings in ({}, {"max_ram": 0}):
        again = engine(**settings)
        for name, prompt in ALL.items():
            result = again.generate(prompt, max_new_tokens=4, trace=True)
            assert (result.logits_digest, result.exactness) == (cold[name], "exact")
        again.close()


def test_reuse_ends_at_the_last_snapshot(engine: Callable[..., Engine], cold: dict[int, str]) -> None:
    for tier in ("device", "ram"):
        one = engine(store=None)
        one.generate(A, max_new_tokens=1)
        for name, prompt in ALL.items():
            if tier == "ram":
                one.pipeline.pool.forget()
            result = one.generate(prompt, max_new_tokens=4, trace=True)
            assert (result.logits_digest, result.cached_tokens) == (cold[name], REACHED[name])
        one.close()


def test_the_same_again_is_no_miss(engine: Callable[..., Engine]) -> None:
    one = engine()
    first = one.generate(A, max_new_tokens=1)
    again = one.generate(A, max_new_tokens=1)
    assert (first.last_cut, again.cached_tokens, again.miss) == (329, 329, None)


def test_where_prompts_part_the_next_one_goes_on(engine: Callable[..., Engine], cold: dict[int, str]) -> None:
    few = engine(snapshot_budget=1e-9)
    few.generate(A, max_new_tokens=1)
    first = few.generate(EDITS[200], max_new_tokens=4, trace=True)
    assert (first.cached_tokens, first.logits_digest) == (0, cold[200])
    assert first.miss is not None
    assert first.miss.reason == "no_snapshot"
    assert few.generate([*A[:200], *text(40, 9)], max_new_tokens=1).cached_tokens == 200


def test_a_batch_answers_as_one(engine: Callable[..., Engine], cold: dict[int, str]) -> None:
    with Batcher(engine(), max_prefill_tokens=50) as batch:
        for _ in range(2):
            tickets = {name: batch.submit(prompt, max_new_tokens=4, trace=True) for name, prompt in ALL.items()}
            results = {name: ticket.result(60) for name, ticket in tickets.items()}
            assert {name: result.logits_digest for name, result in results.items()} == cold
        assert all(results[name].cached_tokens >= least for name, least in REACHED.items())


def test_a_conversation_goes_on(engine: Callable[..., Engine], model: Any, tokenizer: Any) -> None:
    first, second = {"session": "harbour"}, {"session": "harbour"}
    one = engine()
    one.generate(tokenizer.decode(A[:200]), max_new_tokens=8, **first)
    warm = one.generate("And then?", max_new_tokens=8, trace=True, **second)
    assert warm.cached_tokens > 150
    with Engine.from_pretrained((model, tokenizer), **SETTINGS) as other:
        other.generate(tokenizer.decode(A[:200]), max_new_tokens=8, reuse="off", **first)
        cold = other.generate("And then?", max_new_tokens=8, trace=True, reuse="off", **second)
    assert (warm.logits_digest, warm.exactness) == (cold.logits_digest, "exact")


def test_attach_runs_generate_on_the_kernels(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    prompt = torch.tensor([A])
    theirs = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with attach(model, tokenizer, kernels="own", store=tmp_path, **SETTINGS) as attached:
        found = [model.generate(prompt, max_new_tokens=6, do_sample=False) for _ in range(3)]
        assert attached.cached_tokens == 329
    assert all(torch.equal(each, found[0]) for each in found)
    if model.dtype is torch.float32:
        assert torch.equal(found[0], theirs)


def test_an_encrypted_store_and_a_purge(
    engine: Callable[..., Engine], cold: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPWARM_STORE_KEY", "ab" * 32)
    one = engine()
    assert digest(one, A, salt="tenant") == cold[0]
    one.close()
    again = engine()
    result = again.generate(A, max_new_tokens=4, trace=True, salt="tenant")
    assert (result.logits_digest, result.cached_by_tier) == (cold[0], {"disk": 329})
    assert again.generate(A, max_new_tokens=4, salt="other").cached_tokens == 0
    again.purge("tenant")
    assert again.generate(A, max_new_tokens=4, salt="tenant").cached_tokens == 0


def test_a_lossy_store_is_said(engine: Callable[..., Engine]) -> None:
    lossy = engine(kv_codec="int8", reuse="prefix")
    lossy.generate(A, max_new_tokens=4)
    lossy.close()
    result = engine(kv_codec="int8", reuse="prefix").generate(ALL[400], max_new_tokens=4)
    assert (result.exactness, result.cached_tokens) == ("quantized", 330)  # a weaker mode keeps the end, too


def test_a_step_that_does_not_follow_the_state_is_refused(engine: Callable[..., Engine]) -> None:
    runner, pool = engine().pipeline.model.runner, engine().pipeline.pool
    arena = pool.acquire(None, 64)
    runner.extend(torch.tensor(A[:10]).numpy(), arena.cache, 0)
    arena.seek(5)
    with pytest.raises(RuntimeError, match="would follow the recurrent state"):
        runner.step(torch.tensor(A[5:9]).numpy(), arena.cache, 5)
    pool.release(arena)


def test_chunks_are_refused(model: Any, tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModel, match="recurrent state"):
        Engine.from_pretrained((model, tokenizer), reuse="chunks")


def test_with_few_snapshots_one_stands_at_the_end_of_what_others_share(engine: Callable[..., Engine]) -> None:
    """The system prompt ends inside a page, so the snapshot stands before that page."""
    system = {"role": "system", "content": "The harbour opens at six. " * 30}
    with engine(snapshot_budget=0.01) as opened:
        asked = [[system, {"role": "user", "content": f"{word} " * 150}] for word in ("pier", "ship", "tide")]
        opened.generate(messages=asked[0], max_new_tokens=1)
        opened.flush()
        for chat in asked[1:]:
            found = opened.generate(messages=chat, max_new_tokens=2, trace=True)
            shared = opened.explain(messages=[system]).prompt_tokens
            assert shared - 64 < found.cached_tokens <= shared
            assert (
                found.logits_digest
                == opened.generate(messages=chat, max_new_tokens=2, trace=True, reuse="off").logits_digest
            )
