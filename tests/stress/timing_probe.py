"""Can a tenant tell by the clock what another tenant cached? Two keys on a real service, prompts in random order.

The victim asks half of the prompts; then the prober asks all of them, once each, and measures the time to the first
text. If the clock told anything, the prompts that the victim had cached would come sooner. The control is the victim,
who asks them all again beside fresh ones: there the clock must tell, or the probe sees nothing. `auc` is the chance
that a cached prompt comes later than an uncached one (0.5: the clock says nothing; 0: it says all), with the p of
Welch's test on the logarithms.

    python -m tests.stress.timing_probe --pairs 60 --model demo --output FILE
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from keepwarm.serving.tenancy.keys import add_key
from papers.statistics import compare


def prompt(number: int) -> list[dict[str, str]]:
    """About 200 tokens that no other prompt shares: the first word already differs."""
    sales = f"The branch in street {number} sold {number + 1234} parcels. " * 14
    system = f"{number} is the number of this file. {sales}"
    return [{"role": "system", "content": system}, {"role": "user", "content": "How many?"}]


def first_event_ms(url: str, key: str, model: str, number: int) -> float:
    """Time from the first byte sent to the first event, which the service sends when it has the first token."""
    body = {"model": model, "messages": prompt(number), "max_tokens": 1, "temperature": 0, "stream": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=120)) as http:
        started = time.perf_counter()
        http.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        answer = http.getresponse()
        line = answer.readline()
        seen = (time.perf_counter() - started) * 1e3
        assert line.startswith(b"data: {"), line
        answer.read()
        return seen


def told(cached: list[float], fresh: list[float]) -> dict[str, Any]:
    """What the clock says of two kinds of prompts."""
    pairs = [(one, other) for one in cached for other in fresh]
    later = sum((one > other) + (one == other) / 2 for one, other in pairs) / len(pairs)
    logs = compare([math.log(one) for one in cached], [math.log(other) for other in fresh])
    return {
        "cached_ms": round(statistics.median(cached), 2),
        "fresh_ms": round(statistics.median(fresh), 2),
        "auc": round(later, 3),
        "p": round(logs.p, 4),
    }


def probe(url: str, victim: str, prober: str, model: str, pairs: int, seed: int) -> dict[str, Any]:
    """Both experiments."""
    draw = random.Random(seed)
    for number in (1, 2):  # connections, kernels, grammar: what only the first request pays
        first_event_ms(url, victim, model, number)
        first_event_ms(url, prober, model, number)
    cached = list(range(10_000, 10_000 + pairs))  # all numbers have five digits: prompts are equally long
    for number in cached:
        first_event_ms(url, victim, model, number)
    found = {}
    for name, key, fresh in (
        ("prober", prober, range(30_000, 30_000 + pairs)),
        ("control", victim, range(50_000, 50_000 + pairs)),
    ):
        order = [*((number, True) for number in cached), *((number, False) for number in fresh)]
        draw.shuffle(order)
        times: dict[bool, list[float]] = {True: [], False: []}
        for number, known in order:
            times[known].append(first_event_ms(url, key, model, number))
        found[name] = told(times[True], times[False])
    return found


def main() -> None:
    from tests.helpers.processes import ServerProcess

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file that a line with the outcome is added to")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        victim, prober = (add_key(keys, name)[1] for name in ("victim", "prober"))
        server = ServerProcess(given.model, Path(folder) / "store", "--keys-file", str(keys)).ready()
        listed = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": victim}, timeout=60).json()
        found = probe(server.url, victim, prober, listed["data"][0]["id"], given.pairs, given.seed)
        code = server.stop()
    shown = {"pairs": given.pairs, "model": given.model, "when": time.strftime("%Y-%m-%d"), **found, "exit": code}
    print(json.dumps(shown, indent=1))
    if given.output is not None:
        with given.output.open("a") as out:
            print(json.dumps(shown), file=out)
    assert found["control"]["auc"] < 0.2, "the probe sees nothing"


if __name__ == "__main__":
    main()
