"""Under scheduled arithmetic an answer is settled, computed as prefill, when nothing is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.conversing import QUIET, SAID, SYSTEM, fresh, history

from keepwarm import Engine


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
