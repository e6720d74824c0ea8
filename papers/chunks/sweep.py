"""Experiment 3: size of fixed chunks times width of the repaired seam."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from papers.chunks import published, tables, texts
from papers.chunks.bench import Bench, Experiment, Extent, documents, follow, fresh, median
from papers.journal import Row
from papers.pages import Block, Paragraph, Table

_ANSWER = 16


def _cases(extent: Extent) -> Sequence[str]:
    sizes, overlaps = ((64, 128), (0, 16)) if extent.quick else ((32, 64, 128, 256), (0, 8, 16, 32))
    return [f"{size}/{overlap}" for size in sizes for overlap in overlaps if 2 * overlap < size]


def _measure(bench: Bench, case: str) -> Row:
    size, overlap = (int(part) for part in case.split("/"))
    chosen = documents()[:3]
    times, matches, hits, shifted = [], [], [], []
    repair = f"seam:{overlap}" if overlap else "none"
    with bench.engine(chunker="fixed", chunk_size=size, chunk_least=min(32, size), repair=repair) as engine:
        engine.warm(**texts.raw(chosen, "-"))
        chunks = engine.stats().extra["chunks"]["computed"]
        for number in range(bench.extent.few(4, 2)):
            given = texts.raw(chosen, documents()[number]["question"])
            cold = follow(engine, given, _ANSWER, reuse="off")
            led = follow(engine, given, cold.ids)
            same = zip(led.greedy, cold.ids, strict=True)
            matches.append(statistics.fmean(a == b for a, b in same))
            result = fresh(engine, given)
            times.append(result.ttft_ms)
            hits.append(result.kv_reuse_ratio)
            moved = texts.raw(chosen, documents()[number]["question"], f"Note {number}: a header nobody has seen.\n\n")
            told = engine.explain(**moved)
            shifted.append(told.cached_tokens / told.prompt_tokens)
        size_bytes = engine.pipeline.model.geometry.bytes_for(size)
    return {
        "size": size,
        "overlap": overlap,
        "ttft_ms": round(median(times), 2),
        "match": statistics.fmean(matches),
        "hit_rate": statistics.fmean(hits),
        "shifted": statistics.fmean(shifted),
        "chunks": chunks,
        "chunk_bytes": size_bytes,
    }


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    ours = tuple(
        (
            str(row["size"]),
            str(row["overlap"]),
            tables.ms(row["ttft_ms"]),
            f"{100 * row['match']:.1f}",
            f"{row['hit_rate']:.3f}",
            f"{row['shifted']:.3f}",
            f"{row['chunk_bytes'] / 1e6:.2f}",
        )
        for row in rows
    )
    theirs = tuple(
        (str(size), str(overlap), tables.ms(ms), f"{match}", f"{hit:.3f}", "-", f"{mb}")
        for size, overlap, ms, match, hit, mb in published.SWEEP
    )
    headers = ("chunk size", "overlap", "TTFT ms", "match %", "hit rate", "hit rate, shifted", "MB per chunk")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(f"overlap {row['overlap']}", []).append((row["size"], row["ttft_ms"]))
    return [
        Paragraph(
            "Plain text of three documents, warmed, then asked about. Overlap is the width of the seam that is "
            f"recomputed on both sides of a border; match is agreement with the full prefill's first {_ANSWER} greedy "
            "tokens, led along them. Shifted: what would be found after a header that was never seen; fixed "
            "chunks then begin elsewhere. Content-defined ones, the default, are in experiment 8."
        ),
        Table(headers, ours, "Ours"),
        Table(headers, theirs, f"Published: {published.SOURCE}"),
        tables.lines(folder, "sweep", "TTFT by chunk size", curves, x="tokens per chunk", y="TTFT, ms"),
    ]


EXPERIMENT = Experiment(3, "sweep", "Chunk size and overlap", _cases, _measure, _blocks)
