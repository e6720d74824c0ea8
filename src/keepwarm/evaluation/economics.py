"""What a compiled set of tools costs, what it saves, and from which request on.

For each number of tools, paired in one run, so that ratios compare like with like:

* `compile_ms`: `Engine.tools` for a new set: checking, rendering, computing, handing to the store.
* `hit_ms`: time to first token of a request that begins with the set; its parts are `link_ms` (rendering, lookup,
  placing the KV) and `prefill_ms` (the forward pass).
* `constrained_ms`: `hit_ms` with `tool_choice="required"`, whose grammar was compiled before.
* `cold_ms`: the same request without the cache, by the engine's schedule; `oneshot_ms`: transformers' own model and
  cache, the whole prompt in one pass, tokenized beforehand. `full_ms` is the faster of the two.
* `floor_ms`: the bare forward pass over what follows the last cut, with its KV in place.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.core.results import Generation
from keepwarm.engine import Engine
from keepwarm.errors import ConfigError
from keepwarm.evaluation.canvas import canvas
from keepwarm.runtime.adapters.beside import beside
from keepwarm.runtime.native.narrow import widened
from keepwarm.toolsets import ToolSet

REQUESTS = 1000  # number of requests for which the total saving is reported
QUESTIONS = ("Is it open on Monday?", "Which one was the last?", "What does it cost now?")
_COLD_ROUNDS, _COLD_MS = 3, 20_000.0  # cold runs are long and steady: a few are enough, none after this time

_VERBS = ("find", "list", "create", "update", "cancel", "compare", "export", "share", "archive", "approve")
_THINGS = (
    "invoice",
    "meeting",
    "flight",
    "parcel",
    "recipe",
    "ticket",
    "contract",
    "report",
    "photo",
    "order",
    "room",
    "payment",
)


@dataclass(frozen=True)
class Row:
    """Medians for one number of tools. Times in milliseconds."""

    tools: int
    tokens: int  # of the set's prompt: what is compiled
    prompt_tokens: int
    cache_bytes: int
    compile_ms: float
    hit_ms: float
    link_ms: float
    prefill_ms: float
    constrained_ms: float
    cold_ms: float
    oneshot_ms: float
    floor_ms: float
    hit_tiers: tuple[str, ...]
    identical: bool  # the hit's logits equal the cold run's, bit for bit
    rounds_ms: dict[str, list[float]] = field(default_factory=dict)  # cold runs and hits, round by round

    @property
    def full_ms(self) -> float:
        return min(self.cold_ms, self.oneshot_ms)

    @property
    def speedup(self) -> float:
        return self.full_ms / self.hit_ms

    @property
    def saved_ms(self) -> float:
        """Milliseconds saved by one request."""
        return self.full_ms - self.hit_ms

    @property
    def saved_s_at_1000(self) -> float:
        """Seconds saved by 1,000 requests, less the time to compile."""
        return (REQUESTS * self.saved_ms - self.compile_ms) / 1e3

    @property
    def break_even(self) -> float:
        """Number of requests after which compiling first has cost less than computing each in full."""
        return self.compile_ms / self.saved_ms if self.saved_ms > 0 else float("inf")

    def to_dict(self) -> dict[str, Any]:
        derived = ("full_ms", "speedup", "saved_ms", "saved_s_at_1000", "break_even")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class Growth:
    """How times grow from the smallest to the largest set, and what one more tool costs the largest."""

    hit: float  # largest / smallest
    floor: float
    full: float
    edit_tokens: int  # recomputed when a tool is added to the largest set
    edit_share: float  # of its tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def catalogue(count: int) -> list[dict[str, Any]]:
    """Return tools as services describe them, about a hundred tokens each; every call returns the same ones."""
    if count > len(_VERBS) * len(_THINGS):
        raise ConfigError(f"there are {len(_VERBS) * len(_THINGS)} tools to choose from, got {count}")
    names = [(verb, thing) for thing in _THINGS for verb in _VERBS][:count]
    return [_tool(number, verb, thing) for number, (verb, thing) in enumerate(names)]


def measure(
    engine: Engine, counts: Sequence[int], rounds: int, said: Callable[[str], None] = lambda _: None
) -> Iterator[Row | Growth]:
    """Yield a row for each number of tools, then their growth. Raises PromptTooLong for a set beyond the context
    window."""
    if not counts or min(counts) < 1 or rounds < 1:
        raise ConfigError("counts of tools and rounds must be at least 1")
    counts = sorted(set(counts))
    said("warming up")
    _ask(_register(engine, 1, "warm-up")[0], QUESTIONS[0], tool_choice="required")
    rows = []
    for count in counts:
        said(f"{count} tools")
        found, compile_ms = _register(engine, count, f"bench-{count}")
        rows.append(_row(engine, found, compile_ms, count, rounds))
        yield rows[-1]
    said("one more tool")
    first, last = rows[0], rows[-1]
    more, _ = _register(engine, last.tools, f"bench-{last.tools}", _tool(len(_VERBS) * len(_THINGS), "audit", "ledger"))
    assert more.report is not None
    recomputed, tokens = more.report.recomputed_tokens, more.report.tokens
    yield Growth(
        last.hit_ms / first.hit_ms,
        last.floor_ms / first.floor_ms,
        last.full_ms / first.full_ms,
        recomputed,
        recomputed / tokens,
    )


def machine(engine: Engine) -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": engine.pipeline.model.identity.dtype,
        "attention": engine.pipeline.model.attention,
        "context_window": engine.pipeline.model.context_window,
    }


def write(rows: Sequence[Row], growth: Growth, about: dict[str, Any], folder: Path) -> None:
    """Write `tools.jsonl` and `tools.png`, with the model's name after `tools` unless it is the embedded model."""
    name = "tools" if about["model"] == "demo" else f"tools-{Path(about['model']).name}"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [about, *({"row": row.to_dict()} for row in rows), {"growth": growth.to_dict()}]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    _plot(rows, folder / f"{name}.png")


def _register(engine: Engine, count: int, name: str, *more: dict[str, Any]) -> tuple[ToolSet, float]:
    """Register a set. Return it with the milliseconds that took. Sets differ from their first words on, so none reuses
    another's KV."""
    started = time.perf_counter()
    system = f"{count} tools are listed here. Call the right one."
    found = engine.tools([*catalogue(count), *more], system=system, name=name)
    return found, (time.perf_counter() - started) * 1e3


def _row(engine: Engine, found: ToolSet, compile_ms: float, count: int, rounds: int) -> Row:
    kinds = ("cold", "oneshot", "hit", "link", "prefill", "constrained", "floor")
    times: dict[str, list[float]] = {name: [] for name in kinds}
    tiers: set[str] = set()
    for number in range(rounds):
        question = QUESTIONS[number % len(QUESTIONS)]
        if number < _COLD_ROUNDS and sum(times["cold"] + times["oneshot"]) < _COLD_MS:
            times["oneshot"].append(_oneshot_ms(engine, found, question))
            times["cold"].append(_ask(found, question, reuse="off").ttft_ms)
            _ask(found, question, tool_choice="required")  # puts the set into the fastest tier again, grammar compiled
        hit = _ask(found, question)
        times["hit"].append(hit.ttft_ms)
        times["link"].append(hit.timings["compile"] + hit.timings["link"] + hit.timings["load"])
        times["prefill"].append(hit.timings["prefill"])
        times["floor"].append(_floor_ms(engine, found, question))
        times["constrained"].append(_ask(found, question, tool_choice="required").ttft_ms)
        tiers |= set(hit.cached_by_tier)
    traced = [_ask(found, question, trace=True, **how).logits_digest for how in ({}, {"reuse": "off"})]
    median = {name: statistics.median(values) for name, values in times.items()}
    assert found.report is not None
    tokens = found.report.tokens
    return Row(
        count,
        tokens,
        hit.prompt_tokens,
        engine.pipeline.model.geometry.bytes_for(tokens),
        compile_ms,
        median["hit"],
        median["link"],
        median["prefill"],
        median["constrained"],
        median["cold"],
        median["oneshot"],
        median["floor"],
        tuple(sorted(tiers)),
        traced[0] == traced[1],
        {name: [round(each, 2) for each in times[name]] for name in ("cold", "hit")},
    )


def _ask(found: ToolSet, question: str, **choice: Any) -> Generation:
    return found.generate(question, max_new_tokens=1, **choice)


def _compiled(engine: Engine, found: ToolSet, question: str) -> CompiledPrompt:
    return engine.pipeline.prepare(None, found.request(question)).compiled


def _floor_ms(engine: Engine, found: ToolSet, question: str) -> float:
    compiled = _compiled(engine, found, question)
    with engine.pipeline.lease(
        engine.pipeline.linked(compiled), engine.pipeline.config.reuse, len(compiled.tokens) + 1
    ) as placed:
        span = placed.plan.computes[-1]
        tokens = compiled.tokens[span.start : span.end]
        started = time.perf_counter()
        int(engine.pipeline.model.runner.step(tokens, placed.arena.cache, span.start).argmax())
        return (time.perf_counter() - started) * 1e3


def _oneshot_ms(engine: Engine, found: ToolSet, question: str) -> float:
    model, name = beside(engine.pipeline.model.model, {}), engine.pipeline.model.runner.cache_name
    widened(model)
    tokens = _compiled(engine, found, question).tokens
    ids = torch.from_numpy(tokens.astype("int64"))[None].to(engine.pipeline.model.runner.device)
    with torch.inference_mode():
        started = time.perf_counter()
        cache = DynamicCache(config=model.config)
        int(model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache}).logits.argmax())
        return (time.perf_counter() - started) * 1e3


def _tool(number: int, verb: str, thing: str) -> dict[str, Any]:
    properties = {
        "id": {"type": "string", "description": f"Number of the {thing}, as printed at its top."},
        "since": {"type": "string", "format": "date", "description": "First day that counts, YYYY-MM-DD."},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50 + number},
        "state": {"enum": ["open", "closed", "any"], "description": f"Which kind of {thing} is meant."},
    }
    return {
        "name": f"{verb}_{thing}",
        "description": f"Use this to {verb} a {thing} of the user's, in the department's books.",
        "input_schema": {"type": "object", "properties": properties, "required": ["id"]},
    }


def _plot(rows: Sequence[Row], path: Path) -> None:
    figure, ((left, right),) = canvas(2, width=6.0, height=4.5)
    for name in ("full", "constrained", "hit", "floor"):
        times = [getattr(row, f"{name}_ms") for row in rows]
        left.plot([row.tools for row in rows], times, marker="o", label=name)
    left.set(xlabel="tools", ylabel="time to first token, ms", yscale="log", title="TTFT by number of tools")
    left.legend()
    last, requests = rows[-1], range(11)
    right.plot(requests, [n * last.full_ms / 1e3 for n in requests], label="each in full")
    right.plot(requests, [(last.compile_ms + n * last.hit_ms) / 1e3 for n in requests], label="compiled once")
    right.axvline(last.break_even, color="grey", linestyle="--", label=f"break-even {last.break_even:.2f}")
    right.set(xlabel="requests", ylabel="seconds in all, to the first tokens", title=f"{last.tools} tools")
    right.legend()
    figure.savefig(path, dpi=110)
