"""Many clients at once on a real service: streams, whole answers, cancels, disconnects; all protocols.

Every answer that is not broken off must be the one that the same request gets alone. `/health` is asked all the while.
In the end nothing may be left: no request, no page of KV, no task; and memory must not have grown with the requests.

    python -m tests.stress.clients --clients 64 --seconds 120 --model demo \
        --output clients.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

PREFIXES = 4
QUESTIONS = 5
TOKENS = (2, 5, 9)
SETTLING = 60.0  # seconds in which everything must be given back


@dataclass
class Outcome:
    """What was seen."""

    answered: int = 0
    broken_off: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    rss_mb: list[float] = field(default_factory=list)  # after the first third, and at the end

    def to_dict(self) -> dict[str, Any]:
        times = sorted(self.health_ms)
        return {
            "answered": self.answered,
            "broken_off": self.broken_off,
            "refused": dict(self.refused),
            "wrong": len(self.wrong),
            "health": {
                "asked": len(times),
                "median_ms": round(statistics.median(times), 2),
                "p99_ms": round(times[int(len(times) * 0.99)], 2),
                "max_ms": round(times[-1], 2),
            },
            "left": self.left,
            "rss_mb": self.rss_mb,
        }


def requests(model: str) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies, greedy and seeded, over a few shared beginnings."""
    found: list[tuple[str, dict[str, Any]]] = []
    for prefix in range(PREFIXES):
        system = f"You are assistant number {prefix}. " + "You are careful and kind. " * (8 + 8 * prefix)
        for number in range(QUESTIONS):
            chat = [{"role": "user", "content": f"What is {number} times {prefix}?"}]
            count = TOKENS[number % len(TOKENS)]
            sampled = {"temperature": 1.0, "seed": number} if number == 1 else {"temperature": 0}
            whole = [{"role": "system", "content": system}, *chat]
            openai = {"model": model, "messages": whole, "max_tokens": count, **sampled}
            claude = {"model": model, "system": system, "messages": chat, "max_tokens": count, "temperature": 0}
            native = {"messages": whole, "max_new_tokens": count}
            found.append(("/v1/chat/completions", openai))
            found.append((("/v1/messages", claude), ("/query", native))[number % 2])
    return found


def text_of(path: str, body: Any) -> str:
    """An answer's text, whoever's shape it has."""
    if path == "/query":
        return str(body["answer"])
    if path == "/v1/messages":
        return "".join(block.get("text", "") for block in body["content"])
    return str(body["choices"][0]["message"]["content"])


def text_in(path: str, line: str) -> str:
    """The text in one line of a stream."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    data = json.loads(line.removeprefix("data: "))
    if path == "/query":
        return str(data.get("text", ""))
    if path == "/v1/messages":
        return str(data.get("delta", {}).get("text", ""))
    if "error" in data:
        raise AssertionError(line)
    return str(data["choices"][0]["delta"].get("content") or "")


async def hammer(
    url: str,
    pid: int,
    *,
    model: str,
    clients: int,
    seconds: float,
    seed: int = 0,
    headers: dict[str, str] | None = None,
) -> Outcome:
    """Run the clients for a while, and look at what they leave. Checks nothing."""
    outcome = Outcome()
    pool = requests(model)
    limits = httpx.Limits(max_connections=clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, headers=headers) as http:
        alone = []
        for path, body in pool:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            alone.append(text_of(path, answer.json()))
        before = (await http.get("/status")).json()
        until = time.monotonic() + seconds
        process = psutil.Process(pid)

        async def client(number: int) -> None:
            draw = random.Random(seed * 10_000 + number)
            while time.monotonic() < until:
                chosen = draw.randrange(len(pool))
                await one(http, draw, *pool[chosen], alone[chosen], outcome)

        async def probe() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=60) as own:
                await own.get("/health")
                while time.monotonic() < until:
                    started = time.perf_counter()
                    await own.get("/health")
                    outcome.health_ms.append((time.perf_counter() - started) * 1e3)
                    await asyncio.sleep(0.02)

        async def weigh() -> None:
            await asyncio.sleep(seconds / 3)
            outcome.rss_mb.append(round(process.memory_info().rss / 2**20, 1))

        await asyncio.gather(probe(), weigh(), *(client(number) for number in range(clients)))
        settled = time.monotonic() + SETTLING
        while True:
            status = (await http.get("/status")).json()
            outcome.left = {
                "requests": status["requests"],
                "running": status["batch"]["running"] + status["batch"]["waiting"] + status["batch"]["prefilling"],
                "pages": status["batch"]["pages"]["referenced"] + status["batch"]["pages"]["reserved"],
                "tasks": max(0, status["tasks"] - before["tasks"]),
            }
            if not any(outcome.left.values()) or time.monotonic() > settled:
                break
            await asyncio.sleep(0.1)
        outcome.rss_mb.append(round(process.memory_info().rss / 2**20, 1))
    return outcome


async def one(
    http: httpx.AsyncClient, draw: random.Random, path: str, body: dict[str, Any], expected: str, outcome: Outcome
) -> None:
    """One request: whole or streamed, to its end or broken off."""
    leaving = draw.random() < 0.3
    if draw.random() < 0.5:
        asking = asyncio.ensure_future(http.post(path, json=body))
        if leaving:
            await asyncio.sleep(draw.random() * 0.3)
            asking.cancel()
            outcome.broken_off += 1
            await asyncio.gather(asking, return_exceptions=True)
            return
        answer = await asking
        if answer.status_code != 200:
            outcome.refused[answer.status_code] += 1
            return
        text = text_of(path, answer.json())
    else:
        text, pieces = "", draw.randrange(6)
        async with http.stream("POST", path, json=body | {"stream": True}) as stream:
            if stream.status_code != 200:
                outcome.refused[stream.status_code] += 1
                return
            async for line in stream.aiter_lines():
                text += text_in(path, line)
                pieces -= bool(line)
                if leaving and pieces < 0:
                    outcome.broken_off += 1
                    return
    outcome.answered += 1
    if text != expected:
        outcome.wrong.append(f"{path} {body}: {text!r} is not {expected!r}")


def main() -> None:
    from tests.helpers.processes import ServerProcess

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file that a line with the outcome is added to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(given.model, Path(folder) / "store", "--log-format", "text").ready()
        name = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]
        outcome = asyncio.run(
            hammer(server.url, server.pid, model=name, clients=given.clients, seconds=given.seconds, seed=given.seed)
        )
        code = server.stop()
    told = {"clients": given.clients, "seconds": given.seconds, "model": given.model, "seed": given.seed}
    told |= {"when": time.strftime("%Y-%m-%d"), **outcome.to_dict(), "exit": code}
    print(json.dumps(told, indent=1))
    if given.output is not None:
        with given.output.open("a") as out:
            print(json.dumps(told), file=out)
    assert not outcome.wrong, outcome.wrong[:3]
    assert not any(outcome.left.values()), outcome.left


if __name__ == "__main__":
    main()
