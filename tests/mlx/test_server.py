"""mlx-lm's own server over HTTP, started by our command: restarts, several clients, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

SYSTEM = " ".join(f"w{number * 7 % 290}" for number in range(120))


class Server:
    """A process with mlx-lm's server. Without a store it is mlx-lm's own command."""

    def __init__(self, model: Path, store: Path | None, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        program = ["-m", "mlx_lm", "server"]
        if store is not None:
            program = ["-m", "keepwarm.integrations.mlx.server", "--store", str(store), "--max-disk", "64MiB"]
        command = [sys.executable, *program, "--model", str(model), "--port", str(self._port), *options]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": PATH}
        )
        while self.process.poll() is None:
            try:
                urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
                break
            except (URLError, OSError):
                time.sleep(0.1)

    def ask(self, *said: str) -> tuple[str, int, int]:
        """Return the answer, and how many tokens of the prompt were kept, of how many."""
        messages = [{"role": "system", "content": SYSTEM}]
        messages += [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
        body = {"messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True}
        request = Request(
            f"http://127.0.0.1:{self._port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=180) as response:
            answer = json.load(response)
        (choice,) = answer["choices"]
        usage = answer["usage"]
        text = json.dumps([choice["message"]["content"], choice["logprobs"]])
        return text, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    def stop(self) -> str:
        """End it as a service manager does. Return what it logged."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=180)[1]


PATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH")]))


@pytest.fixture
def serve(model: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def one(store: bool = True, *options: str) -> Server:
        started.append(Server(model(), tmp_path / "store" if store else None, *options))
        return started[-1]

    yield one
    for server in started:
        server.stop()


def test_a_restarted_server_goes_on_where_it_was(serve: Callable[..., Server]) -> None:
    """The answers and their probabilities are those of mlx-lm's own server with its own cache."""
    own = serve(store=False)
    turns = [("w1 w2 w3",), ("w1 w2 w3", "w4", "w5 w6")]
    expected = [own.ask(*turn) for turn in turns]
    resident = own.ask(*turns[0])
    first = serve()
    assert [first.ask(*turn) for turn in turns] == expected
    assert first.stop().count("Traceback") == 0
    second = serve()
    text, cached, count = second.ask(*turns[0])
    assert (text, cached, count) == resident
    assert cached == count - 1
    text, cached, count = second.ask("w9 w1")  # another question behind the same system prompt
    assert 120 < cached < count
    assert text == own.ask("w9 w1")[0]


def test_clients_at_once_and_two_servers_over_one_store(serve: Callable[..., Server]) -> None:
    own, one, other = serve(store=False), serve(), serve()
    questions = [f"w{number} w{number + 1}" for number in range(0, 24, 3)]
    with ThreadPoolExecutor(8) as clients:
        answers = [*clients.map(lambda at: (one, other)[at % 2].ask(questions[at])[0], range(len(questions)))]
    assert [json.loads(text)[0] for text in answers] == [json.loads(own.ask(text)[0])[0] for text in questions]
    one.stop()
    other.stop()
    third = serve()
    for question in questions:
        _, cached, count = third.ask(question)
        assert count > cached > 120


def test_quantized_caches_are_kept_too(serve: Callable[..., Server]) -> None:
    options = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    first = serve(True, *options)
    first.ask("w1 w2")
    resident = first.ask("w1 w2")
    first.stop()
    assert serve(True, *options).ask("w1 w2") == resident


def test_what_cannot_be_served_ends_with_a_message(serve: Callable[..., Server], tmp_path: Path) -> None:
    for options, message in ((("--setting", "stor=x"), "known are store"), (("--max-ram", "much"), "max_ram")):
        server = serve(True, *options)
        assert server.process.wait(timeout=180) == 1
        assert message in server.stop()


def test_help_tells_both_kinds_of_options() -> None:
    command = [sys.executable, "-m", "keepwarm.integrations.mlx.server", "--help"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "--max-disk" in told
    assert "--prompt-cache-size" in told
