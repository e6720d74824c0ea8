"""Time to first token of a stored prefix from Redis and S3, beside RAM, disk and recomputing, paired in one run.

    python benchmarks/remote.py [--prefix 3000] [--rounds 7] [--out benchmarks/results/remote.jsonl]

Needs redis-server (Debian's package) and moto; both services run on loopback in processes of their own. Moto's S3 is
written in Python: its bandwidth says nothing of real object storage, its overhead bounds ours. Run it on an otherwise
idle machine.

* `cold`: the whole prompt computed, as without a cache.
* `ram`, `disk`: hits nearer than a remote tier.
* `redis`, `s3`, `file`: hits from the remote tier, everything nearer emptied, what is known of the runs kept.
* `redis_first`, ...: the same by an engine that knows nothing of the store yet.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ratios import paired, spread
from ttft import QUESTIONS, messages, system_prompt

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.runtime.loader import load

SECONDS = 30.0


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(command: list[str], at: int) -> Iterator[None]:
    """A service that listens on a port, until the block ends."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            deadline = time.monotonic() + SECONDS
            while True:
                try:
                    socket.create_connection(("127.0.0.1", at), 1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            yield
        finally:
            running.terminate()


@contextmanager
def services(folder: Path) -> Iterator[dict[str, str]]:
    """URLs of empty remotes, by kind."""
    redis, s3 = port(), port()
    program = shutil.which("redis-server") or sys.exit("redis-server is not installed: apt-get install redis-server")
    redis_command = [program, "--port", str(redis), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    s3_command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(s3)]
    with process(redis_command, redis), process(s3_command, s3):
        made = urllib.request.Request(f"http://127.0.0.1:{s3}/bucket", method="PUT", data=b"")
        made.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20200101/us-east-1/s3/aws4_request")
        urllib.request.urlopen(made, timeout=SECONDS).read()
        yield {
            "redis": f"redis://127.0.0.1:{redis}/",
            "s3": f"s3://bucket/kv?endpoint=http://127.0.0.1:{s3}&region=us-east-1&access_key_id=a&secret_access_key=b",
            "file": f"file://{folder}/objects",
        }


def hit(engine: Engine, prompt: list[dict[str, str]], tier: str) -> Any:
    """One request whose prefix is found in a tier; everything nearer is emptied first."""
    if tier == "ram":
        engine.generate(messages=prompt, max_new_tokens=1)  # the end of another question may be on disk alone
    engine.flush()
    engine.pipeline.pool.forget()
    if tier != "ram":
        engine.pipeline.archive.clear_ram()
    engine.pipeline.costs.worth_loading = len  # type: ignore[method-assign]  # also where computing would be quicker
    result = engine.generate(messages=prompt, max_new_tokens=1)
    engine.flush()
    assert set(result.cached_by_tier) == {tier}, f"wanted a hit from {tier}, got {result.cached_by_tier}"
    return result


def measure(model: tuple[Any, Any], prefix: int, rounds: int, work: Path) -> Iterator[dict[str, Any]]:
    settings: dict[str, Any] = {"remote_timeout": SECONDS, "remote_load_timeout": SECONDS}
    with services(work) as urls:
        engines = {
            "disk": Engine.from_pretrained(model, store=work / "store"),
            **{name: Engine.from_pretrained(model, remote=url, **settings) for name, url in urls.items()},
        }
        system = system_prompt(engines["disk"], prefix)
        for engine in engines.values():
            for question in QUESTIONS:
                engine.generate(messages=messages(system, question), max_new_tokens=1)
            engine.flush()
        times: dict[str, list[float]] = {"cold": [], "ram": [], **{name: [] for name in engines}}
        parts: dict[str, list[tuple[float, float]]] = {}
        for number in range(rounds):
            prompt = messages(system, QUESTIONS[number % len(QUESTIONS)])
            if number < max(3, rounds // 2):
                cold = engines["disk"].generate(messages=prompt, max_new_tokens=1, reuse="off")
                times["cold"].append(cold.ttft_ms)
            for tier in ("ram", *engines):
                result = hit(engines["disk" if tier == "ram" else tier], prompt, tier)
                times[tier].append(result.ttft_ms)
                parts.setdefault(tier, []).append((result.timings["link"], result.timings["load"]))
        size = result.cached_tokens * engines["disk"].pipeline.model.geometry.bytes_per_token
        for name, url in urls.items():
            engines[name].close()
            firsts = []
            for number in range(3):
                with Engine.from_pretrained(model, remote=url, **settings) as fresh:
                    # The code paths are warm, what this engine knows of the store is not.
                    first = fresh.generate(messages=messages(system, QUESTIONS[number]), max_new_tokens=1)
                    assert set(first.cached_by_tier) == {name}, first.cached_by_tier
                    firsts.append(first.ttft_ms)
            times[f"{name}_first"] = firsts
        engines["disk"].close()
    for case, found in times.items():
        middle = statistics.median(found)
        line = {
            "case": case,
            "prefix": prefix,
            "prompt_tokens": result.prompt_tokens,
            "kv_bytes": size,
            "ttft_ms": round(middle, 1),
            "least_ms": round(min(found), 1),
            "most_ms": round(max(found), 1),
        }
        if case != "cold":
            line["sooner_than_cold"] = spread(paired(times["cold"], found))
        if case in parts:
            link, took = (statistics.median(each) for each in zip(*parts[case], strict=True))
            line |= {"link_ms": round(link, 1), "load_ms": round(took, 1), "load_gb_per_s": round(size / took / 1e6, 2)}
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a JSON line per case is added to this file")
    options = parser.parse_args()
    loaded = load("demo", EngineConfig.build(dtype="bfloat16"))
    with tempfile.TemporaryDirectory() as folder:
        for line in measure((loaded.model, loaded.tokenizer), options.prefix, options.rounds, Path(folder)):
            line["machine"] = platform.processor() or platform.machine()
            print(json.dumps(line), flush=True)
            if options.out is not None:
                with options.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
