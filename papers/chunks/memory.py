"""Experiment 6: what chunks take in memory, how long they take to load, and from which request on they pay."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from keepwarm.core.geometry import naive_bytes_per_token
from papers.chunks import published, tables, texts
from papers.chunks.bench import Bench, Experiment, Extent, fresh, median
from papers.journal import Row
from papers.pages import Block, Paragraph, Table

_SIZES = (32, 64, 128, 256, 512)
_BREAK_EVEN = "break-even"


def _cases(extent: Extent) -> Sequence[str]:
    return [*(str(size) for size in _SIZES), _BREAK_EVEN]


def _measure(bench: Bench, case: str) -> Row:
    return _break_even(bench) if case == _BREAK_EVEN else _chunk(bench, int(case))


def _chunk(bench: Bench, size: int) -> Row:
    """One chunk of so many tokens: its bytes in RAM and on disk, and the time to place it from each."""
    ids = [3 + number * 7919 % 40_000 for number in range(size)]
    rounds = bench.extent.few(7, 3)
    times: dict[str, list[float]] = {"ram": [], "disk": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        bench.engine(store=folder, chunker="fixed", chunk_size=size, chunk_least=16) as engine,
    ):
        before = engine.stats().bytes
        engine.warm(ids)
        engine.flush()
        after = engine.stats().bytes
        for number in range(rounds):
            given = {"prompt": [*ids, 5, 6, 7 + number]}  # fixed chunks are found where they began
            for tier in times:
                if tier == "disk":
                    engine.pipeline.archive.clear_ram()
                result = fresh(engine, given, repair="none")
                if result.cached_by_tier.get(tier):
                    times[tier].append(result.timings["load"])
        geometry, model = engine.pipeline.model.geometry, engine.pipeline.model
        naive = naive_bytes_per_token(model.model.config.to_dict(), model.identity.dtype)
        opening = len(engine.pipeline.chunks.opening)
    return {
        "ram_bytes": after["ram"] - before.get("ram", 0),
        "disk_bytes": after["disk"] - before.get("disk", 0),
        "theoretical_bytes": geometry.bytes_for(size),
        "naive_bytes": naive * size,
        "opening": opening,
        "ram_ms": round(median(times["ram"]), 3) if times["ram"] else None,
        "disk_ms": round(median(times["disk"]), 3) if times["disk"] else None,
    }


def _break_even(bench: Bench) -> Row:
    """A long system prompt, warmed once: what that costs, what a request then saves."""
    with bench.engine() as engine:
        given = texts.system_prompt("What is this about?", 0)
        before = engine.stats().bytes.get("ram", 0)
        warmed = engine.warm(messages=given["messages"][:1])
        engine.flush()
        taken = engine.stats().bytes["ram"] - before
        cold, hit = [], []
        for number in range(1, bench.extent.runs + 1):
            given = texts.system_prompt("What is this about?", number)
            cold.append(fresh(engine, given, reuse="off").ttft_ms)
            hit.append(fresh(engine, given).ttft_ms)
    return {
        "warm_ms": round(warmed.seconds * 1e3, 2),
        "off_ms": statistics.fmean(cold),
        "ms": statistics.fmean(hit),
        "bytes": taken,
        "tokens": warmed.tokens,
    }


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    sizes = [row for row in rows if row["case"] != _BREAK_EVEN]
    mb = tuple(
        (
            row["case"],
            f"{row['ram_bytes'] / 1e6:.2f}",
            f"{row['disk_bytes'] / 1e6:.2f}",
            f"{row['theoretical_bytes'] / 1e6:.2f}",
            f"{row['naive_bytes'] / 1e6:.2f}",
            tables.ms(row["ram_ms"]),
            tables.ms(row["disk_ms"]),
            "{:.2f} / {:.2f}".format(*theirs),
        )
        for row in sizes
        for theirs in [next(entry[1:] for entry in published.MEMORY if entry[0] == int(row["case"]))]
    )
    blocks: list[Block] = []
    if sizes:
        curves = {
            name: [(int(row["case"]), row[key] / 1e6) for row in sizes]
            for name, key in (("in RAM", "ram_bytes"), ("theoretical", "theoretical_bytes"))
        }
        headers = (
            "tokens",
            "RAM MB",
            "disk MB",
            "theoretical MB",
            "with all heads MB",
            "from RAM ms",
            "from disk ms",
            "KVBoost: actual / theoretical MB",
        )
        blocks = [
            Paragraph(
                "Actual: what the tiers count for one chunk; theoretical: layers × KV heads × (key + value) × tokens × "
                "bytes of the dtype. With all heads is that formula with query heads for KV heads, as KVBoost's "
                f"theoretical column has it. Each chunk is stored with its neutral start ({sizes[0]['opening']} "
                "tokens, one block for all chunks). Times: verification, copy and turning of keys included."
            ),
            Table(headers, mb, f"Ours; published: {published.SOURCE}"),
            tables.lines(folder, "memory", "Memory of a chunk", curves, x="tokens", y="MB"),
        ]
    for row in rows:
        if row["case"] == _BREAK_EVEN:
            saved = row["off_ms"] - row["ms"]
            ours = {
                "baseline TTFT": f"{tables.ms(row['off_ms'])} ms",
                "cached TTFT": f"{tables.ms(row['ms'])} ms",
                "speed-up": tables.times(row["off_ms"] / row["ms"]),
                "cache memory": f"{row['bytes'] / 1e6:.1f} MB",
                "warm-up": f"{tables.ms(row['warm_ms'])} ms",
                "break-even": f"{row['warm_ms'] / saved:.2f} requests",
            }
            table = tuple((name, ours[name], theirs) for name, theirs in published.BREAK_EVEN.items())
            caption = f"A system prompt of {row['tokens']:,} tokens; published: {published.SOURCE}"
            blocks.append(Table(("", "ours", "KVBoost"), table, caption))
    return blocks


EXPERIMENT = Experiment(6, "memory", "Memory and break-even", _cases, _measure, _blocks)
