"""What ordinary requests are told with default settings, at once: also of what no writer has stored yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepwarm import Engine
from keepwarm.cli.explain import ended
from keepwarm.core.blocks import common_length
from keepwarm.core.results import Miss

TEXT = " ".join(f"Rule {number} holds, and so do the others." for number in range(30))

at_any_token = pytest.mark.host_memory("exact at any token is the lean decoder's")


@pytest.fixture
def engine(saved: Callable[..., Path], tmp_path: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(saved("llama"), store=tmp_path / "store") as engine:
        yield engine


def told(miss: Miss | None) -> Miss:
    assert miss is not None
    return miss


def check_parted(engine: Engine, miss: Miss | None, asked: str, before: str) -> None:
    """The first character that differs is told, and both texts."""
    found = told(miss)
    at = next(at for at, (a, b) in enumerate(zip(asked, before, strict=False)) if a != b)
    assert (found.reason, found.changed, found.character) == ("tokens_differ", "prompt", at)
    assert asked[at] in found.wanted
    assert before[at] in found.stored


@at_any_token
@pytest.mark.parametrize("stored", [False, True])
def test_another_question_behind_the_same_text_is_told_where_they_part(engine: Engine, stored: bool) -> None:
    first, second, third = (TEXT + each for each in (" What is it?", " Who is it?", " When is it?"))
    engine.generate(first, max_new_tokens=2)
    if stored:
        engine.flush()
    check_parted(engine, engine.explain(second).miss, second, first)
    check_parted(engine, engine.generate(second, max_new_tokens=2).miss, second, first)
    found = told(engine.explain(third).miss)
    assert (found.reason, found.character) == ("tokens_differ", len(TEXT) + 3)  # after "Wh", as both before it
    edited = TEXT[:500] + " Indeed." + TEXT[500:]
    check_parted(engine, engine.explain(edited).miss, edited, first)


@at_any_token
@pytest.mark.parametrize("stored", [False, True])
def test_of_two_prompts_that_agree_as_far_the_one_that_goes_on_is_shown(engine: Engine, stored: bool) -> None:
    engine.warm(TEXT)
    engine.generate(TEXT + " What is it?", max_new_tokens=2)
    if stored:
        engine.flush()
        engine.pipeline.pool.forget()
    check_parted(engine, engine.explain(TEXT + " How is it?").miss, TEXT + " How is it?", TEXT + " What is it?")


@at_any_token
def test_what_is_warmed_is_found_and_what_follows_is_new(engine: Engine) -> None:
    report = engine.warm(TEXT)
    assert report.shared_tokens == report.tokens
    assert (report.tokens, report.reused_tokens) == (len(engine.pipeline.prepare(TEXT, {}).compiled.tokens), 0)
    asked = TEXT + " What is it?"
    tokens = [engine.pipeline.prepare(each, {}).compiled.tokens for each in (TEXT, asked)]
    found = engine.explain(asked)
    assert found.cached_tokens == common_length(*tokens) >= report.tokens - 2
    assert told(found.miss).reason == "never_stored"
    assert engine.warm(TEXT).new_blocks == 0 or not engine.flush()
    assert engine.warm(TEXT).new_blocks == 0


@at_any_token
def test_a_short_prompt_asked_twice_is_found_but_for_its_last_token(engine: Engine) -> None:
    first, second = (engine.generate("The sea is wide", max_new_tokens=2) for _ in range(2))
    assert told(first.miss).reason == "never_stored"
    assert (second.miss, second.cached_tokens) == (None, second.prompt_tokens - 1)
    assert ended(None, 1) == "everything reusable is reused; the last token is always computed"


def test_where_steps_matter_the_last_step_is_said_to_be_computed(saved: Callable[..., Path]) -> None:
    with Engine.from_pretrained(saved("llama"), attention="model") as engine:
        first, second = (engine.generate("The sea is wide", max_new_tokens=2) for _ in range(2))
        assert second.cached_tokens == 0
        assert engine.warm("The sea is wide").shared_tokens == 0
        assert engine.warm(segments=["The sea is wide"]).shared_tokens == first.prompt_tokens
        assert told(second.miss).reason == "within_a_step"
        assert f"the last {first.prompt_tokens} tokens are always computed" in ended(None, first.prompt_tokens)


@at_any_token
def test_what_another_tenant_asked_is_not_shown(engine: Engine) -> None:
    engine.generate(TEXT + " What is it?", max_new_tokens=2, salt="one")
    found = told(engine.explain(TEXT + " Who is it?", salt="other").miss)
    assert (found.stored, found.character) == ("", None)
    own = told(engine.explain(TEXT + " Who is it?", salt="one").miss)
    assert own.reason == "tokens_differ"
