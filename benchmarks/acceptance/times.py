"""What reuse costs on a device: by tier and length, beside a copy's ceiling, a bare step, and transformers."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.acceptance.models import shaped, token_ids
from transformers import DynamicCache

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.core.blocks import token_ids as as_ids
from keepwarm.runtime.arena.arena import Arena

ROUNDS = 3
FIRST = 2  # rounds that are not counted: what comes a second time is recorded as a graph
QUESTION, DECODED = 24, 64  # tokens
AT_ONCE = 32
COPIED = 1 << 28  # bytes


def seconds(work: Callable[[], Any], device: str) -> float:
    """Return how long `work` takes, until the device has done it."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def ceilings(device: str) -> dict[str, Any]:
    """The speed of one large copy from pinned memory to the device and back, in GB/s."""
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    into = min(seconds(lambda: there.copy_(host, non_blocking=True), device) for _ in range(5))
    back = min(seconds(lambda: host.copy_(there, non_blocking=True), device) for _ in range(5))
    return {"copy_in_gb_per_s": round(COPIED / into / 1e9, 2), "copy_out_gb_per_s": round(COPIED / back / 1e9, 2)}


def measured(
    size: str, device: str, lengths: list[int], ceiling: dict[str, Any], attention: str = "model"
) -> Iterator[dict[str, Any]]:
    """Yield a line for each length: milliseconds to the first token by tier, floors, and transformers'."""
    pair = shaped(size, device)
    for length in lengths:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            line = {"attention": attention, "size": size, "prompt_tokens": length + QUESTION}
            line |= _tiers(pair, Path(folder), length, attention)
        line |= _floor(pair, length, device, attention)
        copied = line["kv_bytes"] / ceiling["copy_in_gb_per_s"] / 1e6
        line["ram_floor_ms"] = round(copied + line["step_ms"], 2)
        line["ram_over_floor"] = round(line["ttft_ms"]["ram"] / line["ram_floor_ms"], 3)
        line["transformers"] = _transformers(pair, length, device)
        if device == "cuda":
            line["peak_bytes"] = torch.cuda.max_memory_allocated()
        yield line
    with tempfile.TemporaryDirectory() as folder:
        yield {"attention": attention, "size": size} | _at_once(pair, Path(folder), min(lengths), attention)


def _tiers(pair: tuple[Any, Any], folder: Path, length: int, attention: str) -> dict[str, Any]:
    prompt = token_ids(length)
    settings: dict[str, Any] = {"store": folder / "store", "max_ram": "64GiB", "max_device": "64GiB"}
    settings["attention"] = attention
    times: dict[str, list[float]] = {tier: [] for tier in ("cold", "device", "ram", "disk")}
    loads: dict[str, list[float]] = {"ram": [], "disk": []}

    def ask(engine: Engine, tier: str, number: int) -> Any:
        asked = [*prompt, *token_ids(QUESTION, 71 + number)]
        result = engine.generate(asked, max_new_tokens=1, reuse="off" if tier == "cold" else "exact")
        if tier != "cold" and not result.cached_by_tier.get(tier):
            raise RuntimeError(f"nothing of {length} tokens came from {tier}: {dict(result.cached_by_tier)}")
        if number < 0:
            return result
        times[tier].append(result.ttft_ms)
        if tier in loads:
            loads[tier].append(result.timings["load"])
        return result

    with Engine.from_pretrained(pair, **settings) as engine:
        engine.generate(token_ids(64, 3), max_new_tokens=2, reuse="off")
        engine.warm(prompt)
        engine.flush()
        for number in range(-FIRST, ROUNDS):
            ask(engine, "cold", number)
            engine.generate([*prompt, 7], max_new_tokens=1)  # the cold request may have taken the memory
            ask(engine, "device", number)
            engine.pipeline.pool.forget()
            ask(engine, "ram", number)
        decoded = engine.generate([*prompt, 5], max_new_tokens=DECODED, ignore_eos=True)
        kv_bytes = length * engine.pipeline.model.geometry.bytes_per_token
    for number in range(ROUNDS):
        with Engine.from_pretrained(pair, **settings) as engine:
            engine.generate(token_ids(64, 3), max_new_tokens=2, reuse="off")
            ask(engine, "disk", number)
    median = {tier: round(statistics.median(found), 2) for tier, found in times.items()}
    loaded = {tier: round(statistics.median(found), 2) for tier, found in loads.items()}
    return {
        "kv_bytes": kv_bytes,
        "ttft_ms": median,
        "load_ms": loaded,
        "load_gb_per_s": {tier: round(kv_bytes / max(ms, 1e-3) / 1e6, 2) for tier, ms in loaded.items()},
        "decode_tokens_per_s": round(decoded.tokens_per_sec or 0.0, 1),
    }


def _floor(pair: tuple[Any, Any], length: int, device: str, attention: str) -> dict[str, Any]:
    """The bare step over a question, with everything before it in place."""
    with Engine.from_pretrained(pair, max_device="64GiB", attention=attention) as engine:
        model = engine.pipeline.model
        arena = Arena(model.geometry, length + QUESTION, model.runner.port)
        tokens = as_ids([*token_ids(length), *token_ids(QUESTION, 31)])
        for start in range(0, length, 1024):
            model.runner.extend(tokens[start : min(start + 1024, length)], arena.cache, start)

        def step() -> None:
            arena.seek(length)
            model.runner.step(tokens[length:], arena.cache, length).argmax().item()

        found = statistics.median([seconds(step, device) for _ in range(FIRST + ROUNDS)][FIRST:])
        arena.free()
    return {"step_ms": round(found * 1e3, 2)}


def _transformers(pair: tuple[Any, Any], length: int, device: str) -> dict[str, Any]:
    """The same prompt through transformers alone: its first token without a cache, and decoding."""
    model = pair[0]
    ids = torch.tensor([[*token_ids(length), *token_ids(QUESTION, 31)]], device=device)

    def run(new: int) -> float:
        def work() -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=DynamicCache(config=model.config),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )

        return seconds(work, device)

    run(1)
    first = statistics.median(run(1) for _ in range(ROUNDS))
    longer = run(DECODED)
    speed = (DECODED - 1) / max(longer - first, 1e-9)
    return {"cold_ttft_ms": round(first * 1e3, 2), "decode_tokens_per_s": round(speed, 1)}


def _at_once(pair: tuple[Any, Any], folder: Path, length: int, attention: str) -> dict[str, Any]:
    """Many questions on one beginning, at once and in turn: seconds until all are answered, with default settings.
    Those that are counted are new, and so are the others."""
    prompt = token_ids(length)

    def asked(first: int, count: int = AT_ONCE) -> list[list[int]]:
        return [[*prompt, *token_ids(QUESTION, first + number)] for number in range(count)]

    how: dict[str, Any] = {"max_new_tokens": DECODED, "ignore_eos": True}
    with Engine.from_pretrained(pair, store=folder / "store", attention=attention) as engine:
        engine.warm(prompt)
        for each in asked(101, FIRST):
            engine.generate(each, **how)
        started = time.perf_counter()
        for each in asked(41):
            engine.generate(each, **how)
        turns = time.perf_counter() - started
        with Batcher(engine, max_batch=AT_ONCE) as batcher:

            def together(first: int) -> float:
                started = time.perf_counter()
                for ticket in [batcher.submit(each, **how) for each in asked(first)]:
                    ticket.result()
                return time.perf_counter() - started

            counted = [together(141 + 50 * number) for number in range(FIRST + 1)][FIRST]
    return {
        "requests": AT_ONCE,
        "prompt_tokens": length + QUESTION,
        "in_turn_s": round(turns, 2),
        "at_once_s": round(counted, 2),
        "in_turn_over_at_once": round(turns / counted, 2),
    }
