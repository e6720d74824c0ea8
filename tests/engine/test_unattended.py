"""What a windowed layer does not attend to is not loaded, and never read: all of an arena that a request was not given
is NaN here, and its answer is that of a cold run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.conversing import SAID, SYSTEM, fresh, history
from tests.helpers.prompts import ids
from tests.helpers.windowed import WINDOW, WINDOWED, windowed

from keepwarm import Batcher, Engine
from keepwarm.pipeline import prefix_loader
from keepwarm.runtime.arena.arena import Arena

STEP = 16
HEAD = ids(6 * STEP, 0)
_place = prefix_loader.place


def poisoned(plan: Any, tokens: Any, arena: Arena, load: Any) -> dict[str, int]:
    """As `place`, into an arena that is NaN behind what it holds already."""
    there = max((ref.end for span in plan.loads for ref in span.refs if ref.tier == "device"), default=0)
    arena.seek(there)
    for layer in arena.layers:
        for kv in (0, 1):
            plane = layer.plane(kv)
            heads, capacity, dim = plane.shape
            with torch.inference_mode():
                plane.put(there, torch.full((heads, capacity - there, dim), torch.nan, dtype=plane.dtype))
    return _place(plan, tokens, arena, load)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_loader, "place", poisoned)


USUAL = ("mistral", "gemma3", "gpt_oss")
ALL = [each if each in USUAL else pytest.param(each, marks=pytest.mark.slow) for each in WINDOWED]


@pytest.fixture(scope="module", params=ALL)
def model(request: pytest.FixtureRequest) -> Any:
    return windowed(request.param)


@pytest.fixture(scope="module")
def plain(model: Any, tokenizer: Any) -> Iterator[Engine]:
    """Has the same model and nothing stored."""
    with opened(model, tokenizer, None, reuse="off") as engine:
        yield engine


def opened(model: Any, tokenizer: Any, store: Path | None, **given: Any) -> Engine:
    return Engine.from_pretrained((model, tokenizer), store=store, step=STEP, min_step=4, **given)


def drop(engine: Engine, tier: str) -> None:
    """Have the next request find what is stored in a tier, and nowhere nearer."""
    engine.flush()
    if tier != "device":
        engine.pipeline.pool.forget()
    if tier == "disk":
        engine.pipeline.archive.clear_ram()


def right(engine: Engine, plain: Engine, prompt: list[int]) -> Any:
    """The answer, which is that of a cold run."""
    warm = engine.generate(prompt, max_new_tokens=4, trace=True)
    cold = plain.generate(prompt, max_new_tokens=4, trace=True)
    assert warm.uncached_reason == ""
    assert warm.token_ids == cold.token_ids
    if warm.exactness == "exact":
        assert warm.logits_digest == cold.logits_digest
    return warm


@pytest.mark.parametrize("given", [{}, {"map_files": True}, {"admit": "second_use"}], ids=["read", "mapped", "choosy"])
def test_edits_forks_and_a_new_process(
    model: Any, plain: Engine, tokenizer: Any, tmp_path: Path, given: dict[str, Any]
) -> None:
    long = [*HEAD, *ids(2 * STEP, 1)]
    with opened(model, tokenizer, tmp_path) as engine:
        engine.warm([*long, 5])
    with opened(model, tokenizer, tmp_path, **given) as engine:
        assert right(engine, plain, [*long, *ids(7, 2)]).cached_by_tier == {"disk": len(long)}
        # what is in the arena is whole from the end of the hit on, and not before it
        assert right(engine, plain, [*long, *ids(9, 3)]).cached_by_tier == {"device": len(long)}
        fork = right(engine, plain, [*HEAD, *ids(20, 4)])
        assert fork.cached_tokens == len(HEAD)
        assert "device" not in fork.cached_by_tier
        for length in (STEP, len(HEAD), 3 * STEP, len(long), 2 * STEP):
            assert right(engine, plain, [*long[:length], *ids(5, length)]).cached_tokens == length
        engine.flush()
    with opened(model, tokenizer, tmp_path) as engine:  # all that was stored since is whole
        for length in (len(long), len(HEAD), STEP):
            drop(engine, "disk")
            assert right(engine, plain, [*long[:length], *ids(20, 4)]).cached_tokens >= length


@pytest.mark.parametrize("reuse", ["exact", "prefix"])
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(
        st.tuples(
            st.integers(0, 120), st.integers(1, 40), st.integers(0, 3), st.sampled_from(["device", "ram", "disk", ""])
        ),
        min_size=2,
        max_size=6,
    )
)
def test_any_order_of_prompts(
    model: Any, plain: Engine, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, reuse: str, asked: list[Any]
) -> None:
    text = ids(120, 9)
    with opened(model, tokenizer, tmp_path_factory.mktemp("store"), reuse=reuse) as engine:
        for shared, more, seed, tier in asked:
            if tier:
                drop(engine, tier)
            right(engine, plain, [*text[:shared], *ids(more, seed)])


@pytest.mark.parametrize("family", USUAL)
@pytest.mark.parametrize("given", [{"kv_codec": "int8"}, {"max_ram": 0}], ids=["int8", "without RAM"])
def test_codecs_and_tiers(tokenizer: Any, tmp_path: Path, family: str, given: dict[str, Any]) -> None:
    model = windowed(family)
    with opened(model, tokenizer, tmp_path, reuse="prefix", **given) as engine:
        engine.warm([*HEAD, 5])
        for tier in ("ram", "disk"):
            drop(engine, tier)
            answer = engine.generate([*HEAD[: 5 * STEP + 7], *ids(3, 1)], max_new_tokens=4, logprobs=1)
            assert answer.cached_tokens >= 5 * STEP
            assert all(abs(each.logprob) < 100 for each in answer.logprobs or ())


@pytest.mark.parametrize("family", USUAL)
def test_batches(tokenizer: Any, tmp_path: Path, family: str) -> None:
    model = windowed(family)
    prompts = [[*HEAD[: n * STEP], *ids(n + 1, n)] for n in (6, 3, 6, 1)]
    with opened(model, tokenizer, tmp_path) as engine:
        engine.warm([*HEAD, 5])
        cold = [engine.generate(prompt, max_new_tokens=5, trace=True, reuse="off") for prompt in prompts]
        for tier in ("disk", "ram", "device"):
            drop(engine, tier)
            with Batcher(engine) as batcher:
                futures = [batcher.submit(prompt, max_new_tokens=5, trace=True) for prompt in prompts]
                for future, alone in zip(futures, cold, strict=True):
                    assert future.result(60).logits_digest == alone.logits_digest


@pytest.mark.parametrize("family", USUAL)
def test_a_session_settles_on_what_was_loaded(tokenizer: Any, tmp_path: Path, family: str) -> None:
    model = windowed(family)

    def say(engine: Engine, text: str, *before: Any) -> None:
        messages = [*before, {"role": "user", "content": text}]
        given: dict[str, Any] = {"messages": messages} if len(before) == 1 else {"prompt": text}
        answer = engine.generate(**given, session="s", max_new_tokens=6, trace=True)
        assert answer.logits_digest == fresh(engine, messages, max_new_tokens=6).logits_digest

    with opened(model, tokenizer, tmp_path, settle_after=None) as engine:
        say(engine, SAID[0], {"role": "system", "content": SYSTEM})
        engine.sessions.settle()
    for text in SAID[1:4]:
        with opened(model, tokenizer, tmp_path, settle_after=None) as engine:
            say(engine, text, *history(engine))
            drop(engine, "disk")
            engine.sessions.settle()


def test_a_resident_beginning_serves_beside_what_was_loaded_behind_it(
    model: Any, plain: Engine, tokenizer: Any, tmp_path: Path
) -> None:
    long = ids(8 * STEP, 20)
    with opened(model, tokenizer, tmp_path) as engine:
        engine.warm([*long, 5])
        drop(engine, "ram")
        right(engine, plain, [*long[: 2 * STEP], *ids(STEP, 21), 5])  # in place as a whole
        assert right(engine, plain, [*long, *ids(STEP, 22), 5]).cached_by_tier == {"device": 2 * STEP, "ram": 6 * STEP}
        gap = max((arena.gap for arena in engine.pipeline.pool._idle), key=lambda gap: gap.whole)
        assert (gap.start, gap.end, gap.whole) == (2 * STEP, 6 * STEP, 6 * STEP + WINDOW - 1)
        assert right(engine, plain, [*long, *ids(4, 23)]).cached_by_tier == {"device": 8 * STEP}
        assert right(engine, plain, [*long[: 2 * STEP], *ids(4, 24)]).cached_by_tier == {"device": 2 * STEP}
