"""Conversations in sessions: only what is new is computed, and every answer equals one without a cache, to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.core.blocks import common_length, token_ids
from keepwarm.errors import ConfigError, StoreLocked
from keepwarm.sessions import turn as turns
from keepwarm.store.admin.conversations import FILE, FOLDER

SYSTEM = "You are the clerk of a harbour. " + " ".join(f"Pier {n} takes boats of {n} metres." for n in range(12))
SAID = ["Where does a boat of 9 metres go?", "And one of 3?", "Naïve question: 中文 🙂?", "Thank you.  ", "\n\nBye"]
QUIET: dict[str, Any] = {"settle_after": None, "step": 512}


@pytest.fixture
def engine(saved: Callable[..., Path], tmp_path: Path) -> Any:
    with Engine.from_pretrained(saved("llama"), store=tmp_path / "store", **QUIET) as engine:
        yield engine


@pytest.fixture
def scheduled(saved: Callable[..., Path], tmp_path: Path) -> Any:
    """An engine whose answers are settled: through transformers a row's bits depend on its step."""
    with Engine.from_pretrained(saved("llama"), store=tmp_path / "store", attention="model", **QUIET) as engine:
        yield engine


@pytest.fixture(params=["auto", "model"])
def either(request: pytest.FixtureRequest, saved: Callable[..., Path], tmp_path: Path) -> Any:
    """Engines of both kinds of arithmetic."""
    store = tmp_path / "store"
    with Engine.from_pretrained(saved("llama"), store=store, attention=request.param, **QUIET) as engine:
        yield engine


class Runs:
    """Whose KV was computed, and what of it a prompt shares."""

    def __init__(self) -> None:
        self._runs: list[Any] = []

    def shared(self, engine: Engine, messages: Any, result: Any) -> int:
        """Leading tokens that a request for an answer to `messages` has in common with the earlier ones."""
        asked = engine.pipeline.prepare(None, {"messages": turns.marked(messages)}).compiled.tokens
        assert len(asked) == result.prompt_tokens
        found = max((common_length(each, asked) for each in self._runs), default=0)
        self._runs.append(np.concatenate([asked, token_ids(result.token_ids[:-1])]))
        return found


def fresh(engine: Engine, messages: Any, **arguments: Any) -> Any:
    """The same conversation as a request of its own that finds nothing and stores nothing."""
    return engine.generate(messages=turns.marked(messages), trace=True, reuse="off", **arguments)


def history(engine: Engine, name: str = "s", salt: str | None = None) -> list[dict[str, Any]]:
    return list(engine.sessions.show(name, salt).messages)


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


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["auto", "model"])
def test_an_answer_is_settled_by_itself_when_nothing_is_asked(
    saved: Callable[..., Path], tmp_path: Path, attention: Any
) -> None:
    settings = QUIET | {"store": tmp_path / "store", "attention": attention}
    with Engine.from_pretrained(saved("llama"), **settings | {"settle_after": 0.0}) as engine:
        engine.generate("Hello", session="s", max_new_tokens=4)
        engine.sessions._settler.settle_all()  # waits for the thread, or is faster
        assert engine.sessions.waiting() == 0
        assert engine.sessions.list()[0].settled
        engine.generate("Go on", session="s", max_new_tokens=4)
    with Engine.from_pretrained(saved("llama"), **settings) as engine:
        assert engine.sessions.list()[0].settled, "closing settles what waits"


def test_a_turn_that_ends_while_the_one_before_settles_is_settled_too(scheduled: Engine) -> None:
    engine = scheduled
    engine.generate("Hello", session="s", max_new_tokens=4)
    key = engine.sessions._settler.waiting()[0]

    def settle_and_say(key: bytes, go_on: Callable[[], bool]) -> bool:
        engine.generate("Go on", session="s", max_new_tokens=4)
        return True

    engine.sessions._settler._settle, settle = settle_and_say, engine.sessions._settler._settle
    assert engine.sessions._settler._one(key, lambda: True)
    engine.sessions._settler._settle = settle
    assert engine.sessions._settler.waiting() == (key,)
    assert engine.sessions.settle() == 1
    assert engine.sessions.list()[0].settled
    assert not engine.sessions._settler._one(key, lambda: True), "another thread was faster"


def test_a_purge_is_not_followed_by_what_was_being_settled(scheduled: Engine) -> None:
    engine = scheduled
    engine.generate("word " * 1200, session="s", salt="a", max_new_tokens=4)
    key = engine.sessions._settler.waiting()[0]
    engine.flush()
    for entry in engine.pipeline.archive.contents.entries():  # all is to be computed again
        engine.remove(entry.id)
    engine.pipeline.pool.forget()
    asked = 0

    def purge_in_the_middle() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            engine.purge("a")
        return True

    assert not engine.sessions._settle(key, purge_in_the_middle)
    assert engine.sessions._settle(key, lambda: True)  # its record is gone
    engine.flush()
    assert asked == 2
    assert engine.pipeline.archive.contents.entries() == []
    assert engine.generate("word " * 1200, salt="a", max_new_tokens=1).cached_tokens == 0


def test_settling_makes_way_for_a_request_and_goes_on_later(scheduled: Engine) -> None:
    engine = scheduled
    engine.generate("word " * 200, session="s", max_new_tokens=4)
    key = engine.sessions._settler.waiting()[0]
    assert not engine.sessions._settle(key, lambda: False)
    assert not engine.sessions.list()[0].settled
    with engine.pipeline.activity:
        assert not engine.sessions._settler._idle(), "a request is under way"
    assert engine.sessions.settle() == 1
    assert engine.sessions.list()[0].settled
    result = engine.generate("next", session="s", max_new_tokens=4, trace=True)
    assert result.logits_digest == fresh(engine, history(engine)[:-1], max_new_tokens=4).logits_digest


@pytest.mark.host_memory("decoded KV is as good as prefilled by the lean decoder alone")
def test_what_is_decoded_needs_no_settling(engine: Engine) -> None:
    engine.generate("word " * 200, session="s", max_new_tokens=4)
    assert engine.sessions.waiting() == 0
    assert engine.sessions.list()[0].settled
    assert engine.sessions.settle() == 0


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


def test_unsettled_answers_are_reused_as_prefix_where_that_is_allowed(saved: Callable[..., Path]) -> None:
    settings = QUIET | {"attention": "model"}
    with Engine.from_pretrained(saved("llama"), **settings, reuse="prefix") as engine:
        session = engine.sessions.open("s", system=SYSTEM)
        first = session.say(SAID[0], max_new_tokens=12)
        engine.flush()
        second = session.say(SAID[1], max_new_tokens=12)
        assert second.exactness == "prefix"
        canonical = engine.pipeline.prompts.compiled(None, {"messages": history(engine)[:3]}).tokens.tolist()
        ran = first.prompt_tokens + len(first.token_ids) - 1
        if canonical[first.prompt_tokens : ran] == list(first.token_ids[:-1]):
            assert second.cached_tokens >= ran
        assert second.cached_tokens >= first.prompt_tokens
        session.settle()
        third = session.say(SAID[2], max_new_tokens=12)
        assert third.exactness == "exact"
        assert third.cached_tokens == third.last_cut
    with Engine.from_pretrained(saved("llama"), **settings) as engine:  # exact computes the answer again
        session = engine.sessions.open("s", system=SYSTEM)
        session.say(SAID[0], max_new_tokens=12)
        second = session.say(SAID[1], max_new_tokens=12, trace=True)
        assert (second.exactness, second.cached_tokens > 0) == ("exact", True)
        assert second.logits_digest == fresh(engine, history(engine)[:-1], max_new_tokens=12).logits_digest


@pytest.mark.slow
def test_as_generated_keeps_the_ids_that_were_run(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder, settings = saved("llama"), QUIET | {"store": tmp_path / "s", "session_tokens": "as_generated"}
    ran: list[int] = []
    unusual = 0
    for number, said in enumerate(SAID):
        with Engine.from_pretrained(folder, **settings) as engine:  # what was run outlives the process
            session = engine.sessions.open("s", system=SYSTEM)
            turn = engine.sessions.begin(said, {"session": "s"}, engine.pipeline.archive.epoch())
            ids = engine.pipeline.prompts.compile(_request(turn), 0).tokens.tolist()
            assert ids[: len(ran)] == ran
            result = session.say(said, max_new_tokens=8, temperature=1.5, seed=number, trace=True)
            assert result.tokens == ("as_generated" if number else "canonical")
            assert result.exactness == "exact"
            if engine.pipeline.grid.inside:
                assert result.cached_tokens == max(0, len(ran) - 1), "the last token was chosen, not run"
            else:
                assert result.cached_tokens == (result.last_cut if number else 0)
            ran = [*ids, *result.token_ids]
            canonical = engine.pipeline.tokenizer.encode(engine.pipeline.tokenizer.decode(ran), False)[0]
            unusual += canonical != ran
            cold = engine.generate(
                **turn.arguments, max_new_tokens=8, temperature=1.5, seed=number, trace=True, reuse="off"
            )
            assert cold.logits_digest == result.logits_digest
            if not engine.pipeline.grid.inside:
                session.settle()
    assert unusual >= 3, "a random model writes what no tokenizer would"


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


def test_hundreds_of_sessions_lie_on_disk_and_few_in_memory(engine: Engine) -> None:
    for n in range(200):
        engine.sessions.open(f"session {n}", system=f"{n}")
    assert len(engine.sessions.list()) == 200
    assert len(engine.sessions._paths) <= 32
    first = engine.sessions.open("session 0", system="0").say("hi", max_new_tokens=2)
    assert engine.sessions.list()[0].name == "session 0"
    assert engine.sessions.list()[0].tokens == first.prompt_tokens + 2
    assert engine.sessions.expire(3600) == 0
    assert engine.sessions.drop("session 0")
    assert not engine.sessions.drop("session 0")
    assert engine.sessions.expire(0) == 199
    assert engine.sessions.list() == ()
    assert not engine.sessions.records._kept.ask("SELECT * FROM nodes")


@pytest.mark.slow
def test_sessions_past_their_time_are_dropped_by_themselves(saved: Callable[..., Path], tmp_path: Path) -> None:
    settings = QUIET | {"store": tmp_path / "store"}
    with Engine.from_pretrained(saved("llama"), session_ttl=1.5, **settings) as engine:
        engine.sessions.open("old", system="one").say("hi", max_new_tokens=2)
        time.sleep(1.7)
        engine.sessions.open("new", system="two").say("hi", max_new_tokens=2)
        assert [info.name for info in engine.sessions.list()] == ["new"]
    time.sleep(1.7)
    with Engine.from_pretrained(saved("llama"), **settings) as engine:
        assert [info.name for info in engine.sessions.list()] == ["new"], "no ttl, no end"
    with Engine.from_pretrained(saved("llama"), session_ttl=1.5, **settings) as engine:
        assert engine.sessions.list() == ()


def test_dropping_one_leaves_what_others_hold(engine: Engine) -> None:
    session = engine.sessions.open("s", system=SYSTEM)
    session.say("one", max_new_tokens=2)
    fork = session.fork("fork")
    session.say("two", max_new_tokens=2)
    kept = fork.show().messages
    session.drop()
    engine.sessions._paths.clear()
    assert fork.show().messages == kept
    assert len(engine.sessions.records._kept.ask("SELECT * FROM nodes")) == 3


def test_a_salt_has_sessions_of_its_own_and_takes_them_along(engine: Engine, tmp_path: Path) -> None:
    secret = "the treasure lies under pier nine"
    for salt in ("a", "b"):
        engine.generate(secret + salt, session="s", salt=salt, max_new_tokens=2)
    engine.sessions.settle()
    assert engine.sessions.list() == ()
    assert [m["content"] for m in history(engine, salt="a")][:1] == [secret + "a"]
    assert engine.generate("next", session="s", salt="a", max_new_tokens=2).cached_tokens > 0
    with pytest.raises(ConfigError, match="no session 's'"):
        engine.sessions.show("s")
    engine.purge("a")
    stored = b"".join(path.read_bytes() for path in (tmp_path / "store" / FOLDER).iterdir())
    assert (secret + "a").encode() not in stored
    assert (secret + "b").encode() in stored
    with pytest.raises(ConfigError, match="no session"):
        engine.sessions.show("s", "a")
    assert engine.sessions.show("s", "b")


def test_an_encrypted_store_seals_its_sessions(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = saved("llama"), QUIET | {"store": tmp_path / "store"}
    monkeypatch.setenv("KEEPWARM_STORE_KEY", "ab" * 32)
    for _ in range(2):
        with Engine.from_pretrained(folder, **settings) as engine:
            engine.generate("an open secret", session="whose name", max_new_tokens=2)
            engine.sessions.settle()
            assert len(history(engine, "whose name")) in (2, 4)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            assert b"open secret" not in path.read_bytes()
            assert b"whose name" not in path.read_bytes()
    monkeypatch.setenv("KEEPWARM_STORE_KEY", "cd" * 32)
    with pytest.raises(StoreLocked):
        Engine.from_pretrained(folder, **settings)


def test_a_damaged_record_costs_a_miss_and_never_a_wrong_history(engine: Engine, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "one"}]
    first = engine.generate(messages=chat, session="s", max_new_tokens=3)
    engine.sessions.records._kept._db.execute("UPDATE nodes SET record = replace(record, 'harbour', 'airport')")
    engine.sessions._paths.clear()
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "two"}]
    result = engine.generate(messages=chat, session="s", max_new_tokens=3, trace=True)
    assert result.logits_digest == fresh(engine, chat, max_new_tokens=3).logits_digest


def test_a_damaged_file_is_moved_aside(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder, settings = saved("llama"), QUIET | {"store": tmp_path / "store"}
    with Engine.from_pretrained(folder, **settings) as engine:
        engine.generate("hi", session="s", max_new_tokens=2)
    path = tmp_path / "store" / FOLDER / FILE
    path.write_bytes(b"not a database" * 1000)
    with Engine.from_pretrained(folder, **settings) as engine:
        assert engine.sessions.list() == ()
        engine.generate("hi", session="s", max_new_tokens=2)
    assert len(list(path.parent.glob("damaged-*"))) == 1


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
        ({"session": 7}, "1 to 1000 characters"),
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
