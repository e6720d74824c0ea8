"""A llama-server that is started twice: the second one's first answer is quick, since `keepwarm slots` kept its prompt.

python examples/llama_server_restart.py LLAMA_SERVER MODEL.gguf [STORE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

SERVER, KEEPWARM = "http://127.0.0.1:8090", "http://127.0.0.1:8091"
MANUAL = "You are the manual of a coffee machine. " + " ".join(
    f"Part {n} is cleaned every {n % 9 + 1} days and costs {n * 7 % 50} crowns." for n in range(60)
)


@contextmanager
def running(url: str, *command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                httpx.get(url, timeout=10).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def ask(question: str) -> None:
    chat = [{"role": "system", "content": MANUAL}, {"role": "user", "content": question}]
    body = {"messages": chat, "max_tokens": 12, "temperature": 0}
    started = time.perf_counter()
    answer = httpx.post(f"{KEEPWARM}/v1/chat/completions", json=body, timeout=600)
    seconds = time.perf_counter() - started
    found = answer.json()
    print(f"{question} -> {found['choices'][0]['message']['content']!r}")
    restored, prompt = answer.headers["x-keepwarm-restored"], found["usage"]["prompt_tokens"]
    print(f"  {restored} of {prompt} tokens from the store, {seconds:.2f} s")


def saved() -> None:
    """Wait until the answer is in the store."""
    while httpx.get(f"{KEEPWARM}/keepwarm/stats", timeout=10).json()["unfinished"]:
        time.sleep(0.05)


def main(program: str, model: str, store: str = "~/.cache/keepwarm/llama-server") -> None:
    with tempfile.TemporaryDirectory() as slots:
        server = [program, "--model", model, "--port", "8090", "--slot-save-path", slots]
        server += ["--parallel", "2", "--ctx-size", "16384", "--cache-ram", "0"]
        keep = [sys.executable, "-m", "keepwarm.cli", "slots", "--server", SERVER, "--port", "8091"]
        keep += ["--slot-path", slots, "--store", str(Path(store).expanduser())]
        with running(f"{KEEPWARM}/keepwarm/stats", *keep):
            for question in ("What does part 7 cost?", "How often is part 12 cleaned?"):
                with running(f"{SERVER}/health", *server):
                    ask(question)
                    saved()


if __name__ == "__main__":
    main(*sys.argv[1:])
