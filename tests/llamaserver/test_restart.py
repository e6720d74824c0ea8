"""A restart of the server loses nothing: its prompts are restored, and answers are those of the slot's own memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.helpers.llamaserver_hosts import Host, Keeping, prompt

HEAD = 300
NEW_CHAT = 8


@pytest.mark.parametrize("more", [(), ("--parallel", "1"), ("--kv-unified", "--cache-ram", "8"), ("-fa", "off")])
def test_an_answer_after_a_restart_is_that_of_the_slot(
    host: Callable[..., Host], keep: Callable[..., Keeping], more: tuple[str, ...]
) -> None:
    server = host("llama", *more)
    keeping = keep(server)
    head = prompt(HEAD, 1)
    assert keeping.ask([*head, 5, 6, 7]).cached == 0
    keeping.saved()
    in_memory = keeping.ask([*head, 8, 9, 10, 11])
    assert (in_memory.cached, in_memory.restored) == (HEAD, 0)
    keeping.settled()
    server.restart()
    again = keeping.ask([*head, 8, 9, 10, 11])
    assert (again.cached, again.restored) == (HEAD, HEAD)
    assert again.told == in_memory.told


def test_a_conversation_goes_on_after_both_were_started_anew(
    host: Callable[..., Host], keep: Callable[..., Keeping]
) -> None:
    server = host()
    keeping = keep(server)
    ids = prompt(HEAD, 2)
    first = keeping.ask(ids)
    keeping.saved()
    keeping.stop()
    server.restart()
    keeping = keep(server)
    said = [each["id"] for each in first.told]
    turn = keeping.ask(ids + said + [7, 8, 9])
    assert turn.restored == len(ids) + len(said) - 1  # the last token of an answer is not evaluated


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_a_state_that_cannot_be_cut_is_continued(
    host: Callable[..., Host], keep: Callable[..., Keeping], kind: str
) -> None:
    server = host(kind)
    keeping = keep(server)
    assert "cannot be cut" in keeping.said["model"]
    ids = prompt(HEAD, 3)
    first = keeping.ask(ids)
    keeping.saved()
    turn = ids + [each["id"] for each in first.told] + [7, 8, 9]
    in_memory = keeping.ask(turn)
    assert (in_memory.restored, in_memory.cached) == (0, HEAD + len(first.told) - 1)
    keeping.settled()
    server.restart()
    again = keeping.ask(turn)
    assert again.restored == again.cached == HEAD + len(first.told) - 1
    assert again.told == in_memory.told


def test_windows_are_not_kept_and_that_is_said(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    keeping = keep(host("gemma3"))
    assert "nothing is kept" in keeping.said["model"]
    assert "checkpoints" in keeping.said["model"]
    ids = prompt(HEAD, 4)
    assert keeping.ask([*ids, 5]).cached == 0
    assert keeping.ask([*ids, 6, 7]).cached == HEAD  # requests go to the slot with their beginning all the same


def test_requests_go_to_the_slot_with_their_beginning(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    keeping = keep(host("llama", "--parallel", "3"))
    heads = [prompt(HEAD, seed) for seed in (10, 11, 12)]
    slots = [keeping.ask([*head, 5]).slot for head in heads]
    assert len(set(slots)) == 3
    for head, slot in reversed([*zip(heads, slots, strict=True)]):
        again = keeping.ask([*head, 6, 7])
        assert (again.slot, again.cached, again.restored) == (slot, HEAD, 0)


def test_a_prompt_that_lost_its_slot_is_restored(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    keeping = keep(host("llama", "--parallel", "1"))
    one, two = prompt(HEAD, 20), prompt(HEAD, 21)
    for number, head in enumerate((one, two), 1):
        keeping.ask([*head, 5])
        keeping.saved(number)
    assert keeping.ask([*one, 6, 7]).restored == HEAD


def test_chats_and_streams_are_passed_on(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    server = host("llama", "--chat-template", "chatml")
    keeping = keep(server)
    messages = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "w1 w2"}]
    body = {"messages": messages, "max_tokens": NEW_CHAT, "temperature": 0}
    whole = keeping.post("/v1/chat/completions", body).json()
    keeping.saved()
    keeping.settled()
    server.restart()
    streamed = keeping.post("/v1/chat/completions", body | {"stream": True})
    assert int(streamed.headers["x-keepwarm-restored"]) == whole["usage"]["prompt_tokens"] - 1
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(line)["choices"] for line in lines]
    text = "".join(part[0]["delta"].get("content") or "" for part in parts if part)
    assert text == whole["choices"][0]["message"]["content"]
    assert keeping.get("/v1/models").json()["data"]
    assert streamed.text.rstrip().endswith("[DONE]")


def test_a_router_has_slots_by_model(
    host: Callable[..., Host], keep: Callable[..., Keeping], model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name, seed in (("one", 0), ("two", 1)):
        (folder / f"{name}.gguf").write_bytes(model("llama", seed).read_bytes())
    server = host("llama", "--models-dir", str(folder))
    keeping = keep(server)
    ids = prompt(HEAD, 30)
    cold = {name: keeping.ask([*ids, 5], model=name) for name in ("one", "two")}
    assert [each.cached for each in cold.values()] == [0, 0]
    assert cold["one"].told != cold["two"].told
    keeping.saved(2)
    keeping.settled()
    server.restart()
    for name in ("one", "two"):
        assert keeping.ask([*ids, 6, 7], model=name).restored == HEAD


def test_many_clients_at_once(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    keeping = keep(host("llama", "--parallel", "3"))
    heads = [prompt(HEAD, seed) for seed in range(40, 44)]
    with ThreadPoolExecutor(8) as clients:
        answers = [*clients.map(lambda n: keeping.ask([*heads[n % 4], n]), range(3, 35))]
    assert {each.status for each in answers} == {200}
    keeping.settled()
    assert not [name for name in keeping.counts if "failures" in name]
    again = [keeping.ask([*head, 99]) for head in heads]
    assert [each.cached for each in again] == [HEAD] * 4


def test_slots_that_share_one_cache_make_room(host: Callable[..., Host], keep: Callable[..., Keeping]) -> None:
    keeping = keep(host("llama", "--kv-unified", "--ctx-size", "768"))
    long, short, other = prompt(400, 50), prompt(200, 51), prompt(400, 52)
    for number, ids in enumerate((long, short, other), 1):
        keeping.ask(ids)
        keeping.saved(number)
        keeping.settled()
    assert keeping.ask([*long, 5, 6]).restored == 400  # not in the slot of `other`, which is newer
    assert "restore_failures" not in keeping.counts
