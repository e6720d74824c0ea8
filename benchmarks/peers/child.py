"""A peer's process, seen from the comparison: it runs while it is asked, and is stopped otherwise."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOADING, _ANSWERING = 1200, 600  # seconds; vLLM compiles while it loads


class PeerFailed(Exception):
    """The peer ended, or did not answer in time. The message has its last words."""


class Child:
    """One peer. Its process group is stopped from the end of `load` on, but for the length of `turn`."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = log
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or name == "keepwarm"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=inherited | environment,
                start_new_session=True,
            )
        self.about: dict[str, Any] = {}
        self.hits: list[str] = []
        self._warm = False  # whether it holds the prefix

    def load(self, **settings: Any) -> None:
        answer = self.ask("load", _LOADING, **settings)
        self.about, self.hits = answer["about"], answer["hits"]
        self._signal(signal.SIGSTOP)

    def turn(self, prompts: list[dict[str, Any]], new_tokens: int, *, cold: bool) -> dict[str, Any]:
        """A hit that is not counted (in the caches of the processor another peer's data lie), then a cold run, then
        each kind of hit with a prompt of its own."""
        self._signal(signal.SIGCONT)
        first, second, *rest = prompts
        if self._warm:
            self.ask("hit", kind=self.hits[0], prompt=first, new_tokens=2)
        row: dict[str, Any] = {"cold": self.ask("cold", prompt=second)["ttft"]} if cold else {}
        for number, (kind, prompt) in enumerate(zip(self.hits, rest, strict=False)):
            row[kind] = self.ask("hit", kind=kind, prompt=prompt, new_tokens=new_tokens) | {"prompt": number}
        if self.name == "keepwarm":
            row["machine"] = self.ask("machine")
        row["peak_bytes"] = self.ask("memory")["peak"]
        self._warm = True
        self._signal(signal.SIGSTOP)
        return row

    def awake(self, question: str, **details: Any) -> Any:
        """Ask between turns."""
        self._signal(signal.SIGCONT)
        answer = self.ask(question, **details)
        self._signal(signal.SIGSTOP)
        return answer

    def ask(self, question: str, seconds: float = _ANSWERING, **details: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"ask": question} | details).encode() + b"\n")
            ready, _, _ = select.select([process.stdout], [], [], seconds)
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, line = [process.stdout], b""
        if line:
            return json.loads(line)
        said = [words for words in self.log.read_text(errors="replace").splitlines() if words.strip()]
        why = "ended" if ready else f"gave no answer in {seconds:.0f} s"
        raise PeerFailed(f"{why} when asked for {question}: {said[-1] if said else 'no output'} (see {self.log})")

    def close(self) -> None:
        """End the process and all it started."""
        assert self._process.stdin is not None
        with suppress(subprocess.TimeoutExpired, ProcessLookupError, BrokenPipeError):
            self._signal(signal.SIGCONT)
            self._process.stdin.close()
            self._process.wait(20)
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)
