"""Time to first token under vLLM: recomputed, by its own prefix hit, and from Keepwarm's connector after a restart.

    python benchmarks/vllm.py [--prompts 100] [--kinds disk redis] [--out benchmarks/results/vllm.jsonl]

One run: a first vLLM computes a prefix and stores it on disk, in Redis and in S3 (moto's, over HTTP; its bandwidth says
nothing of real object storage), and ends. Then new ones start: one without connector, which gives vLLM's own figures,
and one over each kind of store alone, with nothing held in RAM and vLLM's own prefix cache emptied before each
request. Every prompt is answered by all of them in turn, the others stopped meanwhile; greedy tokens are compared with
those of vLLM's own prefix hit. An interrupt ends it with what was measured until then. Needs redis-server; the
environment is made by `make test-vllm`. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import environments
import numpy as np
from child import Child
from ratios import paired, spread
from remote import services

from keepwarm.runtime.demo_model import demo_model

ROOT = Path(__file__).parents[1]
PAGE = 32


def ids(count: int, seed: int) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(10, 40_000, count)]


def stores(folder: Path, urls: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The connector's settings by kind, each with nothing but that."""
    nowhere = {"max_ram": 0, "remote_timeout": 10.0, "remote_load_timeout": 30.0, "load_timeout": 60.0}
    disk = {"store": str(folder / "store"), "max_disk": "4GiB"}
    return {"disk": disk | nowhere, **{kind: {"remote": url} | nowhere for kind, url in urls.items()}}


class Instances:
    """vLLM processes, of which one runs at a time."""

    def __init__(self, python: Path, work: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self._python, self._work, self._options, self._stack = python, work, options, stack

    def start(self, name: str, connector: dict[str, Any] | None) -> Child:
        environment = environments.variables(self._python) | {
            "OMP_NUM_THREADS": str(self._options.threads),
            "PYTHONPATH": str(ROOT / "src"),
        }
        command = [str(self._python), str(ROOT / "benchmarks" / "peers" / "vllm_peer.py")]
        child = Child(name, command, self._work / f"{name}.log", environment)
        self._stack.callback(child.close)
        asked = {"eager": True, "block": PAGE} | ({} if connector is None else {"connector": connector})
        child.load(
            model=str(demo_model()),
            dtype=self._options.dtype,
            threads=self._options.threads,
            capacity=4096,
            work=str(self._work),
            options=asked,
        )
        return child


def measure(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    head, tails = ids(options.prefix, 1), [ids(27, 1000 + n) for n in range(options.prompts + 2)]
    prompts = [{"messages": [], "ids": head + tail, "prefix": len(head)} for tail in tails]
    with ExitStack() as stack, services(work) as urls:
        made = environments.vllm(options.work)
        instances = Instances(made, work, options, stack)
        kinds = {kind: found for kind, found in stores(work, urls).items() if kind in options.kinds}
        everything = {"store": kinds["disk"]["store"], "max_disk": "4GiB"} if "disk" in kinds else {}
        everything |= {"remote_timeout": 10.0, "remote": [kinds[kind]["remote"] for kind in kinds if kind != "disk"]}
        first = instances.start("writer", everything)
        first.awake("cold", prompt=prompts[-1])
        first.awake("close")  # writes what is queued
        first.close()
        with ThreadPoolExecutor(len(kinds) + 1) as starting:
            wanted = {"vllm": None, **kinds}
            readers = dict(zip(wanted, starting.map(instances.start, wanted, wanted.values()), strict=True))
        own = readers.pop("vllm")
        own.awake("cold", prompt=prompts[-2])
        times: dict[str, list[float]] = {"recomputed": [], "own hit": [], **{kind: [] for kind in readers}}
        same = dict.fromkeys(readers, 0)
        with suppress(KeyboardInterrupt):  # what was measured until then is reported
            for number in range(-2, options.prompts):
                prompt = prompts[number]
                hit = own.awake("hit", kind="prefix cache", prompt=prompt, new_tokens=options.new_tokens)
                answers = {
                    kind: one.awake("stored", prompt=prompt, new_tokens=options.new_tokens)
                    for kind, one in readers.items()
                }
                if number < 0:
                    continue
                times["own hit"].append(hit["ttft"])
                for kind, answer in answers.items():
                    times[kind].append(answer["ttft"])
                    same[kind] += answer["tokens"] == hit["tokens"]
                if number % max(1, options.prompts // options.cold) == 0:
                    times["recomputed"].append(own.awake("cold", prompt=prompt)["ttft"])
        lines = []
        for kind, found in times.items():
            middle = statistics.median(found)
            line = {
                "case": kind,
                "prompt_tokens": len(prompts[0]["ids"]),
                "prefix": len(head),
                "requests": len(found),
                "ttft_ms": round(middle, 1),
                "least_ms": round(min(found), 1),
                "most_ms": round(max(found), 1),
            }
            if kind != "recomputed":
                beside = found[
                    :: max(1, options.prompts // options.cold)
                ]  # the rounds with a prompt that is recomputed
                line["sooner_than_recomputing"] = spread(paired(times["recomputed"], beside))
                line["of_own_hit"] = spread(paired(found, times["own hit"]), max)
            if kind in same:
                line |= {"same_tokens": same[kind], "greedy_tokens": options.new_tokens}
            lines.append(line | {"dtype": options.dtype, "vllm": own.about["vllm"], "mode": own.about["mode"]})
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--cold", type=int, default=5, help="how many of them are also recomputed by vLLM")
    parser.add_argument("--prefix", type=int, default=2176, help=f"tokens, a multiple of {PAGE}")
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--kinds", nargs="*", default=["disk", "redis"], choices=["disk", "redis", "s3", "file"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=ROOT / ".peers", help="where vLLM's environment is")
    parser.add_argument("--out", type=Path, help="a JSON line per case is added to this file")
    options = parser.parse_args()
    options.work = options.work.expanduser().absolute()
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(options, Path(folder)):
            line["machine"] = platform.processor() or platform.machine()
            print(json.dumps(line), flush=True)
            if options.out is not None:
                with options.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
