"""The negative result: tools computed alone and composed without positions, and what repairing them brings.

For each question the last prompt token's logits and the first answer tokens are compared with full prefill: of the
composition as it is (ratio 0), and after a share of the tools' tokens is recomputed, attending to everything before
them. At ratio 1 nothing of the composition is left.

`alone` computes each tool with nothing before it (Sarkar 2026); `header` computes it after the prompt's own beginning,
the system prompt, and keeps the tool's part.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.errors import UnsupportedModel
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.runner import Runner
from papers.bfcl import Benchmark, Example
from papers.conditions import Conditions, Parts
from papers.journal import Journal, Row
from papers.nope_keys import NopeKV, compose, verify_rotation

POINTS = "points.jsonl"
KEYS = ("id", "start", "strategy", "ratio")
STARTS = ("alone", "header")
STRATEGIES = ("leading", "deviation")
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0)
_NAMED = re.compile(r'"name"\s*:\s*"([^"]+)"')

Planes = list[tuple[torch.Tensor, torch.Tensor]]  # by layer: keys and values `[kv_heads, n, dim]`


@dataclass(frozen=True)
class Reference:
    """Full prefill of one prompt."""

    cut: Parts
    planes: Planes  # of everything up to the last tool's end
    logits: torch.Tensor  # after the prompt's last token
    answer: list[int]  # the greedy answer's first tokens


def rotation_differences(conditions: Conditions, tools: Sequence[dict[str, object]], question: str) -> list[float]:
    """By layer, the largest difference between deferred and ordinary rotation, over one prompt's header and tools."""
    chosen = conditions.registered("verification", tools)
    cut = conditions.parts(chosen, question)
    return verify_rotation(conditions.engine.pipeline.model.runner, cut.tokens[: cut.ends[-1]])


@dataclass(frozen=True)
class Grid:
    """What is tried with every question."""

    starts: Sequence[str] = STARTS
    strategies: Sequence[str] = STRATEGIES
    ratios: Sequence[float] = RATIOS

    def points(self) -> list[tuple[str, str, float]]:
        """Start, strategy, ratio. At both ends the strategies are the same, and one stands for all."""
        return [
            (start, strategy, ratio)
            for start in self.starts
            for strategy in self.strategies
            for ratio in self.ratios
            if strategy == self.strategies[0] or 0 < ratio < 1
        ]

    def left(self, examples: Sequence[Example], points: Journal) -> int:
        """How many points are not there yet."""
        return len({(example.id, *point) for example in examples for point in self.points()} - points.done)


def measure(
    conditions: Conditions,
    benchmark: Benchmark,
    examples: Sequence[Example],
    points: Journal,
    *,
    tools: int,
    grid: Grid | None = None,
    time_left: Callable[[], bool] = lambda: True,
) -> Iterator[Row]:
    """One row per example, start, strategy and ratio that is not there yet."""
    grid = grid or Grid()
    lean = conditions.engine.pipeline.model.runner.lean
    if lean is None:
        raise UnsupportedModel("single tokens are recomputed by the lean decoder, which does not run this model here")
    for example in examples:
        left = [point for point in grid.points() if (example.id, *point) not in points.done]
        if not left:
            continue
        if not time_left():
            return
        few = some_tools(benchmark.sets[example.set_name], example.tool, tools)
        chosen = conditions.registered(f"{example.set_name}, {example.tool}, {tools}", few)
        cut = conditions.parts(chosen, example.question)
        reference = full_prefill(conditions, cut)
        for start in grid.starts:
            base: Planes | None = None
            for _, strategy, ratio in [point for point in left if point[0] == start]:
                if base is None:
                    base = composed(conditions, cut, start)
                found = repaired(conditions, reference, base, choose(strategy, ratio, cut, base, reference.planes))
                yield points.add({
                    "id": example.id,
                    "start": start,
                    "strategy": strategy,
                    "ratio": ratio,
                    "tool_right": example.tool is not None and named(conditions, found.answer) == example.tool,
                    "full_tool_right": example.tool is not None and named(conditions, reference.answer) == example.tool,
                    **compared(reference, found),
                })


def some_tools(all_tools: Sequence[dict[str, object]], needed: str | None, count: int) -> list[dict[str, object]]:
    """The first `count` tools, the needed one among them."""
    first = [tool for tool in all_tools if tool["name"] == needed]
    rest = [tool for tool in all_tools if tool["name"] != needed]
    return [*first, *rest][:count]


@dataclass(frozen=True)
class Found:
    """An answer over composed KV."""

    logits: torch.Tensor
    answer: list[int]
    recomputed: int  # tokens
    repair_ms: float


def full_prefill(conditions: Conditions, cut: Parts) -> Reference:
    """The prompt computed as a whole."""
    with _arena(conditions, cut) as arena:
        runner, end = conditions.engine.pipeline.model.runner, cut.ends[-1]
        arena.seek(0)
        runner.extend(cut.tokens[:end], arena.cache, 0)
        planes = _read(arena, end)
        logits, answer = _answered(conditions, runner, arena, cut)
    return Reference(cut, planes, logits, answer)


def composed(conditions: Conditions, cut: Parts, start: str) -> Planes:
    """Header and tools, each tool's KV computed `alone` or after the `header`, with their keys rotated into place."""
    header = cut.tokens[: cut.ends[0]]
    parts: list[NopeKV] = [conditions.captured(header)[0]]
    for a, b in cut.spans:
        if start == "alone":
            parts.append(conditions.captured(cut.tokens[a:b])[0])
        else:
            parts.append(conditions.captured(np.concatenate([header, cut.tokens[a:b]]))[0].tail(len(header)))
    with _arena(conditions, cut) as arena:
        return _read(arena, compose(arena, conditions.rotary, parts))


def choose(strategy: str, ratio: float, cut: Parts, base: Planes, full: Planes) -> TokenIds:
    """Positions of the tools' tokens to recompute: `ratio` of them, in order.

    `leading` takes each tool's first tokens (EPIC, Hu et al. 2025). `deviation` takes those whose values in the second
    layer differ most from full prefill's (CacheBlend, Yao et al. 2025): what its selection pass, one layer over all
    tokens, would find.
    """
    if strategy == "leading":
        picked = [np.arange(a, a + math.ceil(ratio * (b - a))) for a, b in cut.spans]
        return np.concatenate(picked).astype(np.int32)
    inside = np.arange(cut.ends[0], cut.ends[-1])
    layer = min(1, len(full) - 1)
    away = (base[layer][1] - full[layer][1]).float().pow(2).sum((0, 2)).numpy()[inside]
    most = np.argsort(-away, kind="stable")[: math.ceil(ratio * len(inside))]
    return np.sort(inside[most]).astype(np.int32)


def repaired(conditions: Conditions, reference: Reference, base: Planes, positions: TokenIds) -> Found:
    """The answer over `base` after the tokens at `positions` are recomputed."""
    cut, runner = reference.cut, conditions.engine.pipeline.model.runner
    with _arena(conditions, cut) as arena:
        _write(arena, base)
        started = time.perf_counter()
        recompute(runner, arena, cut.tokens, positions)
        spent = (time.perf_counter() - started) * 1e3
        logits, answer = _answered(conditions, runner, arena, cut)
    return Found(logits, answer, len(positions), spent)


def recompute(runner: Runner, arena: Arena, tokens: TokenIds, positions: TokenIds) -> None:
    """Run the tokens at `positions` again, layer by layer, each attending to all that lies before it in the arena.

    Chosen tokens see one another's new keys and values, and the old ones of all others. The cost is that of as many
    tokens in an ordinary step.
    """
    if not len(positions):
        return
    assert runner.lean is not None
    breaks = np.flatnonzero(np.diff(positions) > 1) + 1
    edges = [0, *breaks.tolist(), len(positions)]
    ranges = [(int(positions[a]), int(positions[b - 1]) + 1) for a, b in pairwise(edges)]
    memory = arena.sequenced()
    with runner.lock, torch.inference_mode():
        runner.lean.step([tokens[a:b] for a, b in ranges], [a for a, _ in ranges], [memory] * len(ranges), [])


def named(conditions: Conditions, answer: Sequence[int]) -> str | None:
    """The tool that the beginning of an answer names."""
    text = conditions.engine.pipeline.tokenizer.decode(list(answer), skip_special_tokens=True)
    found = _NAMED.search(text)
    return found[1] if found else None


def compared(reference: Reference, found: Found) -> Row:
    """How near an answer comes to full prefill's."""
    full, ours = reference.logits.double(), found.logits.double()
    log_full, log_ours = full.log_softmax(-1), ours.log_softmax(-1)
    same = next(
        (i for i, (a, b) in enumerate(zip(reference.answer, found.answer, strict=False)) if a != b),
        min(len(reference.answer), len(found.answer)),
    )
    tools = reference.cut.ends[-1] - reference.cut.ends[0]
    return {
        "cosine": float(torch.nn.functional.cosine_similarity(full, ours, dim=0)),
        "kl": float((log_full.exp() * (log_full - log_ours)).sum()),
        "top1": int(full.argmax()) == int(ours.argmax()),
        "agreement": same / max(1, len(reference.answer)),
        "prompt_tokens": len(reference.cut.tokens),
        "tool_tokens": tools,
        "recomputed": found.recomputed,
        "repair_ms": round(found.repair_ms, 1),
    }


class _arena:  # noqa: N801  # a context manager, used as a function
    """An arena with room for a prompt and its answer."""

    def __init__(self, conditions: Conditions, cut: Parts) -> None:
        self._pool = conditions.engine.pipeline.pool
        self._arena = self._pool.acquire(None, len(cut.tokens) + conditions.max_new_tokens)
        self._pool.wait_readers(self._arena, 0)

    def __enter__(self) -> Arena:
        return self._arena

    def __exit__(self, *error: object) -> None:
        self._arena.seek(0)
        self._pool.release(self._arena)


def _read(arena: Arena, end: int) -> Planes:
    return [(layer.keys[0, :, :end].clone(), layer.values[0, :, :end].clone()) for layer in arena.layers]  # type: ignore[index]


def _write(arena: Arena, planes: Planes) -> None:
    arena.seek(0)
    end = planes[0][0].shape[1]
    for layer, (keys, values) in zip(arena.layers, planes, strict=True):
        layer.keys[0, :, :end] = keys  # type: ignore[index]
        layer.values[0, :, :end] = values  # type: ignore[index]
    arena.seek(end)


def _answered(conditions: Conditions, runner: Runner, arena: Arena, cut: Parts) -> tuple[torch.Tensor, list[int]]:
    """Logits after the prompt's last token, and the greedy answer's first tokens, from what the arena holds on."""
    start, length = cut.ends[-1], len(cut.tokens)
    logits = runner.step(cut.tokens[start:], arena.cache, start)
    first, answer = logits, [int(logits.argmax())]
    stops = conditions.engine.pipeline.model.stop_tokens | conditions.engine.pipeline.adapter.stop_tokens
    while len(answer) < conditions.max_new_tokens and answer[-1] not in stops:
        logits = runner.step(token_ids(answer[-1:]), arena.cache, length + len(answer) - 1)
        answer.append(int(logits.argmax()))
    return first, answer
