"""On a device a step begins before the host knows its token: no answer and no KV differs for that."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.errors import Overloaded
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.device import PORTS
from keepwarm.testing.device import AdversarialPort

SMALL = {"step": 64, "min_step": 16}
PROMPT = ids(200, 1)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> AdversarialPort:
    """The device of every engine that is made."""
    made = AdversarialPort()
    monkeypatch.setitem(PORTS, "cpu", lambda device: made)
    return made


@pytest.fixture
def engine(tokenizer: Any, port: AdversarialPort) -> Any:
    with Engine.from_pretrained((tiny("llama"), tokenizer), **SMALL) as made:
        yield made
    assert port.faults == []


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.8, "seed": 3, "top_k": 20}, {"repetition_penalty": 1.3}], ids=str
)
def test_answers_are_those_of_steps_that_wait(
    engine: Engine, port: AdversarialPort, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert port.goes_ahead
    found = engine.generate(PROMPT, max_new_tokens=9, trace=True, logprobs=2, **how)
    monkeypatch.setattr(AdversarialPort, "goes_ahead", False)
    wanted = engine.generate(PROMPT, max_new_tokens=9, trace=True, logprobs=2, **how)
    assert (found.token_ids, found.logits_digest) == (wanted.token_ids, wanted.logits_digest)
    assert found.logprobs == wanted.logprobs


def test_what_follows_an_answer_that_ended_early_is_right(engine: Engine) -> None:
    whole = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True, reuse="off")
    end = whole.token_ids[4]
    first = list(whole.token_ids).index(end) + 1
    ended = engine.generate(PROMPT, max_new_tokens=8, stop_token_ids=[end])
    assert ended.token_ids == whole.token_ids[:first]
    longer = [*PROMPT, *ended.token_ids, *ids(9, 2)]
    cold = engine.generate(longer, max_new_tokens=3, trace=True, reuse="off")
    found = engine.generate(longer, max_new_tokens=3, trace=True)
    assert (found.logits_digest, found.exactness) == (cold.logits_digest, "exact")
    assert found.cached_tokens > 0


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_stream_that_is_closed_leaves_what_it_handed_out(engine: Engine, pieces: int) -> None:
    cold = engine.generate([*PROMPT, 5], max_new_tokens=3, trace=True, reuse="off")
    stream = engine.stream(PROMPT, max_new_tokens=30, ignore_eos=True)
    for _ in range(pieces):
        next(stream)
    stream.close()
    found = engine.generate([*PROMPT, 5], max_new_tokens=3, trace=True)
    assert found.logits_digest == cold.logits_digest
    assert found.cached_by_tier.get("device")


def test_an_arena_is_cut_back_before_it_is_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind that it may belong to another request."""
    told: list[str] = []
    advance, release = Arena.advance, ArenaPool.release

    def advanced(arena: Arena, length: int) -> None:
        told.append("advance")
        advance(arena, length)

    def released(pool: ArenaPool, arena: Arena) -> None:
        told.append("release")
        release(pool, arena)

    monkeypatch.setattr(Arena, "advance", advanced)
    monkeypatch.setattr(ArenaPool, "release", released)
    stream = engine.stream(PROMPT, max_new_tokens=30, ignore_eos=True)
    next(stream)
    told.clear()
    stream.close()
    assert told[-2:] == ["advance", "release"]


def test_who_goes_on_in_another_stream_gets_the_same(engine: Engine, port: AdversarialPort) -> None:
    wanted = engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True, reuse="off").token_ids
    stream = engine.stream(PROMPT, max_new_tokens=6, ignore_eos=True, reuse="off")
    got = []
    for other in (port.stream(), port.stream(), port.current(), port.stream()):
        with port.on(other):
            got.append(next(stream).token_id)
    assert tuple(got) == wanted[:4]


def test_a_step_that_fails_ahead_is_told_after_its_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the answer ended with that token, the step was for nothing, and so was its error."""
    whole = engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True).token_ids
    runner = engine.pipeline.model.runner
    step = runner.step

    def failing(tokens: Any, cache: Any, start: int, there: Any = None, **named: Any) -> Any:
        if start >= len(PROMPT) + 2:
            raise Overloaded("no memory")
        return step(tokens, cache, start, there, **named)

    monkeypatch.setattr(runner, "step", failing)
    got = []
    with pytest.raises(Overloaded):  # noqa: PT012
        for piece in engine.stream(PROMPT, max_new_tokens=6, ignore_eos=True):
            got.append(piece.token_id)
    assert tuple(got) == whole[:3]
    assert whole[2] not in whole[:2]
    ended = engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True, stop_token_ids=[whole[2]])
    assert (ended.token_ids, ended.finish_reason) == (whole[:3], "stop")


def test_prompts_begin_with_what_an_arena_in_use_holds(engine: Engine) -> None:
    """It is copied on the device; whoever has that arena goes on undisturbed, and nothing of an edit is found."""
    prompts = [[*PROMPT, number, 7] for number in range(3)]
    edited = [*PROMPT[:100], 3, *PROMPT[101:], 9]
    how: dict[str, Any] = {"max_new_tokens": 5, "trace": True}
    cold = [engine.generate(each, **how, reuse="off") for each in [*prompts, edited]]
    engine.generate(PROMPT, max_new_tokens=1)
    engine.flush()
    first = engine.stream(prompts[0], **how)
    next(first)  # it has the arena that holds the prompt
    second = engine.stream(prompts[1], **how)
    next(second)
    third, other = engine.generate(prompts[2], **how), engine.generate(edited, **how)
    results = [[*first][-1].result, [*second][-1].result, third, other]
    assert [each and each.logits_digest for each in results] == [each.logits_digest for each in cold]
    assert all(each and each.cached_by_tier.get("device", 0) >= 192 for each in results[:3])


def test_after_a_purge_nothing_of_an_arena_in_use_is_found(engine: Engine) -> None:
    engine.generate(PROMPT, max_new_tokens=1)
    stream = engine.stream([*PROMPT, 1], max_new_tokens=5)
    next(stream)
    engine.purge_all()
    found = engine.generate([*PROMPT, 2], max_new_tokens=2)
    assert found.cached_tokens == 0
    list(stream)
