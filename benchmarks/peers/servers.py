"""Many clients with one prefix: `keepwarm serve` beside vLLM's OpenAI server and llama.cpp's `llama-server`.

    python benchmarks/peers/servers.py [--servers keepwarm vllm llama.cpp] [--clients 16] [--rounds 3] [--new 32]

One server after another, alone on the machine: it starts with nothing cached, one request warms it, and then all
clients ask at the same moment, in each round something new about the same twenty tools. All get the same HTTP
requests, to `/v1/chat/completions`, streamed and greedy. Clocks are the clients', from the first byte sent; `cached` is
what the server itself reports of a prompt.

Each visit to a server adds one line to `servers.jsonl`, so that a run may be divided (`--servers vllm`) and repeated;
the table that is printed is of the whole file. Environments and model files are made by `environments.py`. Needs an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import environments

import keepwarm
from keepwarm.config import cache_dir
from keepwarm.runtime.demo_model import demo_model
from keepwarm.runtime.processor import cpu_flags

_STARTING, _ANSWERING = 400, 300  # seconds; vLLM compiles while it starts
_TOOLS = 20
_SUBJECTS = ("weather", "parcels", "invoices", "calendars", "tickets", "rooms", "trains", "meters", "permits", "loans")


@dataclass(frozen=True)
class Start:
    """How a server is started: all but the port, which is given as `--port`."""

    command: list[str]
    environment: dict[str, str]
    ready: str  # path that answers 200 once requests may come
    about: dict[str, Any]


def own(options: argparse.Namespace, folder: Path) -> Start:
    """Keepwarm, from the environment that runs the comparison, with a store of its own."""
    command = [sys.executable, "-m", "keepwarm.cli", "serve", "--model", str(demo_model(print))]
    about = {"keepwarm": keepwarm.__version__, "dtype": options.dtype}
    settings = {"KEEPWARM__ENGINE__DTYPE": options.dtype, "OMP_NUM_THREADS": str(options.threads)}
    return Start([*command, "--store", str(folder / "store")], settings, "/health/ready", about)


def vllm(options: argparse.Namespace, folder: Path, *more: str) -> Start:
    """vLLM's OpenAI server with prefix caching."""
    python = environments.vllm(options.work)
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(demo_model(print)),
        "--dtype",
        options.dtype,
        "--max-model-len",
        "4096",
        "--max-num-seqs",
        str(options.clients),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        *more,
    ]
    settings = environments.variables(python) | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(options.work / "vllm-cache"),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(options.threads),
    }
    mode = "eager" if "--enforce-eager" in more else "compiled"
    return Start(command, settings, "/health", {"made": environments.VLLM, "dtype": options.dtype, "mode": mode})


def vllm_eager(options: argparse.Namespace, folder: Path) -> Start:
    return vllm(options, folder, "--enforce-eager")


def llamacpp(options: argparse.Namespace, folder: Path) -> Start:
    """llama.cpp's server with a slot for every client."""
    program = environments.llama_server(options.work)
    command = [
        str(program),
        "--model",
        str(environments.gguf(options.work, options.gguf)),
        "--parallel",
        str(options.clients),
        "--ctx-size",
        str(4096 * options.clients),
        "--threads",
        str(options.threads),
        "--offline",
        "--no-ui",
    ]
    about = {"made": f"llama-server of {environments.LLAMACPP}", "dtype": options.gguf}
    return Start(command, {}, "/health", about)


SERVERS: dict[str, Callable[[argparse.Namespace, Path], Start]] = {
    "keepwarm": own,
    "vllm": vllm,
    "vllm-eager": vllm_eager,
    "llama.cpp": llamacpp,
}


def system_prompt() -> str:
    """Twenty tools as text, for servers render tools by templates of their own: about 3,000 tokens."""
    tools = []
    for number in range(_TOOLS):
        subject = _SUBJECTS[number % len(_SUBJECTS)]
        verb = ("find", "change")[number // len(_SUBJECTS)]
        fields = {
            name: {"type": "string", "description": f"{text} of the {subject} that the clerk is asked to {verb}."}
            for name, text in (("reference", "The number or name"), ("place", "Town and street"), ("day", "The date"))
        }
        tools.append({
            "name": f"{verb}_{subject}",
            "description": f"Call this to {verb} {subject} in the town's own register, and only when somebody at the "
            "counter asks for just that.",
            "parameters": {"type": "object", "properties": fields, "required": ["reference"]},
        })
    listed = "\n".join(json.dumps(tool) for tool in tools)
    return f"You are the clerk of a town hall. These are your tools, one a line:\n{listed}"


def chat(question: str, new: int, model: str) -> bytes:
    messages = [{"role": "system", "content": system_prompt()}, {"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": new, "temperature": 0, "stream": True}
    return json.dumps(body | {"stream_options": {"include_usage": True}}).encode()


def questions(count: int, number: int) -> list[str]:
    """Of one round; the same for every server."""
    return [
        f"{number}.{n}: write a long letter about {_SUBJECTS[(number + n) % len(_SUBJECTS)]}." for n in range(count)
    ]


def answer(port: int, body: bytes) -> dict[str, Any]:
    """One streamed answer: ms to the first text and to the end, and the usage that the server states."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=_ANSWERING)) as http:
        started = time.perf_counter()
        http.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = http.getresponse()
        lines = [(time.perf_counter(), line) for line in response]  # read now, understood when the clock has stopped
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {b''.join(line for _, line in lines)[:500]!r}")
    first, usage = 0.0, dict[str, Any]()
    for at, line in lines:
        if not line.startswith(b"data: {"):
            continue
        data = json.loads(line.removeprefix(b"data: "))
        usage = data.get("usage") or usage
        if not first and data["choices"] and data["choices"][0]["delta"].get("content"):
            first = at
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {
        "ttft": (first - started) * 1e3,
        "total": (lines[-1][0] - started) * 1e3,
        "prompt": usage["prompt_tokens"],
        "tokens": usage["completion_tokens"],
        "cached": cached,
    }


def play(port: int, asked: list[str], new: int, model: str) -> dict[str, Any]:
    """All clients at the same moment; one round's figures."""
    bodies = [chat(question, new, model) for question in asked]
    together = threading.Barrier(len(asked) + 1)

    def client(body: bytes) -> dict[str, Any]:
        together.wait()
        return answer(port, body)

    with ThreadPoolExecutor(len(asked)) as pool:
        waiting = [pool.submit(client, body) for body in bodies]
        together.wait()
        started = time.perf_counter()
        got = [each.result() for each in waiting]
        seconds = time.perf_counter() - started
    ttft = sorted(each["ttft"] for each in got)
    tokens = sum(each["tokens"] for each in got)
    pace = [(each["total"] - each["ttft"]) / max(1, each["tokens"] - 1) for each in got]
    return {
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "ttft_ms": {
            "p50": round(statistics.median(ttft), 1),
            "p90": round(ttft[int(len(ttft) * 0.9)], 1),
            "max": round(ttft[-1], 1),
        },
        "per_token_ms": round(statistics.median(pace), 1),
        "prompt_tokens": sum(each["prompt"] for each in got),
        "cached": sorted(each["cached"] or 0 for each in got),
    }


@contextmanager
def started(start: Start, log: Path) -> Iterator[int]:
    """The server's port, once it is ready. Raises RuntimeError when it does not get there."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*start.command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | start.environment,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + _STARTING
        while not _answers(port, start.ready):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"did not start: see {log}")
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int, path: str) -> bool:
    with suppress(OSError), closing(HTTPConnection("127.0.0.1", port, timeout=5)) as http:
        http.request("GET", path)
        return http.getresponse().status == 200
    return False


def model_of(port: int) -> str:
    with closing(HTTPConnection("127.0.0.1", port, timeout=_ANSWERING)) as http:
        http.request("GET", "/v1/models")
        return str(json.loads(http.getresponse().read())["data"][0]["id"])


def visit(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start one server, ask, stop it."""
    with tempfile.TemporaryDirectory() as folder:
        start = SERVERS[name](options, Path(folder))
        began = time.perf_counter()
        with started(start, options.work / f"server-{name}.log") as port:
            ready = time.perf_counter() - began
            model = model_of(port)
            warmed = answer(port, chat("0: say a colour.", 4, model))
            rounds = [
                play(port, questions(options.clients, number), options.new, model)
                for number in range(1, options.rounds + 1)
            ]
    flags = sorted(cpu_flags() & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    return {
        "server": name,
        **start.about,
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "machine": platform.machine(),
        "flags": flags,
        "threads": options.threads,
        "clients": options.clients,
        "ready_s": round(ready, 1),
        "first": {"ttft_ms": round(warmed["ttft"], 1), "prompt_tokens": warmed["prompt"], "cached": warmed["cached"]},
        "rounds": rounds,
    }


def table(visits: list[dict[str, Any]]) -> str:
    """Medians over visits: of the first round after the warming request, and of the rounds after it."""
    text = [
        "| server | visits | rounds | tokens/s | TTFT p50, ms | p90, ms | max, ms | ms a token | cached |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    kinds = dict.fromkeys((visit["server"], visit["dtype"]) for visit in visits)
    for server, dtype in kinds:
        own = [visit for visit in visits if (visit["server"], visit["dtype"]) == (server, dtype)]
        for label, part in (("first", slice(0, 1)), ("later", slice(1, None))):
            rounds = [each for visit in own for each in visit["rounds"][part]]
            if not rounds:
                continue
            cells = [statistics.median(each["tokens_per_s"] for each in rounds)]
            cells += [statistics.median(each["ttft_ms"][name] for each in rounds) for name in ("p50", "p90", "max")]
            cells += [statistics.median(each["per_token_ms"] for each in rounds)]
            shown = " | ".join(f"{cell:,.1f}" for cell in cells)
            cached = sum(sum(each["cached"]) for each in rounds) / sum(each["prompt_tokens"] for each in rounds)
            text.append(f"| {server}, {dtype} | {len(own)} | {label} | {shown} | {cached:.1%} |")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="*", choices=SERVERS, default=["keepwarm", "vllm", "llama.cpp"])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--gguf", choices=("float32", "bfloat16", "float16"), default="float16", help="llama.cpp's")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=cache_dir() / "peers", help="environments, model files, logs")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "servers.jsonl")
    options = parser.parse_args()
    options.work = options.work.expanduser().resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.servers:
        try:
            found = visit(name, options)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{name} left out: {error}", file=sys.stderr)
            failed += 1
            continue
        with options.output.open("a") as out:
            print(json.dumps(found), file=out)
    if options.output.exists():
        print(table([json.loads(line) for line in options.output.read_text().splitlines()]))
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)  # a comparison that lacks a server is told as a failure
