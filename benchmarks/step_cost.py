"""What one prefill step costs by its length, on a prefix that is in place: the ground for G_min.

    python benchmarks/step_cost.py [--prefix 3000] [--rounds 9]

Prints one JSON line per step length: median ms, and ms per token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from keepwarm.config import EngineConfig
from keepwarm.core.blocks import token_ids
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.loader import load

LENGTHS = (1, 8, 32, 64, 128, 192, 256, 384, 512, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    model = load("demo", EngineConfig.build(dtype="bfloat16"))
    arena = Arena(model.geometry, options.prefix + max(LENGTHS), model.runner.port, touch=True)
    tokens = token_ids([7 + n % 1000 for n in range(options.prefix + max(LENGTHS))])
    model.runner.step(tokens[: options.prefix], arena.cache, 0)
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(options.rounds):
        for length in LENGTHS:
            arena.seek(options.prefix)
            started = time.perf_counter()
            end = options.prefix + length
            model.runner.step(tokens[options.prefix : end], arena.cache, options.prefix).argmax().item()
            times[length].append((time.perf_counter() - started) * 1e3)
    for length, values in times.items():
        median = statistics.median(values)
        print(
            json.dumps({
                "prefix": options.prefix,
                "step": length,
                "ms": round(median, 1),
                "ms_per_token": round(median / length, 3),
            })
        )


if __name__ == "__main__":
    main()
