"""What a windowed layer does not attend to is not loaded, and never read: all of an arena that a request was not given
is NaN here, and its answer is that of a cold run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.conversing import SAID, SYSTEM, fresh, history
from tests.helpers.poison import drop, poisoned
from tests.helpers.prompts import ids
from tests.helpers.windowed import WINDOW, WINDOWED, windowed

from keepwarm import Batcher, Engine
from keepwarm.pipeline import prefix_loader

STEPS = [16, pytest.param(40, marks=pytest.mark.slow)]  # shorter than the window: several blocks lie in it; longer


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_loader, "place", poisoned)


USUAL = "gemma3"
ALL = [each if each == USUAL else pytest.param(each, marks=pytest.mark.slow) for each in WINDOWED]


@pytest.fixture(scope="module", params=ALL)
def model(request: pytest.FixtureRequest) -> Any:
    return windowed(request.param)


@pytest.fixture(scope="module", params=STEPS)
def step(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def plain(model: Any, tokenizer: Any, step: int) -> Iterator[Engine]:
    """Has the same model and nothing stored."""
    with opened(model, tokenizer, None, step, reuse="off") as engine:
        yield engine


def opened(model: Any, tokenizer: Any, store: Path | None, step: int, **given: Any) -> Engine:
    return Engine.from_pretrained((model, tokenizer), store=store, step=step, min_step=4, **given)


def right(engine: Engine, plain: Engine, prompt: list[int]) -> Any:
    """The answer, which is that of a cold run."""
    warm = engine.generate(prompt, max_new_tokens=4, trace=True)
    cold = plain.generate(prompt, max_new_tokens=4, trace=True)
    assert warm.uncached_reason == ""
    assert warm.token_ids == cold.token_ids
    if warm.exactness == "exact":
        assert warm.logits_digest == cold.logits_digest
    return warm


@pytest.mark.parametrize(
    "given", [{}, pytest.param({"map_files": True}, marks=pytest.mark.slow)], ids=["read", "mapped"]
)
def test_edits_forks_and_a_new_process(
    model: Any, plain: Engine, tokenizer: Any, tmp_path: Path, step: int, given: dict[str, Any]
) -> None:
    head = ids(6 * step, 0)
    long = [*head, *ids(2 * step, 1)]
    with opened(model, tokenizer, tmp_path, step) as engine:
        engine.warm([*long, 5])
    with opened(model, tokenizer, tmp_path, step, **given) as engine:
        assert right(engine, plain, [*long, *ids(7, 2)]).cached_by_tier == {"disk": len(long)}
        # what is in the arena is whole from the end of the hit on, and not before it
        assert right(engine, plain, [*long, *ids(9, 3)]).cached_by_tier == {"device": len(long)}
        fork = right(engine, plain, [*head, *ids(20, 4)])
        assert fork.cached_tokens == len(head)
        assert "device" not in fork.cached_by_tier
        for length in (step, len(head), 3 * step, len(long), 2 * step):
            assert right(engine, plain, [*long[:length], *ids(5, length)]).cached_tokens == length
        engine.flush()
    with opened(model, tokenizer, tmp_path, step) as engine:  # all that was stored since is whole
        for length in (len(long), len(head), step):
            drop(engine, "disk")
            assert right(engine, plain, [*long[:length], *ids(20, 4)]).cached_tokens >= length


@pytest.mark.parametrize("reuse", ["exact", pytest.param("prefix", marks=pytest.mark.slow)])
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    model: Any,
    plain: Engine,
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
    step: int,
    reuse: str,
    asked: list[Any],
) -> None:
    text = ids(120, 9)
    with opened(model, tokenizer, tmp_path_factory.mktemp("store"), step, reuse=reuse) as engine:
        for shared, more, seed, tier in asked:
            if tier:
                drop(engine, tier)
            right(engine, plain, [*text[:shared], *ids(more, seed)])


def test_what_was_not_loaded_is_not_stored_anew(
    model: Any, plain: Engine, tokenizer: Any, tmp_path: Path, step: int
) -> None:
    prompt = [*ids(6 * step, 0), 5]
    with opened(model, tokenizer, tmp_path, step, min_store_tokens=1) as engine:  # offers again what is in an arena
        engine.warm(prompt)
        drop(engine, "disk")
        assert right(engine, plain, prompt).cached_by_tier == {"disk": 6 * step}
        engine.flush()
        for entry in engine.pipeline.archive.contents.entries():
            engine.pipeline.archive.remove(entry.id)
        assert right(engine, plain, prompt).cached_by_tier == {"device": 6 * step}
        for count in (6, 2, 4, 5):
            drop(engine, "disk")
            right(engine, plain, [*prompt[: count * step], 6, 7])


def test_what_comes_from_a_remote_tier_is_kept_whole(
    model: Any, plain: Engine, tokenizer: Any, tmp_path: Path, step: int
) -> None:
    prompt = [*ids(6 * step, 0), 5]
    far = {"remote": f"file://{tmp_path / 'far'}", "remote_timeout": 20.0, "remote_load_timeout": 20.0}
    with opened(model, tokenizer, tmp_path / "a", step, **far) as engine:
        engine.warm(prompt)
    with opened(model, tokenizer, tmp_path / "b", step, **far) as engine:
        (tier,) = right(engine, plain, prompt).cached_by_tier
        assert tier in engine.pipeline.archive.remotes.names
    with opened(model, tokenizer, tmp_path / "b", step) as engine:
        for count in (6, 2, 4):
            drop(engine, "disk")
            again = right(engine, plain, [*prompt[: count * step], 6, 7])
            assert again.cached_by_tier == {"disk": count * step}


@pytest.mark.parametrize("given", [{"kv_codec": "int8"}, {"max_ram": 0}], ids=["int8", "without RAM"])
def test_codecs_and_tiers(model: Any, tokenizer: Any, tmp_path: Path, step: int, given: dict[str, Any]) -> None:
    head = ids(6 * step, 0)
    with opened(model, tokenizer, tmp_path, step, reuse="prefix", **given) as engine:
        engine.warm([*head, 5])
        for seed, tier in enumerate(("ram", "disk")):
            drop(engine, tier)
            answer = engine.generate([*head[: 5 * step + 7], *ids(3, 1 + seed)], max_new_tokens=4, logprobs=1)
            inside = engine.pipeline.model.geometry.longest_part or step
            # the second prompt goes on inside the short end of the first one, if not inside the long block
            assert answer.cached_tokens == 5 * step + (7 if step <= inside or seed else 0)
            assert all(abs(each.logprob) < 100 for each in answer.logprobs or ())


def test_batches(model: Any, plain: Engine, tokenizer: Any, tmp_path: Path, step: int) -> None:
    head = ids(6 * step, 0)
    prompts = [[*head[: n * step], *ids(n + 1, n)] for n in (6, 3, 6, 1)]
    cold = [plain.generate(prompt, max_new_tokens=5, trace=True) for prompt in prompts]
    with opened(model, tokenizer, tmp_path, step) as engine:
        engine.warm([*head, 5])
        for tier in ("disk", "ram", "device"):
            drop(engine, tier)
            with Batcher(engine) as batcher:
                futures = [batcher.submit(prompt, max_new_tokens=5, trace=True) for prompt in prompts]
                for future, alone in zip(futures, cold, strict=True):
                    assert future.result(60).logits_digest == alone.logits_digest


def test_a_session_settles_on_what_was_loaded(model: Any, tokenizer: Any, tmp_path: Path, step: int) -> None:
    def say(engine: Engine, text: str, *before: Any) -> None:
        messages = [*before, {"role": "user", "content": text}]
        given: dict[str, Any] = {"messages": messages} if len(before) == 1 else {"prompt": text}
        answer = engine.generate(**given, session="s", max_new_tokens=6, trace=True)
        assert answer.logits_digest == fresh(engine, messages, max_new_tokens=6).logits_digest

    with opened(model, tokenizer, tmp_path, step, settle_after=None) as engine:
        say(engine, SAID[0], {"role": "system", "content": SYSTEM})
        engine.sessions.settle()
    for text in SAID[1:3]:
        with opened(model, tokenizer, tmp_path, step, settle_after=None) as engine:
            say(engine, text, *history(engine))
            drop(engine, "disk")
            engine.sessions.settle()


def test_a_resident_beginning_serves_beside_what_was_loaded_behind_it(
    model: Any, plain: Engine, tokenizer: Any, tmp_path: Path, step: int
) -> None:
    long = ids(8 * step, 20)
    with opened(model, tokenizer, tmp_path, step) as engine:
        right(engine, plain, [*long[: 2 * step], *ids(step, 21), 5])  # in place as a whole
        with opened(model, tokenizer, tmp_path, step) as other:
            other.warm([*long, 5])
        answer = right(engine, plain, [*long, *ids(step, 22), 5])
        assert answer.cached_by_tier == {"device": 2 * step, "disk": 6 * step}
        gap = max((arena.gap for arena in engine.pipeline.pool._idle), key=lambda gap: gap.whole)
        assert (gap.start, gap.end, gap.whole) == (2 * step, 8 * step - WINDOW + 1, 8 * step)
        assert right(engine, plain, [*long, *ids(4, 23)]).cached_by_tier == {"device": 8 * step}
        assert right(engine, plain, [*long[: 2 * step], *ids(4, 24)]).cached_by_tier == {"device": 2 * step}
