"""The worst requests that fit into the limits, from 8 clients, while another tenant asks short questions.

The bound: each short question is answered within a second of its quiet time, and SIGTERM ends the process within ten
seconds whatever it does. Every kind of body is tried by itself, then all at once.

    python -m tests.stress.crowding --questions 100 --output crowding.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
from tests.helpers.processes import ServerProcess
from tests.stress.bodies import Hostile, worst

from keepwarm.serving.tenancy.keys import add_key

CLIENTS = 8
BOUND = 1.0  # seconds beyond the quiet time
END = 10.0  # seconds from SIGTERM to the end
TIMEOUT = 120.0


class Crowd:
    """Clients that send bodies in turn, each the next one as soon as the last is answered."""

    def __init__(self, url: str, keys: Sequence[str], bodies: Sequence[Hostile]) -> None:
        self.answers: Counter[str] = Counter()
        self._url, self._keys, self._bodies = url, keys, bodies
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        await asyncio.sleep(0.5)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, number: int) -> None:
        headers = {"x-api-key": self._keys[number % len(self._keys)], "content-type": "application/json"}
        async with httpx.AsyncClient(base_url=self._url, timeout=None, headers=headers) as http:
            while True:
                hostile = self._bodies[number % len(self._bodies)]
                number += 1
                try:
                    answer = await http.post(hostile.path, content=hostile.body)
                    self.answers[f"{hostile.name}: {answer.status_code}"] += 1
                except httpx.HTTPError as error:
                    self.answers[f"{hostile.name}: {type(error).__name__}"] += 1
                    await asyncio.sleep(0.05)


async def asked(url: str, key: str, model: str, count: int, pause: float = 0.0) -> list[float]:
    """Seconds that each of some short questions took; a refusal counts as a day."""
    times = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, headers={"x-api-key": key}) as http:
        for number in range(count):
            question = [{"role": "user", "content": f"What is {number} plus {time.monotonic_ns() % 1000}?"}]
            started = time.perf_counter()
            try:
                body = {"model": model, "messages": question, "max_tokens": 4, "temperature": 0}
                good = (await http.post("/v1/chat/completions", json=body)).status_code == 200
            except httpx.HTTPError:
                good = False
            times.append(time.perf_counter() - started if good else 86_400.0)
            await asyncio.sleep(pause)
    return times


def told(times: Sequence[float], quiet: float) -> dict[str, Any]:
    return {
        "asked": len(times),
        "median_s": round(statistics.median(times), 3),
        "max_s": round(max(times), 3),
        "late": sum(one > quiet + BOUND for one in times),
    }


async def stopped(server: ServerProcess) -> float:
    """Seconds from SIGTERM to the end."""
    started = time.perf_counter()
    await asyncio.to_thread(server.stop)
    return time.perf_counter() - started


class Service:
    """A server with a tenant who asks and tenants who send."""

    def __init__(self, folder: Path, model: str, crowds: int) -> None:
        keys = folder / "keys.json"
        self.asking = add_key(keys, "asking")[1]
        self.crowd = [add_key(keys, f"crowd-{number}")[1] for number in range(crowds)]
        config = folder / "serve.toml"
        config.write_text(f'[server]\nmodel_names = ["served"]\n[tenants]\nkeys_file = "{keys}"\n')
        options = ("--config", str(config), "--log-format", "text")
        ends = {"KEEPWARM__LIMITS__SHUTDOWN_TIMEOUT": "4"}  # the default
        self.process = ServerProcess(model, folder / "store", *options, environment=ends).ready()
        self.url = self.process.url


async def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    service = Service(folder, given.model, given.crowds)
    bodies = [one for one in worst("served") if not given.kinds or one.name in given.kinds]
    quiet = statistics.median(await asked(service.url, service.asking, "served", 20))
    found: dict[str, Any] = {"quiet_s": round(quiet, 3)}
    for one in bodies if given.each else ():
        async with Crowd(service.url, service.crowd, [one]) as crowd:
            times = await asked(service.url, service.asking, "served", given.each, 0.05)
        found[one.name] = told(times, quiet) | {"answers": dict(crowd.answers)}
        print(one.name, len(one.body), found[one.name], flush=True)
    async with Crowd(service.url, service.crowd, bodies) as crowd:
        times = await asked(service.url, service.asking, "served", given.questions, 0.05)
        ended = await stopped(service.process)
    found |= {"all": told(times, quiet) | {"answers": dict(crowd.answers)}, "sigterm_s": round(ended, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--each", type=int, default=10, help="questions while one kind of body is sent; 0: no kind")
    parser.add_argument("--kinds", nargs="*", help="only these")
    parser.add_argument("--crowds", type=int, default=1, help="tenants that the clients belong to")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--output", type=Path, help="file that a line with the outcome is added to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measured(given, Path(folder)))
    line = {"when": time.strftime("%Y-%m-%d"), "model": given.model, "crowds": given.crowds, **found}
    print(json.dumps(line, indent=1))
    if given.output is not None:
        with given.output.open("a") as out:
            print(json.dumps(line), file=out)
    assert not found["all"]["late"], found["all"]
    assert found["sigterm_s"] <= END


if __name__ == "__main__":
    main()
