"""Experiment 9: hit rate under patterns of traffic, with a cache that holds only part of the documents."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from papers.chunks import published, tables
from papers.chunks.bench import Bench, Experiment, Extent, documents, fresh, rag
from papers.journal import Row
from papers.pages import Block, Paragraph, Table

PATTERNS = ("uniform", "zipf", "temporal")
_REQUESTS = 50
_TOGETHER = 2  # documents of a request
_HELD = 7  # documents that the cache has room for
_RECENT, _AGAIN = 3, 0.7  # temporal: with this probability one of so many latest documents


def _cases(extent: Extent) -> Sequence[str]:
    return PATTERNS


def draw(pattern: str, count: int, seed: int) -> list[list[int]]:
    """The documents of each request, by number."""
    chance, every = random.Random(seed), len(documents())
    weights = [1 / (rank + 1) ** (1.2 if pattern == "zipf" else 0) for rank in range(every)]
    recent: list[int] = []
    drawn = []
    for _ in range(count):
        chosen: list[int] = []
        while len(chosen) < _TOGETHER:
            again = pattern == "temporal" and recent and chance.random() < _AGAIN
            number = chance.choice(recent) if again else chance.choices(range(every), weights)[0]
            if number not in chosen:
                chosen.append(number)
        recent = [*chosen, *(number for number in recent if number not in chosen)][:_RECENT]
        drawn.append(chosen)
    return drawn


def _measure(bench: Bench, case: str) -> Row:
    every = documents()
    room = bench.first.pipeline.model.geometry.bytes_for(270 * _HELD)
    found: list[tuple[float, float]] = []
    drawn = draw(case, bench.extent.few(_REQUESTS, 15), bench.seed)
    with bench.engine(learn_chunks=True, max_ram=room) as engine:
        for number, chosen in enumerate(drawn):
            some = [every[which] for which in chosen]
            result = fresh(engine, rag(some, some[0]["question"], number))
            engine.pipeline.chunks.wait_until_idle(60)
            engine.flush()
            found.append((round(result.kv_reuse_ratio, 4), round(result.ttft_ms, 2)))
    unique = len({which for chosen in drawn for which in chosen})
    return {"reused": [hit for hit, _ in found], "ttft_ms": [ms for _, ms in found], "unique": unique, "held": _HELD}


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    theirs = {name: rest for name, *rest in published.TRAFFIC}
    patterns = tuple(
        (
            row["case"],
            str(len(row["reused"])),
            tables.percent(statistics.fmean(row["reused"])),
            tables.ms(statistics.fmean(row["ttft_ms"])),
            str(row["unique"]),
            "{} % / {} ms / {}".format(*theirs[row["case"]]),
        )
        for row in rows
    )
    curves = {
        row["case"]: [(n, 100 * statistics.fmean(row["reused"][:n])) for n in range(1, len(row["reused"]) + 1)]
        for row in rows
    }
    zipf: list[float] = next((row["reused"] for row in rows if row["case"] == "zipf"), [])
    warming = tuple(
        (str(count), tables.percent(statistics.fmean(zipf[:count])), f"{share} %")
        for count, share in published.WARM_UP
        if count <= len(zipf)
    )
    return [
        Paragraph(
            f"Requests with a header of their own and {_TOGETHER} of {len(documents())} documents; nothing is warmed, "
            f"documents are learnt between requests, and RAM holds about {_HELD}. Hit rate: share of all prompt "
            "tokens that were reused."
        ),
        Table(
            ("pattern", "requests", "hit rate", "mean TTFT ms", "documents", "KVBoost: hit rate / TTFT / chunks"),
            patterns,
            f"Ours; published: {published.SOURCE}",
        ),
        Table(("requests", "hit rate so far", "KVBoost"), warming, "Warming up, Zipf"),
        tables.lines(folder, "traffic", "Hit rate so far", curves, x="requests", y="hit rate, %"),
    ]


EXPERIMENT = Experiment(9, "traffic", "Hit rate under traffic", _cases, _measure, _blocks)
