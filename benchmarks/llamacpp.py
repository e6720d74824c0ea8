"""Time to first token under llama-cpp-python: cold, with the library's own caches, and with ours, also after a restart.

    .peers/llamacpp/bin/python benchmarks/llamacpp.py MODEL.gguf [--tokens 4000] [--rounds 5] [--flash]
                                                      [--out benchmarks/results/llamacpp.jsonl]

Each round starts three processes, one after the other, over folders of its own. The first answers a question on a long
text cold. Another question is answered from the context and handed to each cache in turn. Then the first is asked
again: from the context as it is, and with the context emptied from the library's cache in RAM and from our store. The
other two are restarts: the library's cache on disk, and our store. Times are from the call to the first token. Files
are in the page cache. What a restart needs to open our store is told apart, as is what follows the answer, most of
which the library copies before any cache sees it. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import llama_cpp
import numpy as np
from llama_cpp import Llama, LogitsProcessorList
from llama_cpp.llama_cache import BaseLlamaCache, LlamaDiskCache, LlamaRAMCache
from ratios import spread

from keepwarm.integrations.llamacpp import KeepwarmCache

QUESTIONS = ("\n\nWhich rule matters most here?", "\n\nWhat may never be done on a Monday, and who says so?")
NEW = 8


def text(llm: Llama, tokens: int) -> list[int]:
    """Ids of exactly `tokens` tokens of prose."""
    rules = (f"Rule {n}: on day {n % 31} a clerk files form {n * 37 % 1009} before noon." for n in range(tokens))
    return llm.tokenize("\n".join(rules).encode())[:tokens]


class Process:
    """One process's model. `log` gets one record for each time that is taken."""

    def __init__(self, options: argparse.Namespace) -> None:
        threads = options.threads
        self.llm = Llama(
            options.model,
            n_ctx=options.tokens + 512,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=options.flash,
            verbose=False,
        )
        head = text(self.llm, options.tokens)
        self.prompts = [head + self.llm.tokenize(each.encode(), add_bos=False) for each in QUESTIONS]
        self.folder = Path(options.folder)
        self.log: list[dict[str, Any]] = []

    def ask(self, case: str, number: int, cache: BaseLlamaCache | None) -> list[int]:
        """Answer one question. Return the tokens."""
        first: list[float] = []
        chosen: list[int] = []

        def note(given: Any, logits: Any) -> Any:
            first.append(time.perf_counter())
            chosen.append(int(np.argmax(logits)))
            return logits

        self.llm.set_cache(cache)
        began = time.perf_counter()
        self.llm.create_completion(
            self.prompts[number], max_tokens=NEW, temperature=0, logits_processor=LogitsProcessorList([note])
        )
        ended = time.perf_counter()
        self.log.append({
            "case": case,
            "ttft_ms": 1000 * (first[0] - began),
            "behind_ms": 1000 * (ended - first[-1]),
            "tokens": chosen,
            "cached": getattr(cache, "cached_tokens", None),
        })
        return chosen

    def forget(self) -> None:
        self.llm._ctx.kv_cache_clear()
        self.llm.reset()

    def ours(self) -> KeepwarmCache:
        began = time.perf_counter()
        cache = KeepwarmCache(self.llm, store=self.folder / "store", max_disk="8GiB", max_ram=0)
        self.log.append({"case": "opening", "ttft_ms": 1000 * (time.perf_counter() - began)})
        return cache

    def disk(self) -> LlamaDiskCache:
        return LlamaDiskCache(str(self.folder / "own"), capacity_bytes=8 << 30)

    def first(self) -> None:
        """Cold; then each cache is given the first question's answer, and the second question is asked."""
        ram, ours = LlamaRAMCache(8 << 30), self.ours()
        self.llm.eval(self.prompts[0][:64])  # warms up
        self.forget()
        self.ask("cold", 1, None)
        for name, cache in (("own, in RAM", ram), ("own, on disk", self.disk()), ("ours", ours)):
            self.ask(f"{name}: stored", 0, cache)  # from the context; the answer is handed to the cache
        ours.flush()
        self.ask("in the context", 1, None)
        for name, cache in (("own, in RAM", ram), ("ours", ours)):
            self.forget()
            self.ask(name, 1, cache)
        ours.close()

    def restart_own(self) -> None:
        self.ask("own, after a restart", 1, self.disk())

    def restart_ours(self) -> None:
        cache = self.ours()
        self.ask("ours, after a restart", 1, cache)
        cache.close()


def rounds(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for part in ("first", "restart_own", "restart_ours"):
                command = [sys.executable, __file__, options.model, "--part", part, "--folder", folder]
                command += ["--tokens", str(options.tokens), "--threads", str(options.threads)]
                command += ["--flash"] if options.flash else []
                ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                for line in ran.stdout.splitlines():
                    if line.startswith("{"):
                        yield {"round": number, "part": part} | json.loads(line)
                if part == "first":
                    sizes = {each: _size(Path(folder) / each) for each in ("own", "store")}
                    yield {"round": number, "case": "bytes on disk"} | sizes
            shutil.rmtree(Path(folder) / "own", ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def summary(options: argparse.Namespace, records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One line per case, with ratios taken within each round."""
    cold = {each["round"]: each["ttft_ms"] for each in records if each["case"] == "cold"}
    answers = {each["round"]: each["tokens"] for each in records if each["case"] == "in the context"}
    for case in dict.fromkeys(each["case"] for each in records if "ttft_ms" in each):
        found = [each for each in records if each["case"] == case]
        times = [each["ttft_ms"] for each in found]
        second = case in ("cold", "in the context", "own, in RAM", "ours") or "restart" in case
        line = {
            "case": case,
            "model": Path(options.model).stem,
            "tokens": options.tokens,
            "rounds": len({each["round"] for each in found}),
            "ttft_ms": round(statistics.median(times), 1),
            "least_ms": round(min(times), 1),
            "most_ms": round(max(times), 1),
        }
        if behind := [each["behind_ms"] for each in found if "behind_ms" in each]:
            line["behind_ms"] = round(statistics.median(behind), 1)
        if second:
            ratios = [cold[each["round"]] / each["ttft_ms"] for each in found]
            line["times_sooner_than_cold"] = spread(ratios)
            line["answers_as_in_the_context"] = sum(each["tokens"] == answers[each["round"]] for each in found)
        yield line
    sizes = [each for each in records if each["case"] == "bytes on disk"]
    yield {
        "case": "bytes on disk",
        "own": int(statistics.median(each["own"] for each in sizes)),
        "ours": int(statistics.median(each["store"] for each in sizes)),
        "flash_attn": options.flash,
        "threads": options.threads,
        "llama_cpp": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode().strip(),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash", action="store_true")
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
    lines = [json.dumps(line) for line in summary(options, list(rounds(options)))]
    print("\n".join(lines))
    if options.out is not None:
        with options.out.open("a") as file:
            file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main()
