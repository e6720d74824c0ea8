"""The records of sessions on disk: many, old, sealed, damaged, of several salts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.conversing import QUIET, SYSTEM, fresh, history

from keepwarm import Engine
from keepwarm.errors import ConfigError, StoreLocked
from keepwarm.store.admin.conversations import FILE, FOLDER


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
    with Engine.from_pretrained(saved("llama"), session_ttl=4.0, **settings) as engine:
        engine.sessions.open("old", system="one").say("hi", max_new_tokens=2)
        time.sleep(4.2)
        engine.sessions.open("new", system="two").say("hi", max_new_tokens=2)
        assert [info.name for info in engine.sessions.list()] == ["new"]
    time.sleep(4.2)
    with Engine.from_pretrained(saved("llama"), **settings) as engine:
        assert [info.name for info in engine.sessions.list()] == ["new"], "no ttl, no end"
    with Engine.from_pretrained(saved("llama"), session_ttl=4.0, **settings) as engine:
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


@pytest.mark.slow
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
