"""Time to first token: cold, hits from each tier, and the floor, paired in one run.

    python benchmarks/ttft.py [--prefix 512 1024 ...] [--step 256 512 ...] [--rounds 7] [--model demo]
                              [--output benchmarks/results]

Writes `ttft.jsonl` (one line per measurement and one summary per prefix and step); of another model than the demo's, a
folder, `ttft-NAME.jsonl`. Run it on an otherwise idle machine: another busy process slows torch many times over.

Every case of a round runs right after the other, so that ratios compare like with like:

* `oneshot`: transformers' own model and cache, one forward pass over the whole prompt, tokenized beforehand.
* `cold`: `Engine.generate(reuse="off")`: the scheduled cold run, from the call to the first token.
* `device`, `ram`, `disk`: hits of the same kind of request with KV in the arena, in RAM only, in page cache only.
* `mapped`: as `disk`, with the file attended to in place (`map_files`).
* `process`: the first request of a new process, from disk.
* `floor`: the bare forward pass over what follows the last cut, with its KV in place.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.core.request import Request
from keepwarm.runtime.loader import load

QUESTIONS = ("Which rule matters most here?", "What may never be done on Mondays?", "Name one rule, please.")
HITS = ("device", "ram", "disk", "mapped")


def system_prompt(engine: Engine, tokens: int) -> str:
    """Text of about `tokens` tokens."""
    rules = (f"Rule {n}: on day {n % 31} a clerk files form {n * 37 % 1009} before noon." for n in range(10_000))
    text, count = "", 0
    for rule in rules:
        count += len(engine.pipeline.tokenizer.encode(rule + "\n")[0])
        if count > tokens:
            return text
        text += rule + "\n"
    raise ValueError(f"cannot make {tokens} tokens")


def messages(system: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def milliseconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def floor_ms(engine: Engine, prompt: list[dict[str, str]]) -> float:
    """The bare pass over the last step of a prompt whose KV is in place."""
    compiled = engine.pipeline.prompts.compile(_request(prompt), 1)
    with engine.pipeline.lease(
        engine.pipeline.linked(compiled), engine.pipeline.config.reuse, len(compiled.tokens) + 1
    ) as placed:
        span = placed.plan.computes[-1]
        assert len(placed.plan.computes) == 1, "not a hit"
        tokens, cache = compiled.tokens[span.start : span.end], placed.arena.cache
        return milliseconds(
            lambda: engine.pipeline.model.runner.step(tokens, cache, span.start).float().numpy().argmax()
        )


def _request(prompt: list[dict[str, str]]) -> Request:
    return Request(messages=prompt)


def oneshot_ms(engine: Engine, prompt: list[dict[str, str]]) -> float:
    ids = torch.from_numpy(engine.pipeline.prompts.compile(_request(prompt), 1).tokens.astype("int64"))[None]
    model = engine.pipeline.model.model

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax().item()

    with torch.inference_mode():
        return milliseconds(run)


def hit_ms(engine: Engine, prompt: list[dict[str, str]], tier: str) -> float:
    engine.flush()
    engine.pipeline.pool.forget()
    if tier != "ram":
        engine.pipeline.archive.clear_ram()
    if tier == "device":
        engine.generate(messages=prompt, max_new_tokens=1)  # what comes from disk stays in an arena
        engine.flush()
    result = engine.generate(messages=prompt, max_new_tokens=1)
    engine.flush()
    expected = "disk" if tier == "mapped" else tier
    assert set(result.cached_by_tier) == {expected}, f"wanted a hit from {expected}, got {result.cached_by_tier}"
    return result.ttft_ms


def measure(model: tuple[Any, Any], name: str, prefix: int, step: int, rounds: int, work: Path) -> dict[str, Any]:
    store = work / f"{prefix}-{step}"
    times: dict[str, list[float]] = {name: [] for name in ("oneshot", "cold", *HITS, "floor")}
    with (
        Engine.from_pretrained(model, store=store, step=step, min_step=min(step, 128)) as engine,
        Engine.from_pretrained(model, store=store, step=step, min_step=min(step, 128), map_files=True) as mapping,
    ):
        system = system_prompt(engine, prefix)
        for question in QUESTIONS:  # warm-up of every path, and the store filled
            engine.generate(messages=messages(system, question), max_new_tokens=1)
        for number in range(rounds):
            prompt = messages(system, QUESTIONS[number % len(QUESTIONS)])
            if number < max(3, rounds // 2):  # cold runs are long and steady: fewer do
                times["oneshot"].append(oneshot_ms(engine, prompt))
                cold = engine.generate(messages=prompt, max_new_tokens=1, reuse="off")
                times["cold"].append(cold.ttft_ms)
            for tier in HITS:
                times[tier].append(hit_ms(mapping if tier == "mapped" else engine, prompt, tier))
            times["floor"].append(floor_ms(engine, prompt))
        result = engine.generate(messages=prompt, max_new_tokens=1)
        times["process"] = [other_process(name, store, step, prefix) for _ in range(min(rounds, 5))]
    bytes_per_token = engine.pipeline.model.geometry.bytes_per_token
    return {
        "prefix": prefix,
        "step": step,
        "prompt_tokens": result.prompt_tokens,
        "last_cut": result.last_cut,
        "bytes_per_token": bytes_per_token,
        "times": times,
    }


def other_process(name: str, store: Path, step: int, prefix: int) -> float:
    """TTFT of the first request of a new process; this one computes nothing meanwhile."""
    command = [sys.executable, __file__, "--child", json.dumps([name, str(store), step, prefix])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def child(arguments: str) -> None:
    name, store, step, prefix = json.loads(arguments)
    with Engine.from_pretrained(name, dtype="bfloat16", store=store, step=step, min_step=min(step, 128)) as engine:
        prompt = messages(system_prompt(engine, prefix), QUESTIONS[0])
        result = engine.generate(messages=prompt, max_new_tokens=1)
        assert set(result.cached_by_tier) == {"disk"}, result.cached_by_tier
        print(result.ttft_ms)


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """Medians in ms, and medians of the ratios within each round."""
    times = row["times"]
    median = {name: round(statistics.median(values), 1) for name, values in times.items()}
    paired = {
        f"{tier}/floor": statistics.median(a / b for a, b in zip(times[tier], times["floor"], strict=True))
        for tier in HITS
    }
    paired["process/floor"] = min(times["process"]) / statistics.median(times["floor"])
    paired["cold/oneshot"] = statistics.median(a / b for a, b in zip(times["cold"], times["oneshot"], strict=True))
    fastest = min(median["cold"], median["oneshot"])
    speedup = {f"speed-up {tier}": fastest / median[tier] for tier in (*HITS, "process")}
    keep = {k: v for k, v in row.items() if k != "times"}
    return keep | {"ms": median} | {k: round(v, 3) for k, v in (paired | speedup).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, nargs="+", default=[512, 1024, 2048, 3000, 4096, 6000, 8000])
    parser.add_argument("--step", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="demo", help="demo, or a folder with a model")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    loaded = load(options.model, EngineConfig.build(dtype="bfloat16"))  # once, for all engines
    model = (loaded.model, loaded.tokenizer)
    options.output.mkdir(parents=True, exist_ok=True)
    machine = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": loaded.identity.dtype,
        "attention": loaded.attention,
        "model": "SmolLM2-135M-Instruct" if options.model == "demo" else Path(options.model).name,
    }
    name = "ttft" if options.model == "demo" else f"ttft-{Path(options.model).name}"
    with tempfile.TemporaryDirectory() as work, (options.output / f"{name}.jsonl").open("w") as out:
        print(json.dumps(machine), file=out)
        for prefix in options.prefix:
            for step in options.step:
                row = measure(model, options.model, prefix, step, options.rounds, Path(work))
                found = summary(row)
                print(json.dumps(row), file=out)
                print(json.dumps({"summary": found}), file=out, flush=True)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
