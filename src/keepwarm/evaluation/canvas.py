"""Figures without a display, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keepwarm.checks import need

COLOURS = ("#4c72b0", "#55a868", "#c44e52", "#8172b2", "#ccb974", "#64b5cd", "#8c8c8c")


def check() -> None:
    """Raise ConfigError without matplotlib. Call this before measuring anything that a report draws."""
    need("matplotlib", "plot", "a report with plots")


def canvas(columns: int, rows: int = 1, width: float = 4.6, height: float = 3.4) -> tuple[Any, Any]:
    """Make a figure without a display. Raises ConfigError without matplotlib."""
    check()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Any, folder: Path, name: str) -> Path:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path
