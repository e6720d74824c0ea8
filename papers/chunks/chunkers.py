"""Experiment 8: ways to divide plain text into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from papers.chunks import published, tables, texts
from papers.chunks.bench import Bench, Experiment, Extent, documents, fresh, median
from papers.journal import Row
from papers.pages import Block, Paragraph, Table


def _cases(extent: Extent) -> Sequence[str]:
    return ("fixed", "semantic", "document", "content")


def _measure(bench: Bench, case: str) -> Row:
    runs, chosen = bench.extent.few(5, 2), documents()[:4]
    system, moved, hits = [], [], []
    with bench.engine(chunker=case) as engine:
        before = engine.stats().bytes.get("ram", 0)
        engine.warm(**texts.raw(chosen, "-"))
        engine.flush()
        taken, chunks = engine.stats().bytes["ram"] - before, engine.stats().extra["chunks"]["computed"]
        for number in range(runs):
            asked = documents()[number % 4]["question"]
            system.append(fresh(engine, texts.raw(chosen, asked)).ttft_ms)
            turned = chosen[number % 3 + 1 :] + chosen[: number % 3 + 1]
            header = f"Note {number}: somebody has put these together in haste.\n\n"
            result = fresh(engine, texts.raw(turned, asked, header))
            moved.append(result.ttft_ms)
            hits.append(result.kv_reuse_ratio)
    return {
        "same_ms": round(median(system), 2),
        "moved_ms": round(median(moved), 2),
        "hit_rate": sum(hits) / len(hits),
        "bytes": taken,
        "chunks": chunks,
    }


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    ours = tuple(
        (
            row["case"],
            str(row["chunks"]),
            tables.ms(row["same_ms"]),
            tables.ms(row["moved_ms"]),
            tables.percent(row["hit_rate"]),
            f"{row['bytes'] / 1e6:.1f}",
        )
        for row in rows
    )
    theirs = tuple(
        (name, "-", tables.ms(system), tables.ms(moved), f"{hits:.1f} %", f"{mb}")
        for name, system, moved, hits, mb in published.CHUNKERS
    )
    headers = ("chunker", "chunks", "same text, TTFT ms", "moved, TTFT ms", "moved, hit rate", "MB")
    shown = {"same text": [row["same_ms"] for row in rows], "moved": [row["moved_ms"] for row in rows]}
    return [
        Paragraph(
            "Plain text of four documents, warmed: asked about as it is (KVBoost's system prompt), and with the "
            "documents in another order behind a new header (its RAG)."
        ),
        Table(headers, ours, "Ours"),
        Table(headers, theirs, f"Published: {published.SOURCE}"),
        tables.bars(folder, "chunkers", "TTFT by chunker", [row["case"] for row in rows], shown, y="TTFT, ms"),
    ]


EXPERIMENT = Experiment(8, "chunkers", "Chunking strategies", _cases, _measure, _blocks)
