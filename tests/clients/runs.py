"""Runs of a client in an environment of its own, and what the server says of the requests that it sent."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from tests.clients.clients import Client
from tests.helpers.processes import DEADLINE, ServerProcess

from keepwarm.cli.agents import Endpoint

SECONDS = 400.0  # of one run
_PROJECT = {
    "README.md": "# Sums\n\nAdds numbers.\n",
    "sums.py": "def add(a, b):\n    return a + b\n",
    "handbook.txt": "You are the clerk of a harbour. Be brief.\n"  # what the SDKs' programs send as a system prompt
    + "".join(
        f"Pier {n}: boats up to {n * 7 % 40} metres, keeper {n * 37 % 1009}, closes at {n % 12}.\n" for n in range(120)
    ),
}
_NOWHERE = "http://127.0.0.1:9"  # a proxy that is not there, where the machine's network cannot be left out


@dataclass
class Run:
    """What one start of a client sent and printed."""

    code: int | None  # None: it did not end in time
    output: str
    answers: list[dict[str, Any]]  # `/v1/cache/recent`, in order
    refused: list[dict[str, Any]]  # lines of the server's log

    @property
    def main(self) -> dict[str, Any]:
        """The first answer of the conversation: agents also ask for titles and the like, which are shorter."""
        most = max(answer["prompt_tokens"] for answer in self.answers)
        return next(answer for answer in self.answers if 2 * answer["prompt_tokens"] > most)


class Place:
    """An empty home and a small project, at the same paths every time, and the programs of one client."""

    def __init__(self, folder: Path, installed: Path, alone: bool) -> None:
        self.home, self.project = folder / "home", folder / "project"
        self.installed, self.alone = installed, alone
        self.fresh()

    def fresh(self) -> None:
        """Forget all that the client wrote."""
        for path, files in ((self.home, {}), (self.project, _PROJECT)):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            for name, text in files.items():
                (path / name).write_text(text)

    def environment(self) -> dict[str, str]:
        """Nothing of this machine's but the path of its programs: no keys, no proxies, no configuration."""
        programs = [self.installed / "node_modules" / ".bin", self.installed / "venv" / "bin"]
        programs += [self.installed.parent / "node" / "node_modules" / ".bin"]
        path = [str(each) for each in programs if each.is_dir()] + ["/usr/local/bin", "/usr/bin", "/bin"]
        made = {"HOME": str(self.home), "PATH": os.pathsep.join(path), "LANG": "C.UTF-8", "TERM": "dumb"}
        made |= {"USER": "somebody", "SHELL": "/bin/sh"}
        if not self.alone:
            made |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _NOWHERE)
            made |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return made

    def run(self, client: Client, server: ServerProcess, question: str, then: bool = False) -> Run:
        """Ask a question, and wait until the client has ended and all its requests are answered."""
        endpoint = endpoint_of(server)
        before, lines = last(server), len(server.lines)
        command, told = client.command(self.installed, endpoint, question, then)
        code, output = ended(command, self.project, self.environment() | told)
        settle(server)
        refused = [line for line in logged(server.lines[lines:]) if (line.get("status") or 500) >= 400]
        return Run(code, output, recent(server, before), refused)


def ended(command: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """Run a command with nothing to read, and return its exit code and what it printed. It and its children end."""
    found = shutil.which(command[0], path=environment["PATH"]) or command[0]
    child = subprocess.Popen(
        [found, *command[1:]],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=SECONDS)
        return child.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        return None, output


def endpoint_of(server: ServerProcess) -> Endpoint:
    """What `keepwarm launch` would find out about a server."""
    name = httpx.get(f"{server.url}/v1/models", timeout=DEADLINE).json()["data"][0]["id"]
    window = httpx.get(f"{server.url}/status", timeout=DEADLINE).json()["max_request_tokens"]
    return Endpoint(server.url, name, window=window)


def recent(server: ServerProcess, after: int) -> list[dict[str, Any]]:
    found = httpx.get(f"{server.url}/v1/cache/recent", params={"after": after}, timeout=DEADLINE)
    return list(found.raise_for_status().json()["answers"])


def last(server: ServerProcess) -> int:
    return max((answer["number"] for answer in recent(server, 0)), default=0)


def settle(server: ServerProcess) -> None:
    """Wait until nothing is being answered: a client that has gone leaves requests behind."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until and httpx.get(f"{server.url}/status", timeout=DEADLINE).json()["requests"]:
        time.sleep(0.1)


def logged(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The log's lines of requests to the models."""
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in found if line.get("message") == "request" and line["path"].startswith("/v1/")]


def shown(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer's row: how much was reused, and what ended it."""
    row = {name: answer[name] for name in ("prompt_tokens", "cached_tokens", "ttft_ms")}
    row["reused"] = round(answer["cached_tokens"] / answer["prompt_tokens"], 4)
    if answer["missed_tokens"]:
        row["broke"] = {name: answer[f"miss_{name}"] for name in ("reason", "segment", "position")}
    return row


def machine() -> str:
    """The processor, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name}, {os.cpu_count()} cores"
