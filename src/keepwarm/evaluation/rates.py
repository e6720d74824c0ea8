"""Pictures of simulations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keepwarm.evaluation.canvas import check
from keepwarm.evaluation.simulate import OPTIMUM, Outcome


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    """Draw hit rate by capacity, a line per policy and fleet, a panel per trace. Raises ConfigError without
    matplotlib."""
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(each.trace for each in outcomes))
    figure = Figure(figsize=(6 * len(traces), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for at, trace in enumerate(traces):
        axes = figure.add_subplot(1, len(traces), at + 1)
        lines: dict[str, list[Outcome]] = {}
        for each in outcomes:
            if each.trace == trace:
                lines.setdefault(label(each), []).append(each)
        for name, points in lines.items():
            points.sort(key=lambda each: each.share)
            style = "k--" if points[0].policy == OPTIMUM else "o-"
            axes.plot([100 * p.share for p in points], [100 * p.hit_rate for p in points], style, label=name, ms=3)
        axes.set(xscale="log", xlabel="capacity, % of distinct blocks", ylabel="tokens found, %", title=trace, ylim=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)


def label(outcome: Outcome) -> str:
    """A line's name."""
    if outcome.policy == OPTIMUM:
        return "optimum (Belady)"
    if outcome.replicas == 1:
        return outcome.policy
    return f"{outcome.policy}, {outcome.replicas} replicas, {outcome.fleet}"
