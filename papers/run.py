"""Answers the examples under each condition, one JSON line per answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from keepwarm.engine import Engine
from keepwarm.errors import ConfigError
from papers import journal
from papers.bfcl import PACKAGE, SPLITS, Benchmark, Example
from papers.conditions import CONDITIONS, Conditions
from papers.journal import Journal, Row

ANSWERS = "answers.jsonl"
KEYS = ("split", "id", "condition")


def settings(engine: Engine, model: str, **chosen: Any) -> dict[str, Any]:
    """What decides a run's results: the model's weights and dtype, what was chosen, and the data."""
    identity = engine.pipeline.model.identity
    name = model if model == "demo" else Path(model).expanduser().name
    return {"model": name, "weights": identity.weights[:16], "dtype": identity.dtype, **chosen, "data": PACKAGE}


def machine() -> Row:
    return journal.machine(torch.get_num_threads(), torch.__version__)


def chosen_examples(benchmark: Benchmark, splits: Sequence[str], limit: int | None) -> list[Example]:
    """The first `limit` examples of each of the splits, in the benchmark's order. Raises ConfigError."""
    if unknown := sorted(set(splits) - set(SPLITS)):
        raise ConfigError(f"unknown split {', '.join(unknown)}; known are {', '.join(SPLITS)}")
    counts = dict.fromkeys(splits, 0)
    chosen = []
    for example in benchmark.examples:
        if example.split in counts and (limit is None or counts[example.split] < limit):
            counts[example.split] += 1
            chosen.append(example)
    return chosen


def run(
    conditions: Conditions,
    benchmark: Benchmark,
    examples: Sequence[Example],
    answers: Journal,
    wanted: Sequence[str] = CONDITIONS,
    time_left: Callable[[], bool] = lambda: True,
) -> Iterator[Row]:
    """Answer what is not answered yet, example by example; an example begun is finished."""
    done = answers.done
    for example in examples:
        left = [name for name in wanted if (example.split, example.id, name) not in done]
        if left and not time_left():
            return
        for name in left:
            tools = benchmark.sets[example.set_name]
            reply = conditions.answer(name, example.set_name, tools, example.question)
            key = {"id": example.id, "split": example.split, "condition": name, "set": example.set_name}
            yield answers.add(key | asdict(reply))
