"""Experiment 4: how far blended answers are from a full prefill's, by repair strategy and share."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from keepwarm.engine import Engine
from keepwarm.pipeline.shadow import kl_divergence
from papers.chunks import published, tables
from papers.chunks.bench import (
    Bench,
    Experiment,
    Extent,
    Given,
    document_tokens,
    documents,
    follow,
    rag,
    warm_documents,
)
from papers.journal import Row
from papers.pages import Block, Paragraph, Table
from papers.statistics import hellinger

REPAIRS = (
    "none",
    "seam:16",
    "leading:16",
    "leading:32",
    "deviation:0.05",
    "deviation:0.15",
    "deviation:0.3",
    "attention:0.05",
    "attention:0.15",
    "attention:0.3",
    "impact:0.05",
    "impact:0.1",
    "impact:0.13",
    "impact:0.15",
    "impact:0.2",
    "impact:0.3",
)
_QUICK = ("none", "leading:16", "deviation:0.15", "attention:0.15", "impact:0.13", "impact:0.3")
_ANSWER = 16
_PASSAGE = 40  # tokens
_TEMPERATURES = (0.3, 0.5, 0.7, 1.0)
_SAMPLES = 50


def _cases(extent: Extent) -> Sequence[str]:
    asked = [f"question {number}" for number in range(extent.few(12, 3))]
    passages = [f"passage {number}" for number in range(3)]
    far = [f"far {number}" for number in range(extent.few(4, 2))]
    warmth = _TEMPERATURES if not extent.quick else (0.5, 1.0)
    return [*asked, *passages, *far, *(f"temperature {value}" for value in warmth)]


def _measure(bench: Bench, case: str) -> Row:
    kind, _, which = case.partition(" ")
    with bench.engine() as engine:
        if kind == "question":
            return _question(bench, engine, int(which))
        if kind == "passage":
            return _passage(engine, int(which))
        if kind == "far":
            return _far(engine, int(which))
        return _sampling(bench, engine, float(which))


def _question(bench: Bench, engine: Engine, number: int) -> Row:
    chance = random.Random(1000 * bench.seed + number)
    chosen = chance.sample(documents(), bench.extent.few(4, 3))
    given = rag(chosen, chance.choice(chosen)["question"], number)
    warm_documents(engine, chosen)
    cold = follow(engine, given, _ANSWER, reuse="off")
    size = document_tokens(engine, given)
    found: dict[str, Any] = {}
    for repair in _QUICK if bench.extent.quick else REPAIRS:
        led = follow(engine, given, cold.ids, repair=repair)
        same = [a == b for a, b in zip(led.greedy, cold.ids, strict=True)]
        found[repair] = {
            "kl": round(kl_divergence(cold.logits[0], led.logits[0]), 6),
            "agree": round(statistics.fmean(same), 4),
            "same": all(same),
            "reused": round(led.blended_tokens / size, 4),
            "repaired": round(led.repaired_tokens / max(1, led.blended_tokens), 4),
            "estimate": led.divergence,
        }
    return {"documents": len(chosen), "answer_tokens": len(cold.ids), "repairs": found}


def _passage(engine: Engine, number: int) -> Row:
    """Perplexity of a document's own beginning, as the answer to a request to quote it."""
    chosen = documents()[3 * number : 3 * number + 3]
    given = rag(chosen[::-1], f"Quote the beginning of the document '{chosen[0]['title']}'.", number)
    warm_documents(engine, chosen)
    ids = engine.pipeline.tokenizer.compile(chosen[0]["text"], special=False).ids[:_PASSAGE].tolist()
    modes: dict[str, Given] = {"off": {"reuse": "off"}, "none": {"repair": "none"}, "repaired": {}}
    measured = {name: follow(engine, given, ids, **how).nll for name, how in modes.items()}
    return {name: round(float(torch.tensor(value).exp()), 4) for name, value in measured.items()}


def _far(engine: Engine, number: int) -> Row:
    """The answer lies in the first of many documents."""
    chosen = [documents()[(number + step) % 14] for step in range(6)]
    given = rag(chosen, chosen[0]["question"], number)
    warm_documents(engine, chosen)
    cold = follow(engine, given, _ANSWER, reuse="off")
    found = {}
    for name, how in {"none": {"repair": "none"}, "repaired": {}}.items():
        led = follow(engine, given, cold.ids, **how)
        found[name] = round(statistics.fmean(a == b for a, b in zip(led.greedy, cold.ids, strict=True)), 4)
    return found


def _sampling(bench: Bench, engine: Engine, temperature: float) -> Row:
    """Token frequencies of sampled answers, cold and blended; and of two cold halves, which is what chance alone does.

    A cold answer is taken from the exact cache: its logits are a cold run's to the bit.
    """
    chosen = documents()[:2]
    given = rag(chosen, "Tell me something about these documents.", 0)
    warm_documents(engine, chosen)
    samples, tokens = bench.extent.few(_SAMPLES, 10), bench.extent.few(16, 8)

    def sampled(first: int, **how: Any) -> Counter[int]:
        counts: Counter[int] = Counter()
        for seed in range(first, first + samples):
            result = engine.generate(**given, max_new_tokens=tokens, temperature=temperature, seed=seed, **how)
            counts.update(result.token_ids)
        return counts

    rows = [follow(engine, given, 1, **how).logits[0] for how in ({"reuse": "off"}, {})]
    first = [(logits / temperature).softmax(-1).tolist() for logits in rows]
    engine.generate(**given, max_new_tokens=1, reuse="exact")
    engine.flush()
    cold, other = sampled(0, reuse="exact"), sampled(10_000, reuse="exact")
    with bench.engine() as again:  # without the exact prefix
        warm_documents(again, chosen)
        engine = again
        blended = sampled(20_000)
    return {
        "samples": samples,
        "tokens": tokens,
        "blended": round(_distance(cold, blended), 4),
        "chance": round(_distance(cold, other), 4),
        "first_token": round(hellinger(*first), 4),
    }


def _distance(one: Counter[int], other: Counter[int]) -> float:
    tokens = sorted({*one, *other})
    shares = [[counts[token] / counts.total() for token in tokens] for counts in (one, other)]
    return hellinger(*shares)


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["case"].split(" ")[0], []).append(row)
    blocks: list[Block] = []
    if asked := by_kind.get("question"):
        blocks += _strategies(asked, folder)
    ours = []
    if found := by_kind.get("passage"):
        for name in ("off", "none", "repaired"):
            ours.append((f"perplexity of {len(found)} passages, {name}", ", ".join(f"{r[name]:.2f}" for r in found)))
    if far := by_kind.get("far"):
        for name in ("none", "repaired"):
            mean = statistics.fmean(row[name] for row in far)
            ours.append((f"long-range dependency, agreement, {name}", f"{mean:.1%} of {len(far)} answers' tokens"))
    for row in by_kind.get("temperature", []):
        ours.append((
            f"Hellinger distance of {row['samples']} samples of {row['tokens']} tokens, {row['case']}",
            f"{row['blended']:.3f} (by chance {row['chance']:.3f}; first token, computed: {row['first_token']:.3f})",
        ))
    return [
        *blocks,
        Table(("test", "result"), tuple(ours), "Ours"),
        Table(("test", "result"), published.QUALITY, f"Published: {published.SOURCE}"),
    ]


def _strategies(rows: list[Row], folder: Path) -> list[Block]:
    table = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for repair in rows[0]["repairs"]:
        found = [row["repairs"][repair] for row in rows if repair in row["repairs"]]
        kl = sorted(each["kl"] for each in found)
        share = statistics.fmean(each["repaired"] for each in found)
        table.append((
            repair,
            str(len(found)),
            f"{statistics.fmean(e['reused'] for e in found):.1%}",
            f"{share:.0%}",
            f"{statistics.median(kl):.4f}",
            f"{kl[int(0.9 * (len(kl) - 1))]:.4f}",
            f"{statistics.fmean(e['agree'] for e in found):.1%}",
            f"{sum(e['same'] for e in found)} of {len(found)}",
        ))
        curves.setdefault(repair.partition(":")[0], []).append((100 * share, max(statistics.median(kl), 1e-6)))
    headers = (
        "repair",
        "n",
        "documents reused",
        "of it recomputed",
        "first-token KL, median",
        "90 %",
        "agreement",
        "same answer",
    )
    return [
        Paragraph(
            "Documents in a random order after a header that was never seen. KL of the first token to a full prefill "
            f"by the same engine; agreement over its first {_ANSWER} greedy tokens, led along them."
        ),
        Table(headers, tuple(table), "Ours, by repair"),
        tables.lines(
            folder,
            "quality",
            "First-token KL by share recomputed",
            curves,
            x="recomputed, %",
            y="KL to full prefill, median",
            log=True,
        ),
    ]


EXPERIMENT = Experiment(4, "quality", "Output quality", _cases, _measure, _blocks)
