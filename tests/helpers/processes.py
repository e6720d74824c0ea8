"""A real `keepwarm serve` in a process of its own."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

DEADLINE = 120.0  # seconds; for machines that do much else
_PATIENT = {"KEEPWARM__LIMITS__SHUTDOWN_TIMEOUT": "60"}  # what is queued is written there, too


def _end_with_parent() -> None:
    """In the new process: a test run that is killed must not leave a server behind. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class ServerProcess:
    """Starts, waits until ready, is stopped or killed. What it wrote to standard error is in `lines`."""

    def __init__(
        self, model: str | Path, store: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "keepwarm.cli", "serve", "--model", str(model), "--store", str(store)]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [*command, "--port", "0", *options],
            env=os.environ | _PATIENT | {"PYTHONPATH": paths} | dict(environment or {}),
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,
        )
        self.url = ""
        self._found = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(r"keepwarm serves (http://\S+)", line):
                self.url = found[1]
                self._found.set()
        self._found.set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def listening(self) -> ServerProcess:
        assert self._found.wait(DEADLINE), "the server says no address"
        assert self.url, "\n".join(self.lines)
        return self

    def ready(self) -> ServerProcess:
        self.listening()
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            if httpx.get(f"{self.url}/health", timeout=DEADLINE).json()["status"] == "ready":
                return self
            time.sleep(0.05)
        raise AssertionError("the server did not become ready:\n" + "\n".join(self.lines))

    def stop(self) -> int:
        """An orderly end; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        code = self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code


def chat(url: str, text: str, headers: Mapping[str, str] | None = None, **more: Any) -> httpx.Response:
    """One chat completion, greedy, of few tokens."""
    body = {"model": more.pop("model", None) or "demo", "messages": more.pop("messages", None) or _user(text)}
    body |= {"max_tokens": 4, "temperature": 0} | more
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE)


def _user(text: str) -> Sequence[dict[str, str]]:
    return [{"role": "user", "content": text}]
