"""Cells and plots that the experiments' reports share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from keepwarm.evaluation.canvas import COLOURS, canvas, save
from papers.pages import Picture


def ms(value: float | None) -> str:
    """Milliseconds, with a decimal only where it says something."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def times(value: float) -> str:
    return f"{value:.1f} ×"


def percent(value: float) -> str:
    return f"{value:.0%}"


def lines(
    folder: Path,
    name: str,
    caption: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    log: bool = False,
) -> Picture:
    """A line per name through (x, y) points."""
    figure, axes = canvas(1, width=6.4)
    for number, (label, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        axes[0][0].plot([p[0] for p in points], [p[1] for p in points], marker="o", ms=4, label=label, color=colour)
    axes[0][0].set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
    if not log:
        axes[0][0].set_ylim(bottom=0)
    axes[0][0].grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    return Picture(save(figure, folder, name).name, caption)


def bars(
    folder: Path,
    name: str,
    caption: str,
    labels: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    *,
    y: str,
    log: bool = False,
) -> Picture:
    """A group of bars per label, a colour per group."""
    figure, axes = canvas(1, width=max(5.0, 1.4 * len(labels)))
    width = 0.8 / max(1, len(groups))
    for number, (label, values) in enumerate(groups.items()):
        places = [at + (number - (len(groups) - 1) / 2) * width for at in range(len(labels))]
        axes[0][0].bar(places, values, width, label=label, color=COLOURS[number % len(COLOURS)])
    axes[0][0].set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels], fontsize=8)
    axes[0][0].set(ylabel=y, yscale="log" if log else "linear")
    axes[0][0].legend(fontsize=8)
    return Picture(save(figure, folder, name).name, caption)
