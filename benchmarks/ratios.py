"""Ratios as all results tell them: paired within the rounds of one run, each beside its own round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import quantiles
from typing import Any


def spread(ratios: Sequence[float], worst: Callable[[Iterable[float]], float] = min) -> dict[str, Any]:
    """The median as `times`, the lower and the upper quartile, and the worst ratio: the least, unless told otherwise.

    Quartiles are those of the values as they are (`inclusive`), as in tools/figures. Raises ValueError without a ratio.
    """
    if not ratios:
        raise ValueError("there is no ratio: expected one for each round")
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * list(ratios)
    return {"times": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)], "worst": round(worst(ratios), 3)}


def paired(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of each round that both have."""
    return [a / b for a, b in zip(above, below, strict=False)]
