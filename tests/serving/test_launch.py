"""`keepwarm launch`: agents reach a real service. Their programs are stand-ins, which note how they were started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.batches import until
from tests.helpers.cli import Cli, cli
from tests.helpers.processes import DEADLINE
from tests.helpers.services import Keyed

from keepwarm.cli.agents import AGENTS

__all__ = ["cli"]

NOTING = (  # what it was given, then what a test adds
    f"#!{sys.executable}\nimport json, os, signal, sys, time\n"
    "json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['NOTES'], 'w'))\n"
)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts stand-ins for all agents on PATH, each with some more lines."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.json"))
    monkeypatch.setenv("PATH", str(folder))

    def install(more: str) -> None:
        for agent in AGENTS.values():
            (folder / agent.program).write_text(NOTING + more)
            (folder / agent.program).chmod(0o755)

    return install


def noted(folder: Path) -> tuple[list[str], dict[str, str]]:
    arguments, environment = json.loads((folder / "notes.json").read_text())
    return arguments, environment


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def asks(agent: str, arguments: list[str], environment: dict[str, str]) -> tuple[str, str, dict[str, Any]]:
    """The address, the key and the body with which an agent that is told this asks its first question."""
    said = [{"role": "user", "content": "Hi"}]
    if agent == "claude":
        told = [int(environment[f"CLAUDE_CODE_MAX_{name}_TOKENS"]) for name in ("CONTEXT", "OUTPUT")]
        assert told == [2048, 1024], "the server tells its window"
        body = {"model": environment["ANTHROPIC_MODEL"], "messages": said, "max_tokens": 1}
        return f"{environment['ANTHROPIC_BASE_URL']}/v1/messages", environment["ANTHROPIC_AUTH_TOKEN"], body
    if agent == "codex":
        given = [value for flag, value in pairwise(arguments) if flag == "-c"]
        settings = tomllib.loads("\n".join(given))
        provider = settings["model_providers"][settings["model_provider"]]
        assert provider["wire_api"] == "responses"
        body = {"model": settings["model"], "input": "Hi", "max_output_tokens": 1}
        return f"{provider['base_url']}/responses", environment[provider["env_key"]], body
    if agent == "opencode":
        settings = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
        provider, _, model = settings["model"].partition("/")
        options = settings["provider"][provider]["options"]
        limit = settings["provider"][provider]["models"][model]["limit"]
        assert limit["context"] == 2048, "the server tells its window"
        address, key = options["baseURL"], options["apiKey"]
    elif agent == "aider":
        model = arguments[arguments.index("--model") + 1].removeprefix("openai/")
        address, key = environment["OPENAI_API_BASE"], environment["OPENAI_API_KEY"]
    else:
        assert arguments[:2] == ["--auth-type", "openai"]
        address, key, model = (environment[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
    return f"{address}/chat/completions", key, {"model": model, "messages": said, "max_tokens": 1}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_reaches_the_server_that_runs(
    agent: str, keyed: Keyed, cli: Cli, agents: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents("sys.exit(7)\n")
    monkeypatch.setenv("ACME_KEY", keyed.acme)
    for vendor in ("ANTHROPIC", "OPENAI"):  # the user's own key and address, which are not for this server
        monkeypatch.setenv(f"{vendor}_API_KEY", "my own")
        monkeypatch.setenv(f"{vendor}_BASE_URL", "https://my.own")
    result = cli("launch", "--url", f"{keyed.url}/v1", "--api-key-env", "ACME_KEY", agent, "--go", "-p", "do it")
    assert result.code == 7, result.err
    arguments, environment = noted(tmp_path)
    assert arguments[-3:] == ["--go", "-p", "do it"]
    vendor = {"claude": "ANTHROPIC", "qwen-code": "OPENAI", "aider": "OPENAI"}.get(agent)
    if vendor:
        assert environment.get(f"{vendor}_API_KEY") != "my own"
        assert environment[f"{vendor}_BASE_URL"].startswith(keyed.url)
    address, key, body = asks(agent, arguments, environment)
    answer = httpx.post(address, json=body, headers={"authorization": f"Bearer {key}"}, timeout=DEADLINE)
    assert answer.status_code == 200, answer.text

    shown = cli("launch", "--url", keyed.url, "--api-key-env", "ACME_KEY", "--print", agent, "--go")
    assert shown.code == 0
    assert keyed.acme not in shown.out
    assert "serve" not in shown.out
    *exports, command = shown.out.splitlines()
    assert shlex.split(command)[-1] == "--go"
    assert shlex.split(command)[0] == AGENTS[agent].program
    assert all(line.startswith(("export ", "unset ")) for line in exports)


def test_what_cannot_be_launched_is_refused(
    keyed: Keyed, cli: Cli, agents: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("ACME_KEY", keyed.acme)
    with_key = ("--url", keyed.url, "--api-key-env", "ACME_KEY")
    for arguments, code, said in (
        (("emacs",), 2, "known are qwen-code, opencode, codex, claude, aider"),
        (("--url", "there", "claude"), 2, "--url must look like"),
        (("--api-key-env", "NOT_SET_HERE", "claude"), 2, "NOT_SET_HERE"),
        (("--url", nowhere, "--model", "/no/such/model", "claude"), 3, "/no/such/model"),
        (("--url", f"{nowhere}/x", "claude"), 2, "can be started only at"),
        (("--url", keyed.url, "claude"), 1, "answered 401: name its key with --api-key-env"),
        ((*with_key, "--max-ram", "1GiB", "claude"), 2, "already: --max-ram apply"),
        ((*with_key, "--model", "other", "claude"), 2, "not 'other'"),
        ((*with_key, "claude"), 2, "claude is not installed: npm install -g @anthropic-ai/claude-code"),
    ):
        result = cli("launch", *arguments)
        assert (result.code, result.out) == (code, ""), result.err
        assert said in result.err
    shown = cli("launch", "--url", nowhere, "--model", "demo", "--max-ram", "1GiB", "--print", "aider")
    serve, *_, aider = shown.out.splitlines()
    assert f"serve --model demo --host 127.0.0.1 --port {nowhere.rpartition(':')[2]} --max-ram 1GiB &" in serve
    assert aider == "aider --model openai/demo"


@pytest.mark.slow
def test_a_server_is_started_for_the_agent_and_stopped_after_it(
    saved: Callable[..., Path], cli: Cli, agents: Callable[[str], None], tmp_path: Path
) -> None:
    agents(
        "from urllib.request import urlopen\n"
        "print(urlopen(os.environ['OPENAI_BASE_URL'] + '/models').read().decode(), file=open(sys.argv[-1], 'w'))\n"
    )
    url, model, told = f"http://127.0.0.1:{free_port()}", saved("llama"), tmp_path / "models.json"
    result = cli("launch", "--url", url, "--model", model, "--store", tmp_path / "store", "qwen-code", told)
    assert result.code == 0, result.err
    assert json.loads(told.read_text())["data"][0]["id"] == model.name
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    (model / "config.json").write_text("{")
    failed = cli("launch", "--url", url, "--model", model, "--store", tmp_path / "store", "qwen-code", told)
    assert failed.code == 1
    assert "before it was ready" in failed.err


@pytest.mark.slow
def test_who_ends_the_command_ends_what_it_started(
    saved: Callable[..., Path], agents: Callable[[str], None], tmp_path: Path
) -> None:
    agents("time.sleep(600)\n")
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "keepwarm.cli", "launch", "--url", url, "--model", str(saved("llama"))]
    path = os.pathsep.join(part for part in sys.path if part)
    with subprocess.Popen(
        [*command, "--store", str(tmp_path / "store"), "claude"], env=os.environ | {"PYTHONPATH": path}
    ) as child:
        until((tmp_path / "notes.json").exists)
        assert httpx.get(f"{url}/health").json()["status"] == "ready"
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE) == 128 + signal.SIGTERM
    time.sleep(0.1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
