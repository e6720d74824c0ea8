"""Real agents and SDKs against a real server with a real model (`make test-clients`); not among the other tests.

The whole run has no network but the loopback, where the machine can take it away (`unshare`). Elsewhere the clients are
given a proxy that is not there.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.clients.clients import Client
from tests.clients.runs import Place, machine
from tests.helpers.processes import ServerProcess

FOLDER = "KEEPWARM_CLIENTS"  # the variable with the folder of what is installed
MODEL = "qwen2.5-0.5b"

if FOLDER not in os.environ:
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="a file to which a line is added for every client")


def _alone() -> bool:
    """Whether there is no way out. A fresh network namespace has its loopback down: it is brought up here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        if [name for _, name in socket.if_nameindex()] == ["lo"]:
            up = struct.pack("16sH14x", b"lo", 1)  # IFF_UP
            fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
            return True
    return False


@pytest.fixture(scope="session")
def alone() -> bool:
    return _alone()


@pytest.fixture(scope="session")
def model() -> Path:
    """A model that the tests' machine has: its window must hold an agent's prompt."""
    if named := os.environ.get("KEEPWARM_CLIENTS_MODEL"):
        return Path(named)
    folder = Path(os.environ.get("KEEPWARM_DEV_MODELS", "~/.cache/keepwarm-dev/models")).expanduser() / MODEL
    if not (folder / "config.json").exists():
        pytest.skip(f"there is no {folder}: KEEPWARM_CLIENTS_MODEL names a model with a window of 32,768 tokens")
    return folder


@pytest.fixture(scope="session")
def installed() -> Callable[[Client], Path]:
    """Finds a client, or skips the test and says why it could not be installed."""

    def find(client: Client) -> Path:
        folder = Path(os.environ[FOLDER]).resolve()
        if (missing := folder / f"{client.name}.missing").exists():
            pytest.skip(f"{client.name} is not installed: {missing.read_text()}")
        if not (folder / client.name / "complete").exists():
            pytest.skip(f"{client.name} is not installed: make test-clients")
        return folder / client.name

    return find


@pytest.fixture
def place(tmp_path: Path, installed: Callable[[Client], Path], alone: bool) -> Callable[[Client], Place]:
    return lambda client: Place(tmp_path, installed(client), alone)


@pytest.fixture
def serving(model: Path, tmp_path: Path, alone: bool) -> Callable[[Client], Any]:
    """Starts a server on one store, as often as it is called. What it is told is a bound for answers."""
    told = {"HF_HUB_OFFLINE": "1"}
    if prompts := os.environ.get("KEEPWARM_CLIENTS_LOG"):
        told["KEEPWARM__LOG__PROMPTS"] = "true"

    @contextmanager
    def start(client: Client) -> Iterator[ServerProcess]:
        bound = {"KEEPWARM__LIMITS__MAX_NEW_TOKENS": str(client.longest)}
        process = ServerProcess(model, tmp_path / "store", environment=told | bound)
        try:
            yield process.ready()
        finally:
            assert process.stop() == 0
            if prompts:
                with Path(prompts).open("a") as file:
                    file.write("\n".join(process.lines) + "\n")

    return start


@pytest.fixture
def record(request: pytest.FixtureRequest, model: Path, alone: bool) -> Callable[..., None]:
    """Adds a line to `--record`, if it is given."""

    def add(client: Client, **row: Any) -> None:
        file = request.config.getoption("--record")
        about = {"client": client.name, "version": client.version, "model": model.name, "machine": machine()}
        about |= {"when": time.strftime("%Y-%m-%d"), "network": "loopback" if alone else "no proxy"}
        print(json.dumps(about | row))
        if file is not None:
            with file.open("a") as lines:
                lines.write(json.dumps(about | row) + "\n")

    return add
