"""Plots of the reports, as PNG files beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepwarm.evaluation.canvas import COLOURS, canvas, save
from papers import paper
from papers.journal import Row
from papers.metrics import Measure, Outcome

if TYPE_CHECKING:
    from papers.report import Results

_METRICS = ("TSA", "PF1", "EM", "FPR", "FNR")


def _bars(
    axes: Any,
    labels: Sequence[str],
    groups: Mapping[str, Sequence[Measure]],
    published: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Groups of bars with their intervals; published values are crosses in them."""
    width = 0.8 / max(1, len(groups))
    for number, (name, measures) in enumerate(groups.items()):
        places = [at + (number - (len(groups) - 1) / 2) * width for at in range(len(labels))]
        values = [measure.value or 0.0 for measure in measures]
        none = float("nan")  # draws nothing
        low = [none if m.low is None else max(0.0, v - m.low) for v, m in zip(values, measures, strict=True)]
        high = [none if m.high is None else max(0.0, m.high - v) for v, m in zip(values, measures, strict=True)]
        axes.bar(places, values, width, yerr=[low, high], capsize=2, label=name, color=COLOURS[number])
        if published and name in published:
            label = None if number else "published"
            axes.plot(places, published[name], "x", color="black", markersize=4, clip_on=False, label=label)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1.05)


def quality(folder: Path, found: Results) -> Path:
    splits = found.splits or ["none"]
    figure, axes = canvas(len(splits))
    for axis, split in zip(axes[0], splits, strict=True):
        groups = {name: [found.summary(split, name)[metric] for metric in _METRICS] for name in found.conditions}
        _bars(axis, _METRICS, groups, {row[1]: row[2:7] for row in paper.TABLE_1 if row[0] == split})
        axis.set_title(split)
    axes[0][0].legend(fontsize=8)
    return save(figure, folder, "quality")


def errors(folder: Path, found: Results) -> Path:
    figure, axes = canvas(1, width=9.0)
    labels = [(split, name) for split in found.splits for name in found.conditions]
    left = [0.0] * len(labels)
    for number, outcome in enumerate(Outcome):
        counts = []
        for key in labels:
            scores = list(found.scores.get(key, {}).values())
            counts.append(sum(each.outcome is outcome for each in scores) / max(1, len(scores)))
        axes[0][0].barh(range(len(labels)), counts, left=left, label=outcome.value, color=COLOURS[number])
        left = [a + b for a, b in zip(left, counts, strict=True)]
    axes[0][0].set_yticks(range(len(labels)), [f"{split}, {name}" for split, name in labels])
    axes[0][0].invert_yaxis()
    axes[0][0].set_xlabel("share of the questions")
    axes[0][0].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, folder, "errors")


def methods(folder: Path, found: Results) -> Path:
    figure, axes = canvas(1, width=9.0)
    shown = ("TSA", "EM", "FPR")
    groups = {f"{name}, ours": [found.summary(None, name)[metric] for metric in shown] for name in found.conditions}
    groups |= {f"{name}, published": [Measure(value, 0) for value in values] for name, *values in paper.METHODS}
    _bars(axes[0][0], shown, groups)
    axes[0][0].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, folder, "methods")


def times(folder: Path, label: str, sizes: Sequence[Row], twenty: Row) -> list[Path]:
    """Figures 2 to 4 of the paper: time to the first token, amortization, scaling."""
    figure, axes = canvas(1)
    bars = axes[0][0].bar(["full prefill", "hit"], [twenty["full_ms"], twenty["hit_ms"]], color=COLOURS[:2])
    axes[0][0].bar_label(bars, fmt="%.0f ms")
    axes[0][0].set_title(f"{label}, {twenty['tools']} tools")
    made = [save(figure, folder, f"ttft-{label}")]

    figure, axes = canvas(1)
    requests = list(range(11))
    axes[0][0].plot(requests, [n * twenty["full_ms"] / 1e3 for n in requests], label="full prefill", color=COLOURS[0])
    cached = [(twenty["compile_ms"] + n * twenty["hit_ms"]) / 1e3 for n in requests]
    axes[0][0].plot(requests, cached, label="compile once, then hits", color=COLOURS[1])
    axes[0][0].axvline(twenty["compile_ms"] / (twenty["full_ms"] - twenty["hit_ms"]), linestyle=":", color="grey")
    axes[0][0].set(
        xlabel="requests", ylabel="seconds to first tokens, in all", title=f"{label}, {twenty['tools']} tools"
    )
    axes[0][0].legend(fontsize=8)
    made.append(save(figure, folder, f"amortization-{label}"))

    figure, axes = canvas(1)
    counts = [row["tools"] for row in sizes]
    lines = (("full prefill", "full_ms", COLOURS[0]), ("hit", "hit_ms", COLOURS[1]), ("floor", "floor_ms", COLOURS[6]))
    for name, key, colour in lines:
        axes[0][0].plot(counts, [row[key] for row in sizes], marker="o", label=name, color=colour)
    for name, column, colour in (("full prefill", 1, COLOURS[0]), ("hit", 2, COLOURS[1])):
        theirs = [row[column] for row in paper.TABLE_3]
        where = [row[0] for row in paper.TABLE_3]
        axes[0][0].plot(where, theirs, marker="x", linestyle=":", label=f"{name}, published", color=colour)
    axes[0][0].set(xlabel="tools", ylabel="ms to the first token", yscale="log", title=label)
    axes[0][0].legend(fontsize=7)
    made.append(save(figure, folder, f"scaling-{label}"))
    return made


@dataclass(frozen=True)
class Repaired:
    """Quality where a share of the tokens is recomputed, over all questions."""

    share: float
    cosine: float  # of logits, mean
    kl: float  # median
    agreement: float  # mean
    right_tool: float  # share of the questions


def repair(folder: Path, curves: Mapping[str, Sequence[Repaired]], full_right_tool: float) -> Path:
    """Quality against work, a line per curve. `full_right_tool` is full prefill's accuracy."""
    figure, axes = canvas(2, 2)
    panels = (
        ("cosine", "logits cosine, mean"),
        ("kl", "KL to full prefill, median"),
        ("agreement", "greedy agreement, mean"),
        ("right_tool", "right tool, share of the questions"),
    )
    for axis, (field, label) in zip(axes.flat, panels, strict=True):
        for number, (name, points) in enumerate(curves.items()):
            values = [getattr(point, field) for point in points]
            if field == "kl":
                values = [max(value, 1e-6) for value in values]  # 0 has no logarithm
            axis.plot([100 * point.share for point in points], values, "o-", ms=4, label=name, color=COLOURS[number])
        axis.set(xlabel="tool tokens recomputed, %", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0][1].set_yscale("log")
    axes[1][0].set_ylim(0, 1.05)
    axes[1][1].set_ylim(0, 1.05)
    axes[1][1].axhline(full_right_tool, linestyle=":", color="black", label="full prefill")
    axes[1][1].legend(fontsize=8)
    return save(figure, folder, "repair")
