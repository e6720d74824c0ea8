"""The records of `benchmarks/results`, and numbers as the pages show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@cache
def _lines(name: str) -> tuple[dict[str, Any], ...]:
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines if line.strip())


def records(name: str) -> tuple[dict[str, Any], ...]:
    """The records of a file of results, without the line that tells its run."""
    return _lines(name)[1:]


def run_of(name: str) -> dict[str, Any]:
    """What `make bench-all` wrote into the file's first line. Raises KeyError of a file that it did not make."""
    run: dict[str, Any] = _lines(name)[0]["run"]
    return run


def summaries(name: str) -> list[Any]:
    """What a benchmark itself sums up of its measurements."""
    return [each["summary"] for each in records(name) if "summary" in each]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def long(value: float) -> str:
    """Milliseconds as people say them."""
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms"


def mb(value: float) -> str:
    return f"{value / 1e6:.0f} MB"


def plain(value: float) -> str:
    """A ratio: two digits after the point, if it is small."""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Sequence[float], worst: float) -> str:
    """A median with its quartiles, and the worst value."""
    if len(values) < 2:
        return plain(median(values))
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{plain(middle)} ({plain(low)} to {plain(high)}; {plain(worst)})"


def ratio(found: dict[str, Any]) -> str:
    """A median of ratios, with their quartiles and the worst, as far as the file has them (benchmarks/ratios.py)."""
    told = [" to ".join(plain(each) for each in found["quartiles"])] if "quartiles" in found else []
    told += [plain(found["worst"])] if "worst" in found else []
    return plain(found["times"]) + (f" ({'; '.join(told)})" if told else "")


def over(values: Sequence[float]) -> str:
    """Ratios of which the largest is the worst."""
    return spread(values, max(values))


def sooner(values: Sequence[float]) -> str:
    """Ratios of which the smallest is the worst."""
    return spread(values, min(values))


def divided(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Ratios within each round that both have."""
    return [a / b for a, b in zip(above, below, strict=False)]
