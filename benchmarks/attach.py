"""Plain `model.generate` with and without `keepwarm.attach`: a long prompt, then the same with another question.

    python benchmarks/attach.py [--out benchmarks/results/attach.jsonl] [--rounds 5]

Per way: `first_ms`, the call that computes the prompt, and `again_ms`, the call with another question, up to the first
token, medians; and how many tokens were reused. `in_place_ms` is plain `model.generate` with the KV of the common
beginning in place, in a cache of transformers': the least that reuse under its `generate` can take with the model's
kernels, measured before the first way's rounds. `floor_ms` is the bare forward pass of the engine's decoder over what
follows, KV in place, in the same round. `over_in_place` and `over_floor` are medians of the ratios. Every round asks
about another document. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from any_token import text
from ratios import spread
from transformers import DynamicCache

import keepwarm
from keepwarm import Engine
from keepwarm.core.blocks import common_length, token_ids

CHARACTERS = 5300
QUESTIONS = ("\n\nWhat follows from it?", "\n\nWho says so, and when?")


def timed(model: Any, tokenizer: Any, prompt: str) -> float:
    inputs = tokenizer(prompt, return_tensors="pt")
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
    return (time.perf_counter() - started) * 1e3


def in_place(model: Any, tokenizer: Any, prompt: str, common: int) -> float:
    """Plain `generate` to the first token, the keys and values of the first `common` tokens computed before."""
    inputs = tokenizer(prompt, return_tensors="pt")
    taken = []
    with torch.inference_mode():
        known = DynamicCache(config=model.config)
        model(inputs["input_ids"][:, :common], past_key_values=known)
        for _ in range(3):
            cache = copy.deepcopy(known)
            started = time.perf_counter()
            model.generate(**inputs, past_key_values=cache, max_new_tokens=1, do_sample=False)
            taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken)


def floor(engine: Engine, first: str, second: str) -> tuple[float, int, int]:
    """The bare step over what is new of the second prompt; how many tokens agree, and how many it has."""
    one, two = (token_ids(engine.pipeline.tokenizer.encode(each)[0]) for each in (first, second))
    common = common_length(one, two)
    arena = engine.pipeline.pool.acquire(None, len(two) + 1)
    arena.seek(0)
    engine.pipeline.model.runner.extend(two[:common], arena.cache, 0)
    taken = []
    for _ in range(5):
        arena.seek(common)
        started = time.perf_counter()
        engine.pipeline.model.runner.step(two[common:], arena.cache, common).argmax().item()
        taken.append((time.perf_counter() - started) * 1e3)
    arena.seek(0)
    engine.pipeline.pool.release(arena)
    return statistics.median(taken), common, len(two)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = []
    with Engine.from_pretrained("demo", dtype="bfloat16", reuse="off") as engine:
        model, tokenizer = engine.pipeline.model.model, engine.pipeline.model.tokenizer
        plain = getattr(tokenizer, "tokenizer", tokenizer)
        places: list[float] = []
        for way in ("not attached", "model", "own"):
            rows = []
            with tempfile.TemporaryDirectory() as folder:
                settings = {"store": folder, **({} if way == "model" else {"kernels": "own"})}
                attached = None if way == "not attached" else keepwarm.attach(model, plain, **settings)
                for number in range(options.rounds + 1):
                    document = text(CHARACTERS, 1600 * number)
                    prompts = [document + question for question in QUESTIONS]
                    bare, common, tokens = floor(engine, *prompts)
                    plainly = in_place(model, plain, prompts[1], common) if attached is None else places[number]
                    if attached is None:
                        places.append(plainly)
                    times = [timed(model, plain, prompt) for prompt in prompts]
                    reused = attached.cached_tokens if attached is not None else 0
                    rows.append((*times, bare, reused, common, tokens, plainly))
                if attached is not None:
                    attached.detach()
            kept = rows[1:]
            line = {
                "kernels": way,
                "tokens": kept[-1][5],
                "common": kept[-1][4],
                "reused": kept[-1][3],
                "first_ms": round(statistics.median(row[0] for row in kept), 1),
                "again_ms": round(statistics.median(row[1] for row in kept), 1),
                "in_place_ms": round(statistics.median(row[6] for row in kept), 1),
                "over_in_place": round(statistics.median(row[1] / row[6] for row in kept), 2),
                "floor_ms": round(statistics.median(row[2] for row in kept), 1),
                "over_floor": spread([row[1] / row[2] for row in kept], max),
            }
            lines.append(json.dumps(line))
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
