"""Hits and decoding against the arithmetic floor, and the peak memory of a prefill, in one run.

    python benchmarks/floor.py [--dtype float32 bfloat16] [--prefix 512 2048 ...] [--rounds 9] [--output FOLDER]

Writes `floor.jsonl`. The *floor* of a step is the time to read what it must read, the weights and the keys and values
once, at the read bandwidth measured in the same run; computing is free. Per dtype and prefix:

* `step_ms`: a step of 24 new tokens after the prefix; `decode_ms`: one token after it; both bare, KV in place.
* `hit_ms`: `Engine.generate` on token ids, from the call to the first token, the prefix in RAM.

and once per dtype, each in a process of its own, the peak of resident memory above the loaded model while a cold prompt
of 8,000 tokens is read: `oneshot` (transformers' own model and cache) and `scheduled` (this engine).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from keepwarm import Engine
from keepwarm.core.blocks import token_ids
from keepwarm.runtime.runner import Runner

SUFFIX = 24
LONG = 8000
STEP = 512  # prefixes are multiples of it


def milliseconds(action: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def read_gb_per_s(rounds: int) -> float:
    """Reading 512 MiB of float32 with all threads."""
    data = torch.ones(128 << 20)
    return float(data.numel() * 4 / milliseconds(data.sum, rounds) / 1e6)


def measure(engine: Engine, prefix: int, rounds: int, bandwidth: float) -> dict[str, Any]:
    runner: Runner = engine.pipeline.model.runner
    ids = [3 + i * 7919 % 40_000 for i in range(prefix + SUFFIX)]
    weights = read_bytes(engine)
    kv = engine.pipeline.model.geometry.bytes_per_token * prefix
    arena = engine.pipeline.pool.acquire(None, prefix + SUFFIX + 1)
    arena.seek(0)
    runner.extend(token_ids(ids[:prefix]), arena.cache, 0)

    def step(rows: int) -> None:
        arena.seek(prefix)
        runner.step(token_ids(ids[prefix : prefix + rows]), arena.cache, prefix)

    times = {"step_ms": milliseconds(lambda: step(SUFFIX), rounds), "decode_ms": milliseconds(lambda: step(1), rounds)}
    arena.seek(0)
    engine.pipeline.pool.release(arena)
    engine.generate(ids, max_new_tokens=1)

    def hit(number: int) -> float:
        """The prefix, and a question that nobody asked before."""
        engine.flush()
        engine.pipeline.pool.forget()
        result = engine.generate([*ids[:prefix], 41_000 + number, *ids[prefix + 1 :]], max_new_tokens=1)
        assert result.cached_by_tier == {"ram": prefix}, result.cached_by_tier
        return result.ttft_ms

    times["hit_ms"] = statistics.median(hit(number) for number in range(rounds))
    floor = (weights + kv) / bandwidth / 1e6
    ratios = {name.replace("ms", "per_floor"): round(value / floor, 2) for name, value in times.items()}
    return {"prefix": prefix, "floor_ms": round(floor, 1)} | {k: round(v, 1) for k, v in times.items()} | ratios


def read_bytes(engine: Engine) -> int:
    """Bytes of the weights that a step reads: in the form that the kernels have, where they run the model. Of the
    embeddings it reads a few rows."""
    model, lean = engine.pipeline.model.model, engine.pipeline.model.runner.lean
    if lean is None:
        return sum(p.numel() * p.element_size() for p in model.parameters())
    found = dict(lean.storages)
    found.pop(model.get_input_embeddings().weight.data_ptr(), None)
    return sum(found.values())


def held(what: str) -> int:
    """Resident bytes of this process: now (VmRSS) or at most (VmHWM). Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10


def peak(how: str, dtype: str) -> None:
    """Run in a process of its own: prints the peak above the loaded model and the prompt's KV, in bytes."""
    with Engine.from_pretrained("demo", dtype=dtype, max_ram=0) as engine:
        ids = [3 + i * 7919 % 40_000 for i in range(LONG)]
        engine.generate(ids[:600], max_new_tokens=1, reuse="off")
        before, arenas = held("VmRSS"), engine.pipeline.pool.nbytes
        Path("/proc/self/clear_refs").write_text("5")  # the peak from now on: loading took more than it left
        if how == "oneshot":
            model = engine.pipeline.model.model
            with torch.inference_mode():
                cache = DynamicCache(config=model.config)
                model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        else:
            engine.generate(ids, max_new_tokens=1, reuse="off")
        # The engine's KV lies in an arena: one that was there before, or a new one where it did not fit.
        kv = (
            engine.pipeline.model.geometry.bytes_per_token * LONG
            if how == "oneshot"
            else engine.pipeline.pool.nbytes - arenas
        )
        print(json.dumps({"taken": held("VmHWM") - before - kv}))


def peaks(dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how in ("oneshot", "scheduled"):
        command = [sys.executable, __file__, "--peak", how, dtype]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        found[how] = round(row["taken"] / 2**20)
    saved = 1 - found["scheduled"] / found["oneshot"]
    return {"tokens": LONG, "peak MiB beside KV": found, "less than oneshot": round(saved, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prefix", type=int, nargs="+", default=[512, 2048, 4096, 7680])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(*options.peak)
        return
    with (options.output / "floor.jsonl").open("w") as out:

        def say(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=out, flush=True)
            print(json.dumps(row), flush=True)

        for dtype in options.dtype:
            machine = {"threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability()}
            say({"dtype": dtype} | machine)
            say(peaks(dtype))
            with Engine.from_pretrained("demo", dtype=dtype, step=STEP) as engine:
                bandwidth = read_gb_per_s(options.rounds)
                say({"attention": engine.pipeline.model.attention, "read GB/s": round(bandwidth, 1)})
                for prefix in options.prefix:
                    say({"dtype": dtype} | measure(engine, prefix, options.rounds, bandwidth))


if __name__ == "__main__":
    main()
