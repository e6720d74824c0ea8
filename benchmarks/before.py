"""This checkout against another one, paired: each measurement is taken in one, then in the other, in one run.

    python benchmarks/before.py --before FOLDER [--dtype bfloat16] [--output benchmarks/results]

`FOLDER` is a checkout of the earlier code. Writes `before.jsonl`: medians of both and the quartiles of their ratios
(above 1: this checkout is slower), for `above` of their differences in ms. Both run in processes of their own, and only
one at a time computes. Run it on an otherwise idle machine.

* `step`: the bare forward pass over 24 new tokens, KV in place; `hit`: `generate` to its first token, the prefix in RAM
  and a question that nobody asked before; `above`: what that hit costs above the step before it.
* `cold`: `generate` of a prompt that nobody asked before, to its first token.
* `at once`: 16 requests on one warm prefix through a `Batcher`, all answers.
* `memory`: peak of resident memory, in MiB, while a cold prompt of 8,000 tokens is read, above the loaded model and the
  prompt's KV (`floor.py`), each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SUFFIX = 24
PREFIXES = (512, 2048)
COLD = 2000
AT_ONCE = 16
ROUNDS = {"hit": 61, "cold": 15, "at once": 41}
PEAKS = 3


class Side:
    """One checkout, in a process that measures when it is asked."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder / "src"), str(folder)))}
        self._folder, self._dtype = folder, dtype
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--measure", dtype],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def peak(self) -> float:
        """MiB that a long cold prompt takes beside its KV."""
        command = [sys.executable, str(self._folder / "benchmarks" / "floor.py"), "--peak", "scheduled", self._dtype]
        done = subprocess.run(command, env=self._environment, check=True, stdout=subprocess.PIPE, text=True)
        return float(json.loads(done.stdout.splitlines()[-1])["taken"]) / 2**20

    def ask(self, what: str, prefix: int, number: int) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([what, prefix, number]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise RuntimeError(f"{self._process.args} ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def ids_of(length: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 40_000) for _ in range(length)]


def milliseconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def measured(engine: Any, what: str, prefix: int, number: int) -> dict[str, float]:
    from keepwarm import Batcher
    from keepwarm.core.blocks import token_ids

    head = ids_of(prefix, 1)
    inside = getattr(engine, "pipeline", engine)  # of earlier checkouts the engine itself
    if what == "step":
        nobody: Any = None
        try:
            arena = inside.pool.acquire(nobody, prefix + SUFFIX + 1)
        except TypeError:  # earlier checkouts
            arena = inside.pool.acquire((), prefix + SUFFIX + 1)
        arena.seek(0)
        inside.model.runner.extend(token_ids(head), arena.cache, 0)
        asked = token_ids(ids_of(SUFFIX, number))
        taken = milliseconds(lambda: inside.model.runner.step(asked, arena.cache, prefix))
        arena.seek(0)
        inside.pool.release(arena)
        return {"step": taken}
    if what == "hit":
        if number == 0:
            engine.warm(head)
        inside.archive.flush()
        inside.pool.forget()
        result = engine.generate([*head, *ids_of(SUFFIX, number + 1000)], max_new_tokens=1)
        assert result.cached_by_tier.get("ram", 0) >= prefix - prefix // 32, result.cached_by_tier
        return {"hit": result.ttft_ms}
    if what == "cold":
        inside.archive.flush()
        return {"cold": engine.generate(ids_of(COLD, 5000 + number), max_new_tokens=1).ttft_ms}
    if what == "at once":
        if number == 0:
            engine.warm(head)
        inside.archive.flush()
        asked_ids = [[*head, *ids_of(SUFFIX, 9000 + AT_ONCE * number + each)] for each in range(AT_ONCE)]
        with Batcher(engine) as batcher:

            def all_of_them() -> None:
                for future in [batcher.submit(ids, max_new_tokens=32) for ids in asked_ids]:
                    future.result()

            return {"at once": milliseconds(all_of_them)}
    raise ValueError(what)


def serve(dtype: str) -> None:
    """Measure what is asked for, a line each."""
    from keepwarm import Engine

    with Engine.from_pretrained("demo", dtype=dtype, step=512) as engine:
        engine.generate(ids_of(600, 0), max_new_tokens=4, reuse="off")
        for line in sys.stdin:
            print(json.dumps(measured(engine, *json.loads(line))), flush=True)


def quartiles(values: list[float]) -> list[float]:
    return [round(each, 3) for each in statistics.quantiles(values, n=4, method="inclusive")]


def summary(now: dict[str, list[float]], before: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in now:
        pairs = [*zip(now[name], before[name], strict=True)]
        middle = {"now": statistics.median(now[name]), "before": statistics.median(before[name])}
        found[name] = {key: round(value, 2) for key, value in middle.items()}
        if name == "above":
            found[name]["more"] = quartiles([a - b for a, b in pairs])
        else:
            found[name]["ratio"] = quartiles([a / b for a, b in pairs])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--what", nargs="+", default=["hit", "cold", "at once", "memory"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        serve(options.measure)
        return
    if options.before is None:
        parser.error("--before: a checkout of the earlier code is needed")
    options.output.mkdir(parents=True, exist_ok=True)
    sides = [Side(Path(__file__).parents[1], options.dtype), Side(options.before, options.dtype)]
    with (options.output / "before.jsonl").open("w") as out:

        def say(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=out, flush=True)
            print(json.dumps(row), flush=True)

        for what in options.what:
            if what == "memory":
                say(
                    {"what": what}
                    | {
                        name: [round(side.peak()) for _ in range(PEAKS)]
                        for name, side in zip(("now", "before"), sides, strict=True)
                    }
                )
                continue
            for prefix in PREFIXES if what == "hit" else PREFIXES[:1]:
                say({"what": what, "prefix": prefix} | summary(*paired(sides, what, prefix)))
    for side in sides:
        side.close()


def paired(sides: Sequence[Side], what: str, prefix: int) -> tuple[dict[str, list[float]], ...]:
    """What both measured, round by round; the first round is not counted, and who begins changes."""
    taken: tuple[dict[str, list[float]], ...] = ({}, {})
    for number in range(ROUNDS[what] + 1):
        for at in (0, 1) if number % 2 else (1, 0):
            found = sides[at].ask(what, prefix, number)
            if what == "hit":
                found |= sides[at].ask("step", prefix, number)
                found["above"] = found["hit"] - found["step"]
            if number:
                for name, value in found.items():
                    taken[at].setdefault(name, []).append(value)
    return taken


if __name__ == "__main__":
    main()
