"""The report of `python -m papers nope`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from papers import paper, plots
from papers.journal import Journal, Row
from papers.metrics import proportion
from papers.pages import Block, Heading, Paragraph, Picture, Table, write

NAME = "report"


def report(folder: Path, points: Journal) -> list[Path]:
    """Write report.md, report.html and the curve into `folder`."""
    run, machine = points.settings, points.machine
    layers: Sequence[float] = machine["rotation_differences"]
    examples = sorted({row["id"] for row in points.rows})
    blocks: list[Block] = [
        Paragraph(
            f"Model {run['model']} ({run['dtype']}, weights {run['weights']}), {run['tools']} tools per "
            f"prompt, {len(examples)} question(s), the first {run['max_new_tokens']} greedy tokens compared; data "
            f"{run['data']}, seed {run['seed']}; torch {machine['torch']}, {machine['threads']} thread(s)."
        ),
        Heading("Rotation"),
        Paragraph(
            f"Keys captured before the rotary embedding and rotated afterwards, against the keys the model cached "
            f"itself: the largest difference in any of {len(layers)} layers is {max(layers):.6g}."
        ),
        Table(
            ("layer", *(str(number) for number in range(len(layers)))),
            (("largest difference", *(f"{value:.2g}" for value in layers)),),
        ),
        Heading("Composition and repair"),
        Paragraph(
            "Against full prefill of the same tokens, at the prompt's last token. Recomputed: share of the tools' "
            f"tokens. Shares with their 95 % interval (Wilson). Published cosine of the composition: "
            f"{paper.NOPE_COSINE} (Qwen3-8B)."
        ),
    ]
    curves: dict[str, list[plots.Repaired]] = {}
    rows = []
    for start in dict.fromkeys(row["start"] for row in points.rows):
        for strategy in dict.fromkeys(row["strategy"] for row in points.rows):
            chosen = [row for row in points.rows if row["start"] == start and _on(row, strategy)]
            for ratio in sorted({row["ratio"] for row in chosen}):
                same = [row for row in chosen if row["ratio"] == ratio]
                curves.setdefault(f"{start}, {strategy}", []).append(_point(ratio, same))
                if strategy == same[0]["strategy"]:
                    rows.append(_row(start, strategy if 0 < ratio < 1 else "-", ratio, same))
    headers = (
        "computed",
        "repaired",
        "recomputed",
        "n",
        "logits cosine",
        "KL, median",
        "KL, worst",
        "same first token",
        "greedy agreement",
        "right tool",
        "full prefill: right tool",
    )
    questions = {row["id"]: bool(row["full_tool_right"]) for row in points.rows}
    picture = plots.repair(folder, curves, statistics.fmean(questions.values()))
    blocks += [Table(headers, tuple(rows)), Picture(picture.name, "Quality against work")]
    return [*write(folder, NAME, "Tools computed alone and composed without positions", blocks), picture]


def _on(row: Row, strategy: str) -> bool:
    """At both ends of a curve the strategies are one."""
    return row["strategy"] == strategy or row["ratio"] in (0.0, 1.0)


def _point(ratio: float, rows: Sequence[Row]) -> plots.Repaired:
    mean = {key: statistics.fmean(row[key] for row in rows) for key in ("cosine", "agreement", "tool_right")}
    kl = statistics.median(row["kl"] for row in rows)
    return plots.Repaired(ratio, mean["cosine"], kl, mean["agreement"], mean["tool_right"])


def _row(start: str, strategy: str, ratio: float, rows: Sequence[Row]) -> tuple[str, ...]:
    n = len(rows)
    return (
        start,
        strategy,
        f"{ratio:.0%}",
        str(n),
        f"{statistics.fmean(row['cosine'] for row in rows):.4f}",
        f"{statistics.median(row['kl'] for row in rows):.3g}",
        f"{max(row['kl'] for row in rows):.3g}",
        _share(rows, "top1"),
        f"{statistics.fmean(row['agreement'] for row in rows):.2f}",
        _share(rows, "tool_right"),
        _share(rows, "full_tool_right"),
    )


def _share(rows: Sequence[Row], key: str) -> str:
    hits = sum(bool(row[key]) for row in rows)
    measure = proportion(hits, len(rows))
    return f"{hits} of {measure.n} [{measure.low:.2f}, {measure.high:.2f}]"
