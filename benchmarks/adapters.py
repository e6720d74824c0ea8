"""Requests with a LoRA adapter beside requests without one, and beside the same adapter through transformers.

    python benchmarks/adapters.py MODEL [--dtype bfloat16] [--rank 16] [--prefix 1000] [--rounds 9] [--out FILE]

MODEL is a folder. Its adapters have random weights of one rank in queries, keys, values, output, gate, up and down.
`decode`: milliseconds per token after the prefix. `hit`: a question of 24 tokens after a prefix that is resident, to
its first token. `cold`: the whole prompt. `batch`: 16 requests of 24 new tokens on warm prefixes, with 16 tokens of
answer each, through a `Batcher`: all without an adapter, all with one, with four in turn, and half with none. The sides
take turns; `times` is the median of the paired ratios to `without`, with their quartiles. PEFT's side is an engine of a
PEFT model, which runs through transformers. Prints one JSON line per figure.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from lines import tell
from ratios import paired, spread
from transformers import AutoModelForCausalLM, AutoTokenizer

from keepwarm import Batcher, Engine

NEW, SUFFIX, REQUESTS, ANSWER = 33, 24, 16, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAMES = ("one", "two", "three", "four")
MIXTURES = {"without": [None], "one adapter": ["one"], "four adapters": [*NAMES], "half with one": [None, "one"]}
Figures = dict[str, Any]


def with_peft(model: Path, dtype: torch.dtype, rank: int, seed: int) -> Any:
    """Return a PEFT model of random adapters."""
    torch.manual_seed(seed)
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), settings)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    return made.eval()


def timed(engine: Engine, prompt: list[int], new: int, **more: Any) -> tuple[float, int]:
    started = time.perf_counter()
    found = engine.generate(prompt, max_new_tokens=new, ignore_eos=True, **more)
    return time.perf_counter() - started, len(found.token_ids)


def ids(count: int, seed: int) -> list[int]:
    return [5 + (seed * 977 + number * 7919) % 30000 for number in range(count)]


def one_side(engine: Engine, prefix: list[int], number: int, **more: Any) -> dict[str, float]:
    """Return seconds of a hit, a decoded token and a cold prompt."""
    prompt = [*prefix, *ids(SUFFIX, number + 1)]
    engine.generate(prefix, max_new_tokens=1, **more)
    hit, _ = timed(engine, prompt, 1, **more)
    again, _ = timed(engine, prompt, 1, **more)
    whole, count = timed(engine, prompt, NEW, **more)
    return {
        "hit": hit,
        "decode": (whole - again) / (count - 1),
        "cold": timed(engine, prompt, 1, reuse="off", **more)[0],
    }


def a_batch(batcher: Batcher, prefix: list[int], number: int, names: list[str | None]) -> float:
    started = time.perf_counter()
    tickets = [
        batcher.submit(
            [*prefix, *ids(SUFFIX, number * 100 + each)],
            adapter=names[each % len(names)],
            max_new_tokens=ANSWER,
            ignore_eos=True,
        )
        for each in range(REQUESTS)
    ]
    for ticket in tickets:
        ticket.result()
    return time.perf_counter() - started


def measured(model: Path, dtype: str, rank: int, length: int, rounds: int, folder: Path) -> Iterator[Figures]:
    prefix = ids(length, 0)
    for seed, name in enumerate(NAMES):
        adapted = with_peft(model, getattr(torch, dtype), rank, seed)
        adapted.save_pretrained(folder / name)
    through = Engine.from_pretrained((adapted, AutoTokenizer.from_pretrained(model)))
    ours = Engine.from_pretrained(model, dtype=dtype, adapters={name: folder / name for name in NAMES})
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    with through, ours:
        for number in range(rounds):
            sides = {"without": (ours, {}), "adapter": (ours, {"adapter": "four"}), "through PEFT": (through, {})}
            for side, (engine, more) in sides.items():
                if number < 3 or side != "through PEFT":
                    for what, seconds in one_side(engine, prefix, number, **more).items():
                        times[what, side].append(seconds)
        with Batcher(ours) as batcher:
            for names in MIXTURES.values():  # warm prefixes
                a_batch(batcher, prefix, 99, names)
            for number in range(rounds):
                for side, names in MIXTURES.items():
                    times["batch", side].append(a_batch(batcher, prefix, number, names))
    for (what, side), found in times.items():
        yield {
            "model": model.name,
            "dtype": dtype,
            "rank": rank,
            "tokens": length + SUFFIX,
            "what": what,
            "side": side,
            "ms": round(statistics.median(found) * 1e3, 2),
            **spread(paired(found, times[what, "without"]), max),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        sizes = options.rank, options.prefix, options.rounds
        tell(measured(options.model, options.dtype, *sizes, Path(made)), options.out)


if __name__ == "__main__":
    main()
