"""Experiment 2: where the time of a RAG request goes, and what repair costs beside an ordinary step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from papers.chunks import published, tables
from papers.chunks.bench import Bench, Experiment, Extent, fresh, step_ms
from papers.chunks.modes import workload
from papers.journal import Row
from papers.pages import Block, Paragraph, Table

_ANSWER = 16
STAGES = ("compile", "link", "load", "select", "repair", "carry", "prefill", "decode", "total")


def _cases(extent: Extent) -> Sequence[str]:
    return ("off", "chunks, none", "chunks, seam:16", "chunks, attention:0.15", "chunks, impact:0.13")


def _measure(bench: Bench, case: str) -> Row:
    warm, request = workload("RAG, another order after a new header")
    mode, _, rule = case.partition(", ")
    how = {"reuse": mode} | ({"repair": rule} if rule else {})
    stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with bench.engine() as engine:
        warm(engine)
        for number in range(bench.extent.few(bench.extent.runs, 2)):
            result = fresh(engine, request(number), _ANSWER, **how)
            parts = {name: result.timings.get(name, 0.0) for name in STAGES[:-1]} | {"total": result.total_ms}
            parts["prefill"] -= parts["select"] + parts["repair"] + parts["carry"]
            for stage, value in parts.items():
                stages[stage].append(value)
        rows = result.repaired_tokens + result.prompt_tokens - result.cached_tokens
        ordinary = step_ms(engine, result.prompt_tokens, rows, 3) if rule else None
    mean = {stage: round(statistics.fmean(values), 3) for stage, values in stages.items()}
    least = min(stages["repair"])
    return {
        "ms": mean,
        "answer_tokens": len(result.token_ids),
        "rows": rows,
        "prompt_tokens": result.prompt_tokens,
        "ordinary_ms": ordinary,
        "repair_least_ms": round(least, 3),
    }


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    names = {
        "compile": "render and tokenize",
        "link": "cache lookup",
        "load": "load and turn keys",
        "select": "choose tokens to repair",
        "repair": "repair and rest of the prompt",
        "carry": "carry changes over to other tokens",
        "prefill": "other prefill",
        "decode": f"decode (at most {_ANSWER} tokens)",
        "total": "total",
    }
    ours = tuple((names[stage], *(tables.ms(row["ms"][stage]) for row in rows)) for stage in STAGES)
    costs = tuple(
        (
            row["case"],
            str(row["rows"]),
            tables.ms(row["repair_least_ms"]),
            tables.ms(row["ordinary_ms"]),
            f"{row['repair_least_ms'] / row['ordinary_ms']:.2f}",
            tables.ms(row["ms"]["select"]),
        )
        for row in rows
        if row["ordinary_ms"]
    )
    theirs = tuple((stage, tables.ms(base), tables.ms(reuse)) for stage, base, reuse in published.BREAKDOWN)
    shown = {stage: [row["ms"][stage] for row in rows] for stage in STAGES[:-1]}
    return [
        Paragraph("Mean milliseconds of a RAG request with its documents in another order after a header of its own."),
        Table(("stage", *(row["case"] for row in rows)), ours, "Ours"),
        Table(("stage", "baseline", "chunk reuse"), theirs, f"Published: {published.SOURCE}"),
        Table(
            ("repair", "rows in the pass", "fastest pass, ms", "ordinary step, ms", "ratio", "choosing, ms (mean)"),
            costs,
            "The pass that repairs, beside an ordinary prefill step of as many rows with as many tokens before it",
        ),
        tables.bars(folder, "breakdown", "Stages of a request", [row["case"] for row in rows], shown, y="ms"),
    ]


EXPERIMENT = Experiment(2, "breakdown", "Latency breakdown", _cases, _measure, _blocks)
