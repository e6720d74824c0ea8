"""Experiment 5: a chat, documents swapped, examples, code, and a server's queries."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from keepwarm.engine import Engine
from papers.chunks import published, tables, texts
from papers.chunks.bench import Bench, Experiment, Extent, Given, documents, fresh, rag, warm_documents
from papers.journal import Row
from papers.pages import Block, Heading, Paragraph, Table

_ANSWER = 8
_QUERIES = 20


def _cases(extent: Extent) -> Sequence[str]:
    return ("chat", "rag", "few-shot", "code", "server")


def _requests(bench: Bench, case: str) -> tuple[Callable[[Engine], object], list[Given]]:
    """What warms the cache beforehand, and the requests in order."""
    few = bench.extent.few
    if case == "chat":
        return lambda engine: None, [texts.chat_turn(turn) for turn in range(few(8, 5))]
    if case == "few-shot":
        return lambda engine: None, [texts.few_shot(number) for number in range(few(6, 3))]
    if case == "code":
        return lambda engine: None, [texts.code(number) for number in range(few(4, 3))]
    chance, every = random.Random(bench.seed), documents()
    if case == "rag":
        chosen = every[:5]
        drawn = [chance.sample(chosen, 3) for _ in range(few(6, 3))]
        return lambda engine: warm_documents(engine, chosen), [
            rag(some, some[0]["question"], number) for number, some in enumerate(drawn)
        ]
    asked = [texts.system_prompt(chance.choice(every[:3])["question"], number) for number in range(few(_QUERIES, 6))]
    return lambda engine: None, asked


def _measure(bench: Bench, case: str) -> Row:
    turns = []
    with bench.engine() as engine:
        warm, requests = _requests(bench, case)
        warm(engine)
        for given in requests:
            cold = fresh(engine, given, _ANSWER, reuse="off")
            kept = fresh(engine, given, _ANSWER)
            turns.append({
                "tokens": kept.prompt_tokens,
                "off_ms": round(cold.ttft_ms, 2),
                "ms": round(kept.ttft_ms, 2),
                "off_total_ms": round(cold.total_ms, 2),
                "total_ms": round(kept.total_ms, 2),
                "reused": round(kept.kv_reuse_ratio, 4),
                "label": kept.exactness,
                "same_text": kept.text == cold.text,
            })
    return {"turns": turns}


def _blocks(rows: list[Row], folder: Path) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(
            "Each request once in full (`off`) and once from the cache, the cache's first answer included. Nothing is "
            f"warmed but the documents of `rag`. At most {_ANSWER} new tokens."
        )
    ]
    curves: dict[str, list[tuple[float, float]]] = {}
    headers = ("request", "tokens", "off TTFT ms", "TTFT ms", "reused", "speed-up", "label", "same answer")
    for row in rows:
        case, turns = row["case"], row["turns"]
        blocks.append(Heading(case, 3))
        if case == "server":
            blocks += _server(turns)
        else:
            blocks.append(
                Table(
                    headers,
                    tuple(
                        (
                            str(number),
                            f"{turn['tokens']:,}",
                            tables.ms(turn["off_ms"]),
                            tables.ms(turn["ms"]),
                            tables.percent(turn["reused"]),
                            tables.times(turn["off_ms"] / turn["ms"]),
                            turn["label"],
                            "yes" if turn["same_text"] else "no",
                        )
                        for number, turn in enumerate(turns, 1)
                    ),
                    "Ours",
                )
            )
        blocks += _theirs(case)
        if case == "chat":
            curves["off"] = [(turn["tokens"], turn["off_ms"]) for turn in turns]
            curves["cached"] = [(turn["tokens"], turn["ms"]) for turn in turns]
    if curves:
        blocks.append(tables.lines(folder, "chat", "TTFT over a chat", curves, x="prompt tokens", y="TTFT, ms"))
    return blocks


def _server(turns: list[Row]) -> list[Block]:
    table = []
    for name, first, total in (("off", "off_ms", "off_total_ms"), ("cached", "ms", "total_ms")):
        seconds = sum(turn[total] for turn in turns) / 1e3
        mean = statistics.fmean(turn[first] for turn in turns)
        table.append((name, tables.ms(mean), f"{len(turns) / seconds:.2f}"))
    words = f"Ours: {len(turns)} queries in turn over one system prompt of {turns[0]['tokens']:,} tokens"
    return [Table(("mode", "mean TTFT ms", "queries per second"), tuple(table), words)]


def _theirs(case: str) -> list[Block]:
    if case == "chat":
        small = tuple(
            (str(turn), f"{tokens:,}", tables.ms(off), tables.ms(on), f"{reuse} %", tables.times(off / on))
            for turn, tokens, off, on, reuse in published.CHAT
        )
        large = tuple(
            (str(turn), f"{tokens:,}", tables.ms(off), tables.ms(on), f"{reuse} %", tables.times(ratio))
            for turn, tokens, off, on, reuse, ratio in published.CHAT_3B
        )
        headers = ("turn", "tokens", "baseline ms", "cached ms", "reused", "speed-up")
        return [
            Table(headers, small, f"Published: {published.SOURCE}"),
            Table(headers, large, f"Published: {published.EXAMPLES}"),
        ]
    if case == "server":
        return [
            Table(
                ("mode", "mean TTFT ms", "queries per second"),
                tuple((mode, tables.ms(ms), f"{rate:.2f}") for mode, ms, rate in published.SERVER),
                f"Published: {published.SOURCE}",
            )
        ]
    theirs = {"rag": published.RAG_3B, "code": published.CODE_3B}.get(case, ())
    few = tuple(
        (name, tables.ms(off), tables.ms(on), f"{reuse} %", tables.times(ratio))
        for name, off, on, reuse, ratio in theirs
    )
    names = ("query", "baseline ms", "cached ms", "reused", "speed-up")
    return [Table(names, few, f"Published: {published.EXAMPLES}")] if few else []


EXPERIMENT = Experiment(5, "workloads", "Realistic workloads", _cases, _measure, _blocks)
