"""What the service adds to a hit, and how it holds up under load, on one machine.

    python benchmarks/serve.py [--model demo] [--prefix 2048] [--hits 40] [--clients 16] [--new 32] [--seconds 20]
                               [--output benchmarks/results]

Writes `serve.jsonl`: the machine, then one line per part.

* `overhead`: one client, one request after another, each a new question after a warm prefix. Every streamed answer says
  what time to first token the engine itself measured (from the request's submission to its batch); the client's own
  clock, from the first byte sent to the first text received, minus that is the overhead. `direct` is
  `Engine.generate` on the same prompts in this process, before the server starts.
* `load`: `--clients` clients at once on the prefix; tokens per second over all, and what `/health` took meanwhile.

Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx2 as httpx
from tests.helpers.processes import ServerProcess

import keepwarm

WORDS = [
    "clerk",
    "form",
    "noon",
    "ledger",
    "harbour",
    "stamp",
    "seal",
    "parcel",
    "queue",
    "counter",
    "window",
    "bell",
    "ink",
    "quill",
    "map",
]
TIMEOUT = 300


def system_prompt(tokens: int) -> str:
    """About so many tokens: nine to a rule."""
    rules = (f"Rule {n}: file form {n * 37 % 1009} with the {WORDS[n % len(WORDS)]}." for n in range(10_000))
    return "\n".join(next(rules) for _ in range(tokens // 13))


def questions(count: int, seed: int) -> Iterator[str]:
    """One by one: a list of many, for every client, held up the loop that times `/health` beside them."""
    return (f"Which rule names the {WORDS[n % len(WORDS)]} number {seed * 1000 + n}?" for n in range(count))


def chat(system: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "p90": percentile(values, 0.9), "p99": percentile(values, 0.99)}
    return {name: round(value, 3) for name, value in (found | {"max": max(values)}).items()}


def direct(model: str, system: str, hits: int) -> dict[str, Any]:
    """The engine alone."""
    with keepwarm.Engine.from_pretrained(model, dtype="bfloat16") as engine:
        engine.warm(messages=[{"role": "system", "content": system}])
        times = []
        for question in questions(hits, 1):
            result = engine.generate(messages=chat(system, question), max_new_tokens=2)
            times.append(result.ttft_ms)
        return {"ttft_ms": spread(times), "prompt_tokens": result.prompt_tokens, "cached_tokens": result.cached_tokens}


def first_text(http: HTTPConnection, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Milliseconds to the first text as this client sees it, and what the answer says of itself."""
    started = time.perf_counter()
    seen, told = 0.0, {}
    sent = json.dumps(body | {"stream": True}).encode()
    http.request("POST", "/v1/chat/completions", sent, {"content-type": "application/json"})
    for line in http.getresponse():
        if not line.startswith(b"data: {"):
            continue
        data = json.loads(line.removeprefix(b"data: "))
        if not seen and data["choices"][0]["delta"].get("content"):
            seen = (time.perf_counter() - started) * 1e3
        told = data.get("keepwarm", told)
    return seen, told


def overhead(url: str, model: str, system: str, hits: int) -> dict[str, Any]:
    """One client's hits."""
    body = {"model": model, "temperature": 0, "max_tokens": 2}
    added, engine, client = [], [], []
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT)) as http:
        for number, question in enumerate(questions(hits + 5, 2)):
            seen, told = first_text(http, body | {"messages": chat(system, question)})
            if number >= 5 and seen:  # the first ones warm the prefix and the connection
                client.append(seen)
                engine.append(told["ttft_ms"])
                added.append(seen - told["ttft_ms"])
    return {"overhead_ms": spread(added), "engine_ttft_ms": spread(engine), "client_ttft_ms": spread(client)}


async def load(url: str, model: str, system: str, clients: int, new: int, seconds: float) -> dict[str, Any]:
    """Many clients, and the health probe beside them."""
    health: list[float] = []
    tokens = 0
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients + 2)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as http:

        async def client(number: int) -> None:
            nonlocal tokens
            for question in questions(100_000, 10 + number):
                if time.monotonic() > until:
                    return
                body = {"model": model, "temperature": 0, "max_tokens": new, "messages": chat(system, question)}
                answer = await http.post("/v1/chat/completions", json=body)
                tokens += answer.json()["usage"]["completion_tokens"]

        async def probe() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as own:
                await own.get("/health")  # connects
                while time.monotonic() < until:
                    started = time.perf_counter()
                    await own.get("/health")
                    health.append((time.perf_counter() - started) * 1e3)
                    await asyncio.sleep(0.02)

        started = time.perf_counter()
        await asyncio.gather(probe(), *(client(number) for number in range(clients)))
        took = time.perf_counter() - started
    return {
        "clients": clients,
        "tokens_per_s": round(tokens / took, 1),
        "health_ms": spread(health),
        "probes": len(health),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the service adds to a hit.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--hits", type=int, default=40)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    system = system_prompt(given.prefix)
    given.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "keepwarm": keepwarm.__version__,
            "model": given.model,
            "when": time.strftime("%Y-%m-%d"),
        },
        {"part": "direct", **direct(given.model, system, given.hits)},
    ]
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(
            given.model, Path(folder) / "store", "--dtype", "bfloat16", "--log-format", "text"
        ).ready()
        try:
            name = httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT).json()["data"][0]["id"]
            rows.append({"part": "overhead", **overhead(server.url, name, system, given.hits)})
            rows.append({
                "part": "load",
                **asyncio.run(load(server.url, name, system, given.clients, given.new, given.seconds)),
            })
        finally:
            server.stop()
    with (given.output / "serve.jsonl").open("w") as out:
        for row in rows:
            print(json.dumps(row), file=out)
            print(json.dumps(row))


if __name__ == "__main__":
    main()
