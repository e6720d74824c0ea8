"""Conversations in sessions: only what is new is computed, and every answer equals one without a cache, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.conversing import QUIET, SAID, SYSTEM, Runs, fresh, history
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.errors import ConfigError
from keepwarm.sessions import turn as turns


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_turn_computes_its_new_tokens_alone(saved: Callable[..., Path], tmp_path: Path, family: str) -> None:
    folder = saved(family)
    settings = QUIET | {"store": tmp_path / "store"}
    known, runs = 0, Runs()
    for number, said in enumerate(SAID):
        with Engine.from_pretrained(folder, **settings) as engine:  # restarted after every turn
            session = engine.sessions.open("s", system=SYSTEM)
            result = session.say(said, max_new_tokens=6, trace=True)
            messages = history(engine)
            assert messages[-1] == {"role": "assistant", "content": result.text}
            assert len(messages) == 1 + 2 * (number + 1)
            assert result.exactness == "exact"
            assert result.tokens == "canonical"
            if engine.pipeline.grid.inside:
                assert result.cached_tokens == runs.shared(engine, messages[:-1], result)
            else:
                assert result.cached_tokens == known == (result.last_cut if number else 0)
            cold = fresh(engine, messages[:-1], max_new_tokens=6)
            assert cold.logits_digest == result.logits_digest
            assert cold.last_cut == (result.last_cut or cold.last_cut)
            if not engine.pipeline.grid.inside:
                session.settle()
            known = len(engine.pipeline.prompts.compiled(None, {"messages": messages}).tokens)


def test_whole_conversations_and_what_is_said_next_are_the_same(engine: Engine) -> None:
    chat: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    for said in SAID:
        chat.append({"role": "user", "content": said})
        result = engine.generate(messages=chat, session="whole", max_new_tokens=5, trace=True)
        chat.append({"role": "assistant", "content": result.text})
        engine.sessions.open("next", system=SYSTEM)
        other = engine.generate(said, session="next", max_new_tokens=5, trace=True)
        assert other.logits_digest == result.logits_digest
        engine.sessions.settle("whole")
    assert history(engine, "whole") == history(engine, "next") == chat
    assert {info.name: info.turns for info in engine.sessions.list()} == {"whole": 5, "next": 5}


def test_forks_share_what_they_have_in_common(either: Engine) -> None:
    engine, runs = either, Runs()
    session = engine.sessions.open("s", system=SYSTEM)
    first = session.say(SAID[0], max_new_tokens=5)
    runs.shared(engine, history(engine)[:-1], first)
    if not engine.pipeline.grid.inside:
        session.settle()
    engine.flush()
    blocks = engine.stats().blocks["ram"]
    forks = [session.fork(f"fork {n}") for n in range(5)]
    assert engine.stats().blocks["ram"] == blocks, "nothing was copied"
    for n, fork in enumerate(forks):
        result = fork.say(f"Branch {n}", max_new_tokens=3, trace=True)
        asked = history(engine, f"fork {n}")[:-1]
        shared = runs.shared(engine, asked, result)
        assert result.cached_tokens == (shared if engine.pipeline.grid.inside else result.last_cut) > 100
        assert result.logits_digest == fresh(engine, asked, max_new_tokens=3).logits_digest
    assert session.show().messages == tuple(history(engine, "s"))
    assert len(history(engine, "s")) == 3
    assert len(engine.sessions.fork("s", "early", at=1).show().messages) == 1
    with pytest.raises(ConfigError, match="already"):
        session.fork("early")
    with pytest.raises(ConfigError, match="has 3 messages"):
        session.fork("late", at=4)


def test_edit_and_regenerate_leave_the_old_branch_as_it_was(either: Engine) -> None:
    engine, runs = either, Runs()
    session = engine.sessions.open("s", system=SYSTEM)
    for said in SAID[:3]:
        result = session.say(said, max_new_tokens=5)
        runs.shared(engine, history(engine)[:-1], result)
        session.settle()
    before = history(engine)
    session.edit(-2, "Something else?")
    view = session.show()
    assert view.waits
    assert view.branches == (5,)
    with pytest.raises(ConfigError, match="waits for an answer"):
        session.say("more")
    result = session.regenerate(max_new_tokens=5, trace=True)
    assert [m["content"] for m in history(engine)[:-1]] == [
        SYSTEM,
        *(m["content"] for m in before[1:5]),
        "Something else?",
    ]
    shared = runs.shared(engine, history(engine)[:-1], result)
    assert result.cached_tokens == (shared if engine.pipeline.grid.inside else result.last_cut), (
        "the turns before the edit"
    )
    assert result.logits_digest == fresh(engine, history(engine)[:-1], max_new_tokens=5).logits_digest
    again = session.regenerate(max_new_tokens=5, temperature=1.5, seed=1)
    assert session.show().messages[-1]["content"] == again.text
    assert len(session.show().branches) == 2
    back = engine.generate(messages=before[:-1], session="s", max_new_tokens=5)  # a client goes back to the old branch
    assert history(engine) == before
    assert back.text == before[-1]["content"]
    assert len(session.show().branches) == 2


@pytest.mark.slow
def test_as_generated_keeps_the_ids_that_were_run(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder, settings = saved("llama"), QUIET | {"store": tmp_path / "s", "session_tokens": "as_generated"}
    ran: list[int] = []
    for number, said in enumerate(SAID):
        with Engine.from_pretrained(folder, **settings) as engine:  # what was run outlives the process
            session = engine.sessions.open("s", system=SYSTEM)
            turn = engine.sessions.begin(said, {"session": "s"}, engine.pipeline.archive.epoch())
            ids = engine.pipeline.prompts.compile(_request(turn), 0).tokens.tolist()
            assert ids[: len(ran)] == ran
            letters = {id: 100.0 for each in "harbour" for id in engine.pipeline.tokenizer.encode(each, False)[0]}
            drawn = {"max_new_tokens": 8, "temperature": 1.5, "seed": number, "logit_bias": letters, "trace": True}
            result = session.say(said, **drawn)
            assert result.tokens == ("as_generated" if number else "canonical")
            assert result.exactness == "exact"
            if engine.pipeline.grid.inside:
                assert result.cached_tokens == max(0, len(ran) - 1), "the last token was chosen, not run"
            else:
                assert result.cached_tokens == (result.last_cut if number else 0)
            ran = [*ids, *result.token_ids]
            canonical = engine.pipeline.tokenizer.encode(engine.pipeline.tokenizer.decode(ran), False)[0]
            assert canonical != ran, "a tokenizer joins letters"
            cold = engine.generate(**turn.arguments, **drawn, reuse="off")
            assert cold.logits_digest == result.logits_digest
            if not engine.pipeline.grid.inside:
                session.settle()


def _request(turn: turns.Turn) -> Any:
    from keepwarm.core.request import Request

    return Request(**{name: turn.arguments.get(name) for name in ("messages", "ran")})


@pytest.mark.slow
def test_models_are_swapped_back_and_forth(saved: Callable[..., Path], tmp_path: Path) -> None:
    folders = [saved("llama"), saved("llama", seed=1)]
    settings = QUIET | {"store": tmp_path / "store"}
    for number, said in enumerate(SAID[:4]):
        with Engine.from_pretrained(folders[number % 2], **settings) as engine:
            session = engine.sessions.open("s", system=SYSTEM)
            result = session.say(said, max_new_tokens=4, trace=True)
            assert result.logits_digest == fresh(engine, history(engine)[:-1], max_new_tokens=4).logits_digest
            assert bool(result.cached_tokens) is (number >= 2), "each model finds what it left"
            session.settle()
            assert session.say("now?", max_new_tokens=2).cached_tokens > 100
            session.settle()


def test_a_batch_takes_turns_of_sessions_too(either: Engine) -> None:
    engine = either
    engine.sessions.open("alone", system=SYSTEM)
    for n in range(3):
        engine.sessions.open(f"s{n}", system=SYSTEM)
    for said in SAID[:2]:
        alone = engine.generate(said, session="alone", max_new_tokens=4, trace=True)
        with Batcher(engine) as batcher:
            tickets = [batcher.submit(said, session=f"s{n}", max_new_tokens=4, trace=True) for n in range(3)]
            results = [ticket.result() for ticket in tickets]
        assert {result.logits_digest for result in results} == {alone.logits_digest}
        assert engine.sessions.settle() >= (0 if engine.pipeline.grid.inside else 3)
    assert history(engine, "s2") == history(engine, "alone")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"session": ""}, "1 to 1000 characters"),
        pytest.param({"session": 7}, "1 to 1000 characters", marks=pytest.mark.slow),
        ({"session": "s"}, "messages= .* or a prompt"),
        ({"session": "s", "prompt": [1, 2]}, "what the user says next"),
        ({"session": "s", "segments": ["a"]}, "takes messages="),
    ],
)
def test_what_a_session_cannot_be_asked(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.generate(**arguments)


def test_a_session_keeps_its_system_prompt_and_tools(engine: Engine) -> None:
    tools = [{"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}]
    session = engine.sessions.open("s", system=SYSTEM, tools=tools)
    first = session.say("hi", max_new_tokens=2)
    assert first.prompt_tokens > engine.generate(messages=history(engine)[:2], max_new_tokens=1).prompt_tokens
    session.settle()
    assert session.explain("more").cached_tokens > first.prompt_tokens - 1
    assert engine.sessions.open("s").show().messages == session.show().messages
    for other in ({"system": "another"}, {"tools": [{"name": "f"}]}, {"documents": ["a"]}):
        with pytest.raises(ConfigError, match="session 's' has (an)?other"):
            engine.sessions.open("s", **other)


def test_numbers_and_booleans_are_told_apart(engine: Engine) -> None:
    """For Python's `==` they are the same: history would go on after another message, with other tools."""

    def called(value: Any) -> list[dict[str, Any]]:
        function = {"name": "set", "arguments": {"on": value}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        return [{"role": "user", "content": "On?"}, call, {"role": "user", "content": "And now?"}]

    for value in (0, False):
        engine.generate(messages=called(value), session="s", max_new_tokens=2)
        assert history(engine)[1]["tool_calls"][0]["function"]["arguments"]["on"] is value
    parameters = {"type": "object", "properties": {"on": {"const": 0}}}
    engine.sessions.open("tools", tools=[{"name": "set", "parameters": parameters}])
    engine.sessions.open("tools", tools=[{"name": "set", "parameters": dict(reversed(parameters.items()))}])
    changed = {"type": "object", "properties": {"on": {"const": False}}}
    with pytest.raises(ConfigError, match="other tools"):
        engine.sessions.open("tools", tools=[{"name": "set", "parameters": changed}])


def test_an_abandoned_stream_records_nothing(engine: Engine) -> None:
    engine.generate("one", session="s", max_new_tokens=3)
    stream = engine.stream("two", session="s", max_new_tokens=3)
    next(stream)
    stream.close()
    assert len(history(engine)) == 2
    assert engine.pipeline.activity.idle_seconds() > 0


def test_the_tiny_models_differ() -> None:
    assert not (tiny("llama").lm_head.weight == tiny("llama", seed=1).lm_head.weight).all()
