"""Experiment 1: time to first token under each mode, over four workloads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from keepwarm.engine import Engine
from papers.chunks import published, tables, texts
from papers.chunks.bench import MODES, Bench, Experiment, Extent, Given, documents, fresh, median, rag, warm_documents
from papers.journal import Row
from papers.pages import Block, Paragraph, Table

Workload = tuple[Callable[[Engine], object], Callable[[int], Given]]  # warms; makes a request by number


def _cases(extent: Extent) -> Sequence[str]:
    return ("system prompt", "RAG document", "RAG, another order after a new header", "few-shot")


def workload(case: str) -> Workload:
    """The request of each number, and what makes the cache ready for it."""
    chosen = documents()[3:7]
    asked = chosen[0]["question"]
    same = [{"role": "system", "content": "Answer from the documents."}]

    def document(number: int) -> Given:
        messages = [*same, {"role": "user", "content": f"{number}: {asked}"}]
        return {"messages": messages, "documents": [{"title": d["title"], "text": d["text"]} for d in chosen]}

    def moved(number: int) -> Given:
        turned = chosen[number % 4 :] + chosen[: number % 4]
        return rag(turned if number % 2 else turned[::-1], asked, number)

    def system(number: int) -> Given:
        return texts.system_prompt("Answer in one sentence: what is this about?", number)

    requests = {"system prompt": system, "RAG document": document, "few-shot": texts.few_shot}
    if case in requests:
        make = requests[case]
        return lambda engine: engine.generate(**make(999), max_new_tokens=1), make
    return lambda engine: warm_documents(engine, chosen), moved


def _measure(bench: Bench, case: str) -> Row:
    warm, request = workload(case)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    reused: dict[str, float] = {}
    labels: dict[str, str] = {}
    with bench.engine() as engine:
        warm(engine)
        engine.flush()
        for number in range(bench.extent.runs):
            for place, mode in enumerate(MODES):
                result = fresh(engine, request(number * len(MODES) + place), reuse=mode)
                found[mode].append(round(result.ttft_ms, 2))
                reused[mode], labels[mode] = round(result.kv_reuse_ratio, 4), result.exactness
    return {"ttft_ms": found, "reused": reused, "labels": labels, "prompt_tokens": result.prompt_tokens}


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    ours = []
    for row in rows:
        base = median(row["ttft_ms"]["off"])
        for mode in MODES:
            mine = median(row["ttft_ms"][mode])
            ours.append((
                row["case"],
                mode,
                f"{row['prompt_tokens']:,}",
                tables.ms(mine),
                tables.times(base / mine),
                tables.percent(row["reused"][mode]),
                row["labels"][mode],
            ))
    theirs = tuple((work, mode, tables.ms(ms), tables.times(ratio)) for work, mode, ms, ratio in published.MODES)
    shown = {mode: [statistics.median(row["ttft_ms"][mode]) for row in rows] for mode in MODES}
    return [
        Paragraph(
            "Medians of runs in turn, each with a question of its own; everything that hits comes from RAM. `off` is "
            "their baseline, `exact` and `prefix` their prefix cache, `chunks` their chunk reuse (repaired as the "
            "engine does by default)."
        ),
        Table(("workload", "mode", "prompt tokens", "TTFT ms", "speed-up", "reused", "label"), tuple(ours), "Ours"),
        Table(("workload", "mode", "TTFT ms", "speed-up"), theirs, f"Published: {published.SOURCE}"),
        tables.bars(folder, "modes", "TTFT by mode", [row["case"] for row in rows], shown, y="TTFT, ms"),
    ]


EXPERIMENT = Experiment(1, "modes", "Modes and workloads", _cases, _measure, _blocks)
