"""What was under way when a salt was purged leaves nothing behind, whoever purged; what others had under way does."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.core.identity import salt_key
from keepwarm.errors import PurgedMeanwhile
from keepwarm.store import Archive

PROMPT = "The keeper of the lighthouse writes down every ship. " * 12
SECRET = "The password of the harbour is marmalade. " * 12
CHAT: list[dict[str, Any]] = [{"role": "system", "content": SECRET}, {"role": "user", "content": "Which one?"}]
DOCUMENTS = [SECRET + "And of the mole too.", "A second document about something else entirely. " * 8]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def opened(model: Any, tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines on one folder."""
    engines: list[Engine] = []

    def open_(of: Any = model, **settings: Any) -> Engine:
        fixed = {"store": tmp_path / "store", "step": 64, "min_step": 8, "settle_after": None}
        engines.append(Engine.from_pretrained((of, tokenizer), **fixed | settings))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


def purge_here(engine: Engine, folder: Path) -> None:
    engine.purge("mine")


def purge_elsewhere(engine: Engine, folder: Path) -> None:
    """As `keepwarm purge` does, over a catalogue and files of its own."""
    with Archive.open(folder, max_ram=0, max_disk=1 << 30) as archive:
        archive.purge(salt_key("mine"))


def purge_by_command(engine: Engine, folder: Path) -> None:
    command = [sys.executable, "-m", "keepwarm.cli", "purge", "--salt", "mine", "--store", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


ANYWHERE = pytest.mark.parametrize("purge", [purge_here, purge_elsewhere])
ELSEWHERE = pytest.mark.parametrize("purge", [pytest.param(purge_here, marks=pytest.mark.slow), purge_elsewhere])
Purge = Callable[[Engine, Path], None]


def traces(engine: Engine, folder: Path, text: str = "marmalade") -> list[str]:
    """Files that hold a text, or token ids of it, or KV under the salt."""
    ids = engine.pipeline.tokenizer.compile(text, special=False).ids
    needles = [text.encode(), ids.tobytes()]
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            content = str(path).encode() + path.read_bytes()
            found += [f"{path.name}: {needle!r}" for needle in needles if needle in content]
    return found


def check_gone(engine: Engine, folder: Path) -> None:
    engine.flush()
    assert traces(engine, folder) == []
    for arguments in ({"prompt": SECRET}, {"messages": CHAT}, {"prompt": "x", "documents": DOCUMENTS}):
        if "documents" in arguments:
            arguments = {"messages": CHAT[1:], "documents": DOCUMENTS}
        assert engine.explain(**arguments, salt="mine").cached_tokens == 0
    assert engine.pipeline.archive.contents.names() == {}


@pytest.mark.parametrize("purge", [purge_here, purge_elsewhere, pytest.param(purge_by_command, marks=pytest.mark.slow)])
def test_a_request_under_way_is_answered_and_not_stored(
    opened: Callable[..., Engine], tmp_path: Path, purge: Purge
) -> None:
    engine, folder = opened(), tmp_path / "store"
    mine = engine.stream(SECRET, salt="mine", max_new_tokens=6)
    theirs = engine.stream(PROMPT, salt="theirs", max_new_tokens=6)
    next(mine), next(theirs)
    purge(engine, folder)
    answer = [piece.result for piece in mine][-1]
    assert answer is not None
    assert len(answer.token_ids) == 6
    check_gone(engine, folder)
    list(theirs)
    engine.flush()
    assert engine.explain(PROMPT, salt="theirs").cached_tokens > 0, "nobody purged that one"
    again = engine.generate(SECRET, salt="mine", max_new_tokens=6)
    assert again.cached_tokens == 0
    assert again.token_ids == answer.token_ids
    engine.flush()
    assert engine.explain(SECRET, salt="mine").cached_tokens > 0, "what begins afterwards is stored"


@ANYWHERE
def test_what_a_process_holds_in_memory_is_not_met_again(
    opened: Callable[..., Engine], tmp_path: Path, purge: Purge
) -> None:
    engine, folder = opened(), tmp_path / "store"
    for salt in ("mine", "theirs"):
        engine.generate(SECRET, salt=salt, max_new_tokens=2)
    engine.flush()
    assert engine.explain(SECRET, salt="mine").cached_tokens > 0
    purge(engine, folder)
    longer = SECRET + PROMPT
    assert engine.generate(longer, salt="mine", max_new_tokens=2).cached_tokens == 0
    assert engine.generate(longer, salt="theirs", max_new_tokens=2).cached_tokens > 0


def test_a_request_that_begins_while_its_salt_is_purged_is_not_stored(
    opened: Callable[..., Engine], tmp_path: Path
) -> None:
    """It finds what is not removed yet, and continues that."""
    engine, other, folder = opened(), opened(), tmp_path / "store"
    engine.generate(SECRET, salt="mine", max_new_tokens=2)
    engine.flush()
    pieces: list[Any] = []

    def ask(_: frozenset[bytes]) -> None:
        pieces.append(other.stream(SECRET + PROMPT, salt="mine", max_new_tokens=2))
        next(pieces[0])

    engine.pipeline.on_purge.append(ask)
    engine.purge("mine")
    result = [piece.result for piece in pieces[0]][-1]
    assert result.cached_tokens > 0, "it was there yet"
    for each in (other, engine):
        check_gone(each, folder)
    assert other.generate(SECRET, salt="mine", max_new_tokens=2).cached_tokens == 0


@ELSEWHERE
def test_a_request_that_waits_for_its_turn_in_a_batch(
    opened: Callable[..., Engine], tmp_path: Path, purge: Purge
) -> None:
    engine, folder = opened(), tmp_path / "store"
    with Batcher(engine) as batcher:
        at = threading.Event()
        go_on = threading.Event()

        def listener(ticket: Any, piece: Any) -> None:
            at.set()
            go_on.wait(60)

        first = batcher.submit(SECRET, salt="mine", max_new_tokens=4, listener=listener)
        assert at.wait(60)
        second = batcher.submit(SECRET + PROMPT, salt="mine", max_new_tokens=4)
        purge(engine, folder)
        go_on.set()
        for ticket in (first, second):
            assert len(ticket.result(60).token_ids) == 4
        check_gone(engine, folder)
        assert batcher.submit(SECRET + PROMPT, salt="mine", max_new_tokens=1).result(60).cached_tokens == 0


@ELSEWHERE
def test_a_name_given_while_its_prompt_is_purged(opened: Callable[..., Engine], tmp_path: Path, purge: Purge) -> None:
    engine, folder = opened(), tmp_path / "store"
    epoch = engine.pipeline.archive.epoch()
    engine.warm(SECRET * 2, salt="mine")
    purge(engine, folder)
    tags = engine.pipeline.linked(engine.pipeline.prompts.compiled(SECRET, {"salt": "mine"})).tags
    engine.pipeline.archive.contents.name("marmalade", b"x" * 32, epoch, tags)
    check_gone(engine, folder)


@ELSEWHERE
@pytest.mark.parametrize("contexts", ["neutral", "any"])
def test_chunks_that_wait_to_be_learnt(
    opened: Callable[..., Engine], tmp_path: Path, purge: Purge, contexts: str
) -> None:
    engine, folder = opened(reuse="chunks", chunk_contexts=contexts), tmp_path / "store"
    mine = engine.stream(messages=CHAT[1:], documents=DOCUMENTS, salt="mine", max_new_tokens=4)
    next(mine)
    with engine.pipeline.chunks.busy():  # nothing is idle: what a request shows waits
        engine.generate(messages=CHAT[1:], documents=DOCUMENTS[:1], salt="mine", max_new_tokens=1)
        purge(engine, folder)
        list(mine)
    assert engine.pipeline.chunks.wait_until_idle(60)
    check_gone(engine, folder)


@ANYWHERE
def test_a_conversation_that_is_being_settled(opened: Callable[..., Engine], tmp_path: Path, purge: Purge) -> None:
    engine, folder = opened(tiny("gpt2")), tmp_path / "store"  # of scheduled arithmetic: what it generates is settled
    engine.generate(SECRET, session="s", salt="mine", max_new_tokens=4)
    key = engine.sessions._settler.waiting()[0]
    engine.flush()
    for entry in engine.pipeline.archive.contents.entries():  # all is to be computed again
        engine.remove(entry.id)
    asked = 0

    def purge_in_the_middle() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            purge(engine, folder)
        return True

    assert not engine.sessions._settle(key, purge_in_the_middle)
    assert engine.sessions._settle(key, lambda: True), "its record is gone"
    assert asked == 2
    check_gone(engine, folder)


@ELSEWHERE
def test_a_turn_that_is_being_answered(opened: Callable[..., Engine], tmp_path: Path, purge: Purge) -> None:
    engine, folder = opened(), tmp_path / "store"
    engine.generate("Good morning. " * 20, session="s", salt="mine", max_new_tokens=2)
    turn = engine.stream(SECRET, session="s", salt="mine", max_new_tokens=4)
    theirs = engine.stream("Good evening", session="s", salt="theirs", max_new_tokens=4)
    next(turn), next(theirs)
    purge(engine, folder)
    assert list(turn)[-1].result is not None
    list(theirs)
    assert engine.sessions.list("mine") == ()
    assert [info.turns for info in engine.sessions.list("theirs")] == [1]
    engine.sessions.settle()
    check_gone(engine, folder)
    assert traces(engine, folder, "Good morning.") == []
    engine.generate(SECRET, session="s", salt="mine", max_new_tokens=2)
    assert len(engine.sessions.show("s", "mine").messages) == 2, "what begins afterwards is a new conversation"


@ELSEWHERE
@pytest.mark.parametrize("what", ["fork", "edit", "open"])
def test_a_conversation_that_is_being_changed(
    opened: Callable[..., Engine], tmp_path: Path, purge: Purge, what: str
) -> None:
    engine, folder = opened(), tmp_path / "store"
    engine.generate(SECRET, session="s", salt="mine", max_new_tokens=4)
    kept = engine.sessions.records
    real = kept.save

    def save(*given: Any, **more: Any) -> None:  # between reading and writing
        purge(engine, folder)
        real(*given, **more)

    kept.save = save  # type: ignore[method-assign]
    sessions = engine.sessions
    changes: dict[str, Callable[[], object]] = {
        "fork": lambda: sessions.fork("s", "t", salt="mine"),
        "edit": lambda: sessions.edit("s", 0, SECRET, salt="mine"),
        "open": lambda: sessions.open("new", system=SECRET, salt="mine"),
    }
    with pytest.raises(PurgedMeanwhile):
        changes[what]()
    kept.save = real  # type: ignore[method-assign]
    assert engine.sessions.list("mine") == ()
    check_gone(engine, folder)


def test_without_a_folder_the_same(model: Any, tokenizer: Any) -> None:
    with Engine.from_pretrained((model, tokenizer), step=64, min_step=8, settle_after=None) as engine:
        engine.generate(SECRET, session="old", salt="mine", max_new_tokens=2)
        turn = engine.stream(SECRET, session="s", salt="mine", max_new_tokens=4)
        next(turn)
        engine.purge("mine")
        list(turn)
        engine.flush()
        assert engine.sessions.list("mine") == ()
        assert engine.explain(SECRET, salt="mine").cached_tokens == 0
