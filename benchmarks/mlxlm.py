"""Time to first token under mlx-lm: cold, with its own prompt cache, and with ours, also after a restart.

    .peers/mlx/bin/python benchmarks/mlxlm.py MODEL [--tokens 4000] [--rounds 5] [--out benchmarks/results/mlxlm.jsonl]

Each round starts two processes, one after the other, over a folder of its own. The first answers a question on a long
text cold, and hands the prompt over to mlx-lm's own cache and to ours. Then another question is asked: from mlx-lm's
cache in memory, from ours, and from ours with its memory emptied. The other process is a restart. The calls are those
of mlx-lm's server, in its order. Times are from the lookup to the first token. Files are in the page cache. What a
restart needs to open our store is told apart. Run it on an otherwise idle machine, after `make test-mlx` has made the
environment.

MODEL is a folder that mlx-lm can load. Its version here reads the base of rotary positions from `rope_theta` only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache
from ratios import spread

from keepwarm.integrations.mlx import KeepwarmPromptCache, Loaded

QUESTIONS = ("\n\nWhich rule matters most here?", "\n\nWhat may never be done on a Monday, and who says so?")
NEW = 8


class Process:
    """One process's model. `log` gets one record for each time that is taken."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model, tokenizer = mlx_lm.load(options.model)
        self.loaded = Loaded(self.model, options.model)
        rules = (f"Rule {n}: on day {n % 31} a clerk files form {n * 37 % 1009} before noon." for n in range(9999))
        head = tokenizer.encode("\n".join(rules))[: options.tokens]
        self.prompts = [head + tokenizer.encode(each, add_special_tokens=False) for each in QUESTIONS]
        self.folder = Path(options.folder)
        self.log: list[dict[str, Any]] = []
        self._answer(self.prompts[0][:64], None)  # warms up

    def ask(self, case: str, number: int, cache: LRUPromptCache | None) -> list[tuple[list[int], list[Any]]]:
        """Answer one question from `cache`. Return what mlx-lm's server would hand over."""
        record, kept = self._answer(self.prompts[number], cache)
        self.log.append({"case": case} | record)
        return kept

    def _answer(
        self, ids: list[int], cache: LRUPromptCache | None
    ) -> tuple[dict[str, Any], list[tuple[list[int], list[Any]]]]:
        kept: list[tuple[list[int], list[Any]]] = []
        began = time.perf_counter()
        found, rest = cache.fetch_nearest_cache(self.loaded.key, [*ids]) if cache is not None else (None, ids)
        looked_up = time.perf_counter()
        cached = len(ids) - len(rest)
        generator = BatchGenerator(self.model, max_tokens=NEW)
        generator.insert_segments([[rest]], caches=[found], all_tokens=[ids[:cached]])
        tokens: list[int] = []
        seen = hashlib.sha256()
        first = 0.0
        while len(tokens) < NEW:
            prompt_responses, responses = generator.next()
            ended = [r.uid for r in prompt_responses if r.end_of_segment and not r.end_of_prompt]
            for caches, key in generator.extract_cache(ended).values():
                kept.append((key[:], caches))
            for response in responses:
                first = first or time.perf_counter()
                tokens.append(response.token)
                seen.update(np.array(response.logprobs.astype(mx.float32)).tobytes())
                if response.finish_reason is not None:
                    kept.append((response.all_tokens[:], response.prompt_cache))
        generator.close()
        record = {
            "ttft_ms": 1000 * (first - began),
            "lookup_ms": 1000 * (looked_up - began),
            "cached": cached,
            "tokens": tokens,
            "logits": seen.hexdigest(),
        }
        return record, kept

    def ours(self) -> KeepwarmPromptCache:
        began = time.perf_counter()
        cache = KeepwarmPromptCache(self.loaded, store=self.folder, max_disk="8GiB")
        self.log.append({"case": "opening", "ttft_ms": 1000 * (time.perf_counter() - began)})
        return cache

    def first(self) -> None:
        own, ours = LRUPromptCache(), self.ours()
        for key, caches in self.ask("cold", 0, None):
            own.insert_cache(self.loaded.key, key, caches)
            ours.insert_cache(self.loaded.key, key, caches)
        ours.flush()
        self.ask("own, in memory", 1, own)
        self.ask("ours, in memory", 1, ours)
        ours.trim_to(n_sequences=0)
        self.ask("ours, from disk", 1, ours)
        ours.close()

    def restart(self) -> None:
        cache = self.ours()
        self.ask("ours, after a restart", 1, cache)
        cache.close()


def rounds(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for part in ("first", "restart"):
                command = [sys.executable, __file__, options.model, "--part", part, "--folder", folder]
                command += ["--tokens", str(options.tokens)]
                ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                for line in ran.stdout.splitlines():
                    if line.startswith("{"):
                        yield {"round": number, "part": part} | json.loads(line)
            yield {"round": number, "case": "bytes on disk", "bytes": _size(Path(folder))}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def summary(options: argparse.Namespace, records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One line per case, with ratios taken within each round."""
    cold = {each["round"]: each["ttft_ms"] for each in records if each["case"] == "cold"}
    own = {each["round"]: each for each in records if each["case"] == "own, in memory"}
    for case in dict.fromkeys(each["case"] for each in records if "ttft_ms" in each):
        found = [each for each in records if each["case"] == case]
        times = [each["ttft_ms"] for each in found]
        line = {
            "case": case,
            "model": Path(options.model).name,
            "tokens": options.tokens,
            "rounds": len({each["round"] for each in found}),
            "ttft_ms": round(statistics.median(times), 1),
            "least_ms": round(min(times), 1),
            "most_ms": round(max(times), 1),
        }
        if case != "opening":
            ratios = [cold[each["round"]] / each["ttft_ms"] for each in found]
            line["lookup_ms"] = round(statistics.median(each["lookup_ms"] for each in found), 1)
            line["cached"] = min(each["cached"] for each in found)
            line["times_sooner_than_cold"] = spread(ratios)
        if case not in ("opening", "cold"):
            line["tokens_as_own"] = sum(each["tokens"] == own[each["round"]]["tokens"] for each in found)
            line["logits_as_own"] = sum(each["logits"] == own[each["round"]]["logits"] for each in found)
        yield line
    yield {
        "case": "bytes on disk",
        "ours": int(statistics.median(each["bytes"] for each in records if "bytes" in each)),
        "mlx": mx.__version__,
        "mlx_lm": mlx_lm.__version__,
        "device": str(mx.default_device()),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        process = Process(options)
        getattr(process, options.part)()
        for record in process.log:
            print(json.dumps(record))
        return
    records = []
    for record in rounds(options):
        print(json.dumps({name: record[name] for name in ("round", "case", "ttft_ms", "cached") if name in record}))
        records.append(record)
    lines = [json.dumps(line) for line in summary(options, records)]
    print("\n".join(lines))
    if options.out is not None:
        with options.out.open("a") as file:
            file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main()
