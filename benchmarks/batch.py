"""Concurrent requests on one prefix against the same requests in turn, paired in one run.

    python benchmarks/batch.py [--requests 1 4 16 32] [--prefix 3000] [--new 32] [--rounds 2] [--model demo]
                               [--output benchmarks/results]

Writes `batch.jsonl`: the machine, one line per measurement, one summary per number of requests. Every round runs the
requests in turn through `Engine.generate`, then all at once through a `Batcher`, right after one another; all arrive at
the same moment. The prefix is warm (in RAM) for both. Answers are checked to be equal. Memory is what the pages in use
take at their peak; `slots_used` the share of their slots that held tokens. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from keepwarm import Batcher, Engine, Generation
from keepwarm.runtime.pages import page_bytes, pages_for

TOPICS = ("ships", "rain", "bread", "clocks", "maps", "salt", "wool", "glass")
ASKS = ("Name one rule about {}.", "What may never be done with {}?", "Who files the form for {}?", "Explain {}.")

SHARES = {"p50": 0.5, "p90": 0.9, "max": 1.0}


def system_prompt(engine: Engine, tokens: int) -> str:
    """Text of about `tokens` tokens."""
    rules = (f"Rule {n}: on day {n % 31} a clerk files form {n * 37 % 1009} before noon.\n" for n in range(10_000))
    text, count = "", 0
    for rule in rules:
        count += len(engine.pipeline.tokenizer.encode(rule)[0])
        if count > tokens:
            break
        text += rule
    return text


def prompts(system: str, count: int) -> list[list[dict[str, str]]]:
    """Chats on one system prompt, each with another question."""
    asked = [ask.format(topic) for topic in TOPICS for ask in ASKS]
    return [
        [{"role": "system", "content": system}, {"role": "user", "content": asked[n % len(asked)]}]
        for n in range(count)
    ]


def in_turn(engine: Engine, chats: list[Any], new: int) -> tuple[list[Generation], dict[str, Any]]:
    started = time.perf_counter()
    answers, first = [], []
    for chat in chats:
        waited = (time.perf_counter() - started) * 1e3
        answers.append(engine.generate(messages=chat, max_new_tokens=new))
        first.append(waited + answers[-1].ttft_ms)
    return answers, figures(answers, first, time.perf_counter() - started)


def together(engine: Engine, chats: list[Any], new: int) -> tuple[list[Generation], dict[str, Any]]:
    with Batcher(engine, max_batch=max(32, len(chats))) as batcher:
        started = time.perf_counter()
        tickets = [batcher.submit(messages=chat, max_new_tokens=new) for chat in chats]
        answers = [ticket.result() for ticket in tickets]
        seconds = time.perf_counter() - started
        stats = batcher.stats()
    size = page_bytes(engine.pipeline.model.geometry)
    made = figures(answers, [answer.ttft_ms for answer in answers], seconds)
    one = pages_for(answers[0].prompt_tokens + new)
    return answers, made | {
        "peak_bytes": stats.peak_pages * size,
        "one_request_bytes": one * size,
        "slots_used": round(stats.slots_used, 4),
    }


def figures(answers: list[Generation], first: list[float], seconds: float) -> dict[str, Any]:
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "ttft_ms": {name: round(percentile(first, share), 1) for name, share in SHARES.items()},
    }


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prefix", type=int, default=3000)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--most-in-turn", type=int, default=16, help="requests run in turn at most; the rate is theirs")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", help="float32 or bfloat16; the machine's own choice without it")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        Engine.from_pretrained(options.model, dtype=options.dtype) as engine,
        (options.output / "batch.jsonl").open("w") as out,
    ):
        machine = {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "dtype": engine.pipeline.model.identity.dtype,
            "attention": engine.pipeline.model.attention,
            "prefix": options.prefix,
            "new": options.new,
        }
        print(json.dumps(machine), file=out)
        system = system_prompt(engine, options.prefix)
        for chat in prompts(system, 3):  # the prefix is stored, and every path has run once
            engine.generate(messages=chat, max_new_tokens=2)
        engine.flush()
        alone_peak = 0
        for count in options.requests:
            chats = prompts(system, count)
            rows = []
            for number in range(options.rounds):
                single, turn = in_turn(engine, chats[: options.most_in_turn], options.new)
                many, batch = together(engine, chats, options.new)
                assert [a.token_ids for a in many[: len(single)]] == [a.token_ids for a in single], "answers differ"
                row = {"requests": count, "round": number, "in_turn": turn, "batch": batch}
                rows.append(row)
                print(json.dumps(row), file=out, flush=True)
            alone_peak = alone_peak or rows[0]["batch"]["peak_bytes"]
            last = rows[-1]["batch"]
            speedups = [r["batch"]["tokens_per_second"] / r["in_turn"]["tokens_per_second"] for r in rows]
            summary = {
                "requests": count,
                "tokens_per_second": {
                    way: statistics.median(row[way]["tokens_per_second"] for row in rows)
                    for way in ("in_turn", "batch")
                },
                "speedup": round(statistics.median(speedups), 2),
                "ttft_ms": {way: rows[-1][way]["ttft_ms"] for way in ("in_turn", "batch")},
                "bytes_per_added_request": (last["peak_bytes"] - alone_peak) // (count - 1) if count > 1 else None,
                "peak_bytes_of_one": round(last["peak_bytes"] / last["one_request_bytes"], 3),
                "slots_used": last["slots_used"],
            }
            print(json.dumps({"summary": summary}), file=out, flush=True)
            print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
