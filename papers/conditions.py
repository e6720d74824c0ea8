"""The conditions that are compared: full prefill, the compiled group, tools composed one by one without positions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from keepwarm.compiler.segment import CompiledPrompt, segment
from keepwarm.core.blocks import TokenIds
from keepwarm.core.request import Decoding, Request
from keepwarm.core.spans import SegmentKind
from keepwarm.engine import Engine
from keepwarm.errors import ConfigError
from keepwarm.runtime.execute import Answer, Times, decode
from keepwarm.runtime.sampling import Sampler, TextStream
from keepwarm.toolsets import ToolSet
from papers.nope_keys import NopeKV, Rotary, capture, compose

FULL, GROUP, PER_TOOL = "full prefill", "group cache", "per-tool NoPE"
CONDITIONS = (FULL, GROUP, PER_TOOL)
_SHORT = {"full": FULL, "group": GROUP, "nope": PER_TOOL}
SYSTEM = (
    "You are a helpful assistant. If a function fits the user's request, call it. If none fits, say so and call none."
)


def named(short: str) -> str:
    """A condition by its short name. Raises ConfigError."""
    if short not in _SHORT:
        raise ConfigError(f"unknown condition {short!r}; known are {', '.join(_SHORT)}")
    return _SHORT[short]


@dataclass(frozen=True)
class Reply:
    """An answer under one condition, with what it cost. Times are wall time in milliseconds."""

    text: str
    calls: list[dict[str, Any]]  # all that the text holds, of whatever tool: name and arguments
    tokens: int  # generated
    prompt_tokens: int
    cached_tokens: int
    hit: bool | None  # whether the whole compiled set was reused; None where nothing is cached
    link_ms: float  # everything before the first forward pass: rendering, lookup, loading, composing
    prefill_ms: float
    decode_ms: float
    ttft_ms: float
    compile_ms: float  # what this very question had to compute first for the set or its tools; 0 when it was there
    digest: str | None  # of every step's logits


@dataclass(frozen=True)
class Parts:
    """One prompt's tokens, cut where each tool ends."""

    tokens: TokenIds
    ends: tuple[int, ...]  # of what stands before the first tool, then of each tool

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Of each tool."""
        return list(zip(self.ends, self.ends[1:], strict=False))


class Conditions:
    """Answers questions over sets of tools, greedily, under each condition."""

    def __init__(self, engine: Engine, max_new_tokens: int, system: str = SYSTEM) -> None:
        self.engine = engine
        self.max_new_tokens = max_new_tokens
        self.system = system
        self._sets: dict[str, ToolSet] = {}
        self._captured: dict[bytes, NopeKV] = {}
        self._rotary: Rotary | None = None

    def answer(self, condition: str, name: str, tools: Sequence[dict[str, Any]], question: str) -> Reply:
        """The answer to a question with the set `name` of these tools."""
        chosen = self.registered(name, tools)
        if condition == FULL:
            return self._generated(chosen, question, reuse="off", compile_ms=0.0)
        if condition == GROUP:
            compile_ms = 0.0 if chosen.report else chosen.warm().seconds * 1e3
            return self._generated(chosen, question, reuse=None, compile_ms=compile_ms)
        if condition == PER_TOOL:
            return self._composed(chosen, question)
        raise ConfigError(f"unknown condition {condition!r}; known are {', '.join(CONDITIONS)}")

    def registered(self, name: str, tools: Sequence[dict[str, Any]]) -> ToolSet:
        """The set of that name; not yet computed."""
        if name not in self._sets:
            self._sets[name] = self.engine.tool_sets.register(tools, system=self.system, name=name, warm=False)
        return self._sets[name]

    def _calls(self, answer: str) -> list[dict[str, Any]]:
        return [asdict(call) for call in self.engine.pipeline.adapter.parse_tool_calls(answer)]

    def _generated(self, chosen: ToolSet, question: str, *, reuse: str | None, compile_ms: float) -> Reply:
        found = chosen.generate(question, max_new_tokens=self.max_new_tokens, reuse=reuse, trace=True)
        times = found.timings
        compiled = chosen.report.tokens if chosen.report else 0
        return Reply(
            text=found.text,
            calls=self._calls(found.text),
            tokens=len(found.token_ids),
            prompt_tokens=found.prompt_tokens,
            cached_tokens=found.cached_tokens,
            hit=None if reuse == "off" else found.cached_tokens >= compiled > 0 and found.exactness == "exact",
            link_ms=times["compile"] + times["link"] + times["load"],
            prefill_ms=times["prefill"],
            decode_ms=times["decode"],
            ttft_ms=found.ttft_ms,
            compile_ms=compile_ms,
            digest=found.logits_digest,
        )

    # ---- per-tool composition ----

    def parts(self, chosen: ToolSet, question: str) -> Parts:
        """The prompt cut where each tool ends. Raises ConfigError for a template that does not show where."""
        tools = [{**tool, "cache_control": {"type": "ephemeral"}} for tool in chosen.tools]
        whole = self._compiled(tools, question)
        ends = [part.end for part in whole.segments if part.kind is SegmentKind.TOOLS and part.name]
        if len(ends) < len(tools):
            raise ConfigError(
                f"the model's chat template shows {len(tools)} tools, but only {len(ends)} of their ends can be told: "
                "per-tool composition needs them all"
            )
        ends = ends[: len(tools)]
        swapped = self._compiled([*tools[1:], tools[0]], question)
        return Parts(whole.tokens, (_first_tool(whole.tokens, swapped.tokens, ends), *ends))

    def captured(self, tokens: TokenIds) -> tuple[NopeKV, bool]:
        """KV of a part computed alone, and whether it had to be computed now."""
        key = tokens.tobytes()
        new = key not in self._captured
        if new:
            self._captured[key] = capture(self.engine.pipeline.model.runner, tokens)
        return self._captured[key], new

    @property
    def rotary(self) -> Rotary:
        if self._rotary is None:
            self._rotary = Rotary(self.engine.pipeline.model.model)
        return self._rotary

    def _compiled(self, tools: Sequence[dict[str, Any]], question: str) -> CompiledPrompt:
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": question}]
        request = Request(messages=messages, tools=tools, tool_order="as_sent")
        return segment(request, self.engine.pipeline.tokenizer, self.engine.pipeline.adapter)

    def _composed(self, chosen: ToolSet, question: str) -> Reply:
        started = time.perf_counter()
        cut = self.parts(chosen, question)
        rendered = time.perf_counter()
        pieces = [self.captured(cut.tokens[: cut.ends[0]]), *(self.captured(cut.tokens[a:b]) for a, b in cut.spans)]
        compiled = time.perf_counter()
        length, engine = len(cut.tokens), self.engine
        arena = engine.pipeline.pool.acquire(None, length + self.max_new_tokens)
        try:
            engine.pipeline.pool.wait_readers(arena, 0)
            start = compose(arena, self.rotary, [piece for piece, _ in pieces])
            linked = time.perf_counter()
            runner = engine.pipeline.model.runner
            logits = runner.step(cut.tokens[start:], arena.cache, start)
            times = Times(started, rendered, linked)
            decoding = Decoding(max_new_tokens=self.max_new_tokens)
            grown = Answer(
                Sampler(decoding, cut.tokens, runner.port),
                TextStream(engine.pipeline.tokenizer, ()),
                self.max_new_tokens,
                engine.pipeline.model.stop_tokens | engine.pipeline.adapter.stop_tokens,
                times,
            )
            for _ in decode(runner, arena.cache, logits, length, grown, engine.pipeline.step_costs):
                pass
        finally:
            arena.seek(0)
            engine.pipeline.pool.release(arena)
        new = any(fresh for _, fresh in pieces)
        return Reply(
            text=grown.text.text,
            calls=self._calls(grown.text.text),
            tokens=len(grown.token_ids),
            prompt_tokens=length,
            cached_tokens=start,
            hit=None,
            link_ms=(rendered - started + linked - compiled) * 1e3,
            prefill_ms=(times.first - linked) * 1e3,
            decode_ms=(times.ended - times.first) * 1e3,
            ttft_ms=(times.first - started - (compiled - rendered)) * 1e3,
            compile_ms=(compiled - rendered) * 1e3 if new else 0.0,
            digest=None,
        )


def _first_tool(tokens: TokenIds, swapped: TokenIds, ends: Sequence[int]) -> int:
    """Where the first tool begins.

    Two prompts whose tools begin with another one part inside the first tool, after the opening that all tools share;
    that opening is what the second tool begins with.
    """
    shared = min(len(tokens), len(swapped))
    differ = np.flatnonzero(tokens[:shared] != swapped[:shared])
    parted = int(differ[0]) if len(differ) else shared
    second = tokens[ends[0] : ends[0] + 64].tolist() if len(ends) > 1 else []
    for length in range(min(len(second), parted), 0, -1):
        if tokens[parted - length : parted].tolist() == second[:length]:
            return parted - length
    return parted
