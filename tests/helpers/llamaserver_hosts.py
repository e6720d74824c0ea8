"""A llama-server and `keepwarm slots` as processes of their own, and what is asked of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

NEW = 6
_LONG = 60.0
SRC = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Answer:
    """`told` has every token with its likeliest ones and their log-probabilities."""

    status: int
    told: Any
    cached: int
    restored: int | None
    slot: str | None


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def prompt(count: int, seed: int) -> list[int]:
    """Token ids at random."""
    return [int(each) for each in np.random.default_rng(seed).integers(3, 459, count)]


def wait(found: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + _LONG
    while not (value := found()):
        assert time.monotonic() < until, what
        time.sleep(0.02)
    return value


@dataclass
class Client:
    """Asks one port."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=_LONG)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=_LONG)

    def ask(self, ids: Sequence[int], key: str = "", **more: Any) -> Answer:
        body = {"prompt": [*ids], "n_predict": NEW, "temperature": 0, "n_probs": 5} | more
        got = self.post("/completion", body, **({"authorization": f"Bearer {key}"} if key else {}))
        found = got.json()
        restored = got.headers.get("x-keepwarm-restored")
        return Answer(
            got.status_code,
            found.get("completion_probabilities"),
            found.get("timings", {}).get("cache_n", -1),
            None if restored is None else int(restored),
            got.headers.get("x-keepwarm-slot"),
        )


@dataclass
class Host(Client):
    """A llama-server. It can be started anew, at the same port."""

    command: list[str]
    slots: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def is_up() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, "llama-server ended"
            with suppress(httpx.HTTPError):
                return self.get("/health").status_code == 200
            return False

        wait(is_up, "llama-server does not answer")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        self.stop()
        self.start()


@contextmanager
def llama_server(program: Path, model: Path, slots: Path, *more: str) -> Iterator[Host]:
    """Options in `more` win over these; a `--models-dir` is a router's."""
    port = free_port()
    command = [str(program), "--port", str(port), "--slot-save-path", str(slots), "--threads", "1", "--offline"]
    command += [] if "--models-dir" in more else ["--model", str(model)]
    command += ["--no-ui", "--ctx-size", "2048", "--parallel", "2", "--cache-ram", "0", *more]
    host = Host(port, command, slots)
    try:
        host.start()
        yield host
    finally:
        host.stop()


@dataclass
class Keeping(Client):
    """`keepwarm slots`."""

    process: subprocess.Popen[str]

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.get("/keepwarm/stats").json()["counts"])

    @property
    def said(self) -> dict[str, str]:
        return dict(self.get("/keepwarm/stats").json()["models"])

    def saved(self, count: int = 1) -> None:
        """Wait until so many slots are in the store."""
        wait(lambda: self.counts.get("saves", 0) >= count, f"fewer than {count} saves: {self.counts}")

    def settled(self) -> None:
        """Wait until nothing is left to do after answers."""
        wait(lambda: not self.get("/keepwarm/stats").json()["unfinished"], "answers are not saved")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextmanager
def keeping(host: Host, store: Path, *more: str) -> Iterator[Keeping]:
    port = free_port()
    command = [sys.executable, "-m", "keepwarm.cli", "slots", "--server", host.url, "--slot-path", str(host.slots)]
    command += ["--store", str(store), "--port", str(port), "--max-disk", "64MiB", *more]
    environment = os.environ | {"PYTHONPATH": str(SRC), "KEEPWARM_CACHE": str(store.parent / "cache")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    found = Keeping(port, process)

    def is_up() -> bool:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        with suppress(httpx.HTTPError):
            return found.get("/keepwarm/stats").status_code == 200
        return False

    try:
        wait(is_up, "keepwarm slots does not answer")
        yield found
    finally:
        found.stop()
