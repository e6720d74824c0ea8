"""The ten experiments in order, and running them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from keepwarm.errors import ConfigError
from papers.chunks import breakdown, chunkers, features, memory, modes, quality, rigor, sweep, traffic, workloads
from papers.chunks.bench import Bench, Experiment, Extent
from papers.journal import Journal, Row

POINTS = "points.jsonl"
KEYS = ("experiment", "case")
EXPERIMENTS: tuple[Experiment, ...] = tuple(
    module.EXPERIMENT
    for module in (modes, breakdown, sweep, quality, workloads, memory, features, chunkers, traffic, rigor)
)


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Experiments by number or name, in order. Raises ConfigError."""
    known = {key: each for each in EXPERIMENTS for key in (str(each.number), each.name)}
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(f"{each.number} ({each.name})" for each in EXPERIMENTS)
        raise ConfigError(f"unknown experiments {', '.join(unknown)}; known are {listed}")
    return [each for each in EXPERIMENTS if {str(each.number), each.name} & set(names)]


def left(experiments: Sequence[Experiment], extent: Extent, points: Journal) -> list[tuple[Experiment, str]]:
    """Cases that are not in the journal yet."""
    done = points.done
    return [(each, case) for each in experiments for case in each.cases(extent) if (each.name, case) not in done]


def measure(
    bench: Bench, cases: Sequence[tuple[Experiment, str]], points: Journal, time_left: Callable[[], bool]
) -> Iterator[Row]:
    """A row per case, written as it comes."""
    for experiment, case in cases:
        if not time_left():
            return
        started = time.perf_counter()
        row = experiment.measure(bench, case)
        took = time.perf_counter() - started
        yield points.add({"experiment": experiment.name, "case": case, **row, "seconds": took})
