"""Experiment 10: whether differences are more than noise, and three checks of the method itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from papers.chunks import published, tables
from papers.chunks.bench import Bench, Experiment, Extent, documents, fresh, rag, warm_documents
from papers.chunks.modes import workload
from papers.journal import Row
from papers.pages import Block, Heading, Paragraph, Table
from papers.statistics import compare, slope, summary

_WARM_UPS = 3
_WORKLOADS = {"system prompt": "exact", "RAG, another order after a new header": "chunks"}
_CHECKS = ("flat TTFT", "equal outputs", "cold start")


def _cases(extent: Extent) -> Sequence[str]:
    return (*_WORKLOADS, *_CHECKS)


def _measure(bench: Bench, case: str) -> Row:
    if case in _WORKLOADS:
        return _repeated(bench, case)
    return {"flat TTFT": _flat, "equal outputs": _equal, "cold start": _cold_start}[case](bench)


def _repeated(bench: Bench, case: str) -> Row:
    warm, request = workload(case)
    times: dict[str, list[float]] = {"off": [], _WORKLOADS[case]: []}
    with bench.engine() as engine:
        warm(engine)
        for number in range(_WARM_UPS + bench.extent.runs):
            for place, mode in enumerate(times):
                result = fresh(engine, request(2 * number + place), reuse=mode)
                if number >= _WARM_UPS:
                    times[mode].append(round(result.ttft_ms, 2))
    return {"ttft_ms": times}


def _flat(bench: Bench) -> Row:
    """The same question over a growing prefix: only what is computed should tell in the time."""
    every, points = documents(), []
    asked = {"role": "user", "content": "What is this about?"}
    with bench.engine() as engine:
        for count in (1, 2, 4, 6) if bench.extent.quick else (1, 2, 4, 6, 8, 10):
            system = {"role": "system", "content": "\n\n".join(document["text"] for document in every[:count])}
            engine.warm(messages=[system])
            given = {"messages": [system, asked]}
            cold = fresh(engine, given, reuse="off")
            hit = min((fresh(engine, given) for _ in range(3)), key=lambda each: each.ttft_ms)
            points.append([hit.prompt_tokens, round(cold.ttft_ms, 2), round(hit.ttft_ms, 2)])
    return {"points": points}


def _equal(bench: Bench) -> Row:
    """Greedy answers of the modes that promise equality, and of blended ones, which do not."""
    same = {"exact": 0, "repaired in full": 0, "chunks": 0}
    labels: dict[str, str] = {}
    count = bench.extent.few(6, 3)
    every = documents()
    with bench.engine() as engine:
        for number in range(count):
            chosen = [every[(number + step) % 14] for step in range(3)]
            given = rag(chosen, chosen[number % 3]["question"], number)
            cold = fresh(engine, given, 16, reuse="off", trace=True)
            warm_documents(engine, chosen)
            blended = fresh(engine, given, 16)
            whole = fresh(engine, given, 16, repair="impact:1", trace=True)
            fresh(engine, given, reuse="exact")
            exact = fresh(engine, given, 16, reuse="exact", trace=True)
            same["exact"] += exact.logits_digest == cold.logits_digest and exact.cached_tokens > 0
            same["repaired in full"] += whole.token_ids == cold.token_ids
            same["chunks"] += blended.token_ids == cold.token_ids
            labels |= {"exact": exact.exactness, "repaired in full": whole.exactness, "chunks": blended.exactness}
    return {"same": same, "labels": labels, "of": count}


def _cold_start(bench: Bench) -> Row:
    """The first request of an empty cache finds nothing and takes as long as without a cache; then the second."""
    firsts, seconds, offs = [], [], []
    _, request = workload("system prompt")
    for number in range(bench.extent.few(3, 2)):
        with bench.engine() as engine:
            offs.append(fresh(engine, request(0), reuse="off").ttft_ms)
            first = fresh(engine, request(2 * number + 1))
            second = fresh(engine, request(2 * number + 2))
            firsts.append((first.ttft_ms, first.cached_tokens))
            seconds.append((second.ttft_ms, second.kv_reuse_ratio))
    return {
        "off_ms": statistics.median(offs),
        "first_ms": statistics.median(ms for ms, _ in firsts),
        "first_reused": max(tokens for _, tokens in firsts),
        "second_ms": statistics.median(ms for ms, _ in seconds),
        "second_reused": min(share for _, share in seconds),
    }


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    by_case = {row["case"]: row for row in rows}
    blocks: list[Block] = [
        Paragraph(
            f"{_WARM_UPS} rounds that are not counted, then the runs, the two modes in turn. Times in milliseconds."
        )
    ]
    for case, mode in _WORKLOADS.items():
        if row := by_case.get(case):
            blocks.append(_table(case, mode, row))
    theirs = tuple(tuple(row) for row in published.RIGOR)
    blocks.append(Table(("workload", "", "baseline", "chunk reuse"), theirs, f"Published: {published.SOURCE}"))
    blocks.append(Heading("Validation", 3))
    checks, curves = [], {}
    if flat := by_case.get("flat TTFT"):
        lengths, cold, hit = zip(*flat["points"], strict=True)
        checks.append((
            "flat TTFT",
            f"{1e3 * slope(lengths, cold):,.0f} µs per token in full, {1e3 * slope(lengths, hit):,.1f} cached",
            f"{lengths[0]:,} to {lengths[-1]:,} tokens: {cold[-1] / cold[0]:.1f} and {hit[-1] / hit[0]:.2f} times",
        ))
        curves = {"off": list(zip(lengths, cold, strict=True)), "cached": list(zip(lengths, hit, strict=True))}
    if equal := by_case.get("equal outputs"):
        for name, count in equal["same"].items():
            what = "logits equal to the bit" if name == "exact" else "same 16 greedy tokens"
            checks.append((f"equal outputs, {name}", f"{count} of {equal['of']}: {what}", equal["labels"][name]))
    if cold_start := by_case.get("cold start"):
        checks.append((
            "cold start",
            f"first request {tables.ms(cold_start['first_ms'])} ms with {cold_start['first_reused']} tokens reused, "
            f"without a cache {tables.ms(cold_start['off_ms'])} ms",
            f"second {tables.ms(cold_start['second_ms'])} ms, {cold_start['second_reused']:.0%} reused",
        ))
    blocks.append(Table(("check", "found", ""), tuple(checks)))
    if curves:
        blocks.append(tables.lines(folder, "flat", "TTFT by length", curves, x="prompt tokens", y="TTFT, ms"))
    return blocks


def _table(case: str, mode: str, row: Row) -> Table:
    off, on = row["ttft_ms"]["off"], row["ttft_ms"][mode]
    one, other, difference = summary(off), summary(on), compare(on, off)
    lines = [
        ("runs", str(one.n), str(other.n)),
        ("mean", tables.ms(one.mean), tables.ms(other.mean)),
        ("95 % interval", *(f"[{each.low:,.1f}, {each.high:,.1f}]" for each in (one, other))),
        ("CV", f"{one.variation:.3f}", f"{other.variation:.3f}"),
        ("outliers", str(one.outliers), str(other.outliers)),
        ("Welch's t, p", f"{difference.t:.2f}", "< 0.001" if difference.p < 0.001 else f"{difference.p:.3f}"),
        ("Cohen's d", f"{difference.d:.2f}", ""),
    ]
    return Table(("", "off", mode), tuple(lines), f"Ours: {case}")


EXPERIMENT = Experiment(10, "rigor", "Statistics and validation", _cases, _measure, _blocks)
