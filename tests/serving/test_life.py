"""Starting, stopping, being killed."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.cli import Cli
from tests.helpers.processes import DEADLINE, ServerProcess, chat
from tests.helpers.services import weather

SYSTEM = [{"role": "system", "content": "You remember everything. " * 30}, {"role": "user", "content": "Do you?"}]
NAMES = {"KEEPWARM__SERVER__MODEL_NAMES": '["tiny"]'}


def talk(server: ServerProcess, messages: list[dict[str, str]]) -> dict[str, Any]:
    """One turn of a conversation that outlives the process."""
    body, headers = {"messages": messages, "max_new_tokens": 4}, {"x-session-id": "memory"}
    answer = httpx.post(f"{server.url}/query", json=body, headers=headers, timeout=DEADLINE)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.mark.slow
def test_killed_and_started_again_everything_is_there(tiny_model: Path, tmp_path: Path) -> None:
    first = ServerProcess(tiny_model, tmp_path / "store", environment=NAMES).listening()
    try:
        health = httpx.get(f"{first.url}/health", timeout=DEADLINE).json()
        assert health["status"] == "loading"  # it answers long before the model is there
        assert health["progress"]
        early = chat(first.url, "hi", model="tiny")
        assert early.status_code == 503
        assert int(early.headers["retry-after"]) >= 1
        claude = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        assert httpx.post(f"{first.url}/v1/messages", json=claude, timeout=DEADLINE).status_code == 529
        assert httpx.get(f"{first.url}/health/ready", timeout=DEADLINE).status_code == 503
        first.ready()
        made = httpx.post(
            f"{first.url}/tools", json={"name": "kept", "tools": [weather(words=20)]}, timeout=DEADLINE
        ).json()
        told = chat(first.url, "", model="tiny", messages=SYSTEM).json()
        spoken = [*SYSTEM, {"role": "assistant", "content": talk(first, SYSTEM)["answer"]}]
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:  # what a question computes is written in the background
            entries = httpx.get(f"{first.url}/v1/cache/entries", timeout=DEADLINE).json()["entries"]
            blocks = httpx.get(f"{first.url}/status", timeout=DEADLINE).json()["engine"]["blocks"]
            if len(entries) >= 2 and blocks["disk"] == blocks["ram"]:
                break
            time.sleep(0.05)
    finally:
        first.kill()
    second = ServerProcess(tiny_model, tmp_path / "store", environment=NAMES).ready()
    try:
        asked = {"tools": "kept", "query": "Rain?", "max_new_tokens": 2}
        answer = httpx.post(f"{second.url}/query", json=asked, timeout=DEADLINE).json()
        assert answer["cached_tokens"] >= made["prefix_tokens"] - 1
        assert answer["exactness"] == "exact"
        again = chat(second.url, "", model="tiny", messages=SYSTEM).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
        assert again["choices"] == told["choices"]
        assert [one["name"] for one in httpx.get(f"{second.url}/tools", timeout=DEADLINE).json()] == ["kept"]
        turn = talk(second, [*spoken, {"role": "user", "content": "Since when?"}])
        assert turn["cached_tokens"] > 50
        (session,) = httpx.get(f"{second.url}/v1/sessions", timeout=DEADLINE).json()["sessions"]
        assert (session["name"], session["turns"]) == ("memory", 2)
    finally:
        assert second.stop() == 0


@pytest.mark.slow
def test_a_stream_ends_in_order_when_the_service_stops(tiny_model: Path, tmp_path: Path) -> None:
    environment = NAMES | {"KEEPWARM__LIMITS__SHUTDOWN_GRACE": "0.3"}
    server = ServerProcess(tiny_model, tmp_path / "store", environment=environment).ready()
    body = {"model": "tiny", "messages": SYSTEM, "max_tokens": 1500, "temperature": 0, "stream": True}
    seen: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=DEADLINE) as stream:
            for line in stream.iter_lines():
                if line:
                    seen.append(line)
                if len(seen) > 3:
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(DEADLINE)
    assert server.stop() == 0
    reader.join(DEADLINE)
    assert not reader.is_alive()
    last = json.loads(seen[-1].removeprefix("data: ")) if seen[-1] != "data: [DONE]" else {}
    assert not last or "stopping" in last["error"]["message"]


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "no-model", tmp_path / "store")
    assert server.wait() == 3
    assert "no-model" in "\n".join(server.lines)


def test_a_public_address_without_keys_is_refused(cli: Cli) -> None:
    found = cli("serve", "--host", "0.0.0.0")
    assert found.code == 2
    assert "keepwarm keys add" in found.err


def test_keys_and_configuration_by_command(cli: Cli, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    made = cli("keys", "add", "acme", "--file", keys, "--limit", "tokens_per_day=1000", "--json").json
    assert made["key"].startswith(f"kw-{made['id']}-")
    assert made["key"] not in keys.read_text()
    plain = cli("keys", "add", "acme", "--file", keys, "--admin")
    assert plain.out.strip().startswith("kw-")
    listed = cli("keys", "list", "--file", keys, "--json").json
    assert [one["admin"] for one in listed] == [False, True]
    assert cli("keys", "revoke", made["id"], "--file", keys).code == 0
    assert len(cli("keys", "list", "--file", keys, "--json").json) == 1
    assert cli("keys", "add", "Bad Name", "--file", keys).code == 2
    config = tmp_path / "serve.toml"
    config.write_text(f'[server]\nhost = "0.0.0.0"\n[tenants]\nkeys_file = "{keys}"\n')
    assert cli("config", "check", "--config", config, "--json").json["server"]["host"] == "0.0.0.0"
    config.write_text("[server]\nprot = 1\n")
    bad = cli("config", "check", "--config", config)
    assert bad.code == 2
    assert "server.prot" in bad.err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    from tests.helpers.cli import cli as make

    found: Cli = make.__wrapped__(capsys, monkeypatch)  # type: ignore[attr-defined]
    return found
