"""What fails ends no request: the request goes on without the cache. Failures are counted, and leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tests.helpers.llamaserver_hosts import Host, Keeping, keeping, llama_server, prompt
from tests.llamaserver.conftest import PROGRAM

HEAD = 300


def test_a_server_that_saves_no_slots(
    host: Callable[..., Host], model: Callable[..., Path], tmp_path: Path, running: ExitStack
) -> None:
    server = host()
    server.stop()
    at = server.command.index("--slot-save-path")
    del server.command[at : at + 2]
    server.start()
    front = running.enter_context(keeping(server, tmp_path / "store"))
    assert "--slot-save-path" in front.said["model"]
    ids = prompt(HEAD, 1)
    assert front.ask(ids).status == 200
    assert front.ask([*ids, 5, 6]).cached == HEAD


def test_a_server_that_saves_elsewhere(
    model: Callable[..., Path], tmp_path: Path, running: ExitStack, host: Callable[..., Host]
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    server = running.enter_context(llama_server(PROGRAM, model(), tmp_path / "there"))
    server.slots = tmp_path / "here"
    front = running.enter_context(keeping(server, tmp_path / "store"))
    assert f"--slot-save-path {tmp_path / 'here'}" in front.said["model"]
    assert front.ask(prompt(HEAD, 2)).status == 200


def test_a_server_that_is_not_there(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    server = host()
    front = keep(server)
    ids = prompt(HEAD, 3)
    front.ask(ids)
    front.saved()
    front.settled()
    server.stop()
    refused = front.post("/completion", {"prompt": ids})
    assert refused.status_code == 502
    assert "does not answer" in refused.json()["error"]["message"]
    server.start()
    assert front.ask([*ids, 5, 6]).restored == HEAD


def test_a_command_that_was_there_before_its_server(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    server = host()
    server.stop()
    front = keep(server)
    server.start()
    ids = prompt(HEAD, 4)
    front.ask(ids)
    front.saved()
    front.settled()
    server.restart()
    assert front.ask([*ids, 5, 6]).restored == HEAD


def test_a_folder_of_slots_that_is_gone(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    server = host()
    front = keep(server)
    ids = prompt(HEAD, 5)
    front.ask(ids)
    front.saved()
    front.settled()
    server.restart()
    moved = server.slots.rename(server.slots.with_name("moved"))
    assert (front.ask([*ids, 5, 6]).status, front.ask(prompt(HEAD, 6)).status) == (200, 200)
    front.settled()
    assert "nothing is kept" in front.said["model"]
    moved.rename(server.slots)


def test_a_folder_of_slots_that_fails_later(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    server = host("llama", "--parallel", "1")
    front = keep(server)
    ids = prompt(HEAD, 7)
    front.ask(ids)
    front.saved()
    server.slots.rename(server.slots.with_name("moved"))
    assert front.ask(prompt(HEAD, 8)).status == 200
    front.settled()
    assert front.counts["save_failures"] == 1
    assert front.ask([*ids, 5, 6]).status == 200
    assert front.counts["restore_failures"] == 1


def test_requests_that_are_not_kept(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    server = host()
    front = keep(server)
    ids = prompt(HEAD, 9)
    assert len(front.post("/completion", {"prompt": [ids, ids], "n_predict": 1}).json()) == 2
    assert front.ask(ids, cache_prompt=False).restored is None
    assert front.post("/completion", {"no": "prompt"}).status_code == server.post("/completion", {"no": 1}).status_code
    assert front.post("/completion", [1]).status_code >= 400
    assert front.get("/nothing/there").status_code == 404
    assert front.get("/slots").status_code == 403
    assert front.post("/slots/0?action=erase", {}).status_code == 403
    assert front.counts["unkept"] == 3
    front.settled()
    assert [*server.slots.iterdir()] == []


def test_callers_with_different_keys_are_apart(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    server = host("llama", "--parallel", "1")
    front = keep(server, "--tenants")
    ids = prompt(HEAD, 10)
    front.ask(ids, key="one")
    front.saved()
    front.settled()
    theirs = front.ask(ids, key="two")
    assert (theirs.cached, theirs.restored) == (0, 0)
    front.saved(2)
    assert front.ask([*ids, 5, 6], key="one").restored == HEAD
    narrower = front.ask([*ids, 5, 6], key="one", cache_salt="mine")
    assert (narrower.cached, narrower.restored) == (0, 0)
    assert front.post("/v1/messages", {}).status_code == 403


def test_a_wrong_key_gets_nothing_restored(
    host: Callable[..., Host], keep: Callable[..., Keeping], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "right")
    server = host("llama", "--api-key", "right", "--parallel", "1")
    front = keep(server, "--api-key-env", "THEIR_KEY")
    ids = prompt(HEAD, 11)
    front.ask(ids, key="right")
    front.saved()
    front.settled()
    server.restart()
    wrong = front.ask([*ids, 5, 6], key="wrong")
    assert (wrong.status, wrong.restored) == (401, None)
    assert front.ask([*ids, 5, 6], key="right").restored == HEAD


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(
    host: Callable[..., Host], keep: Callable[..., Keeping], stream: bool
) -> None:
    server = host("llama", "--parallel", "1")
    front = keep(server)
    body = {"prompt": prompt(HEAD, 12), "n_predict": 700, "stream": stream, "n_probs": 400, "ignore_eos": True}
    patience = httpx.Timeout(60, read=0.3)
    leaving = contextlib.suppress(httpx.TimeoutException)
    with leaving, httpx.stream("POST", f"{front.url}/completion", json=body, timeout=patience) as answer:
        next(answer.iter_lines())
    front.settled()
    assert front.ask(prompt(HEAD, 13)).status == 200
