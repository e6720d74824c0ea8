"""Time to the first token with 5 to 100 tools, full prefill and hit; and 30 questions over 20 tools.

Full prefill is a cold run that neither looks up nor stores. Every hit asks another question than the one before. Times
are wall time in milliseconds, from the call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from keepwarm.core.results import Generation
from keepwarm.engine import Engine
from keepwarm.evaluation.bfcl import Tool
from keepwarm.evaluation.conditions import SYSTEM
from keepwarm.evaluation.journal import Journal, Row

TIMES = "latency.jsonl"
KEYS = ("kind", "tools", "number")
SIZES = (5, 10, 20, 50, 100)
QUESTIONS = 30
QUESTIONS_OVER = 20  # tools
_HITS = 5


def measure(
    engine: Engine,
    tools: Sequence[Tool],
    questions: Sequence[str],
    times: Journal,
    *,
    sizes: Sequence[int] = SIZES,
    answer_tokens: int = 32,
    time_left: Callable[[], bool] = lambda: True,
) -> Iterator[Row]:
    """One row per size that fits the context window, then one per question; what is there already is left out."""
    for size in sizes:
        if ("scaling", size, 0) not in times.done and time_left():
            found = _scaling(engine, tools[:size], questions)
            if found is not None:
                yield times.add({"kind": "scaling", "tools": size, "number": 0, **found})
    left = [n for n in range(min(QUESTIONS, len(questions))) if ("question", QUESTIONS_OVER, n) not in times.done]
    if left and time_left():
        chosen = engine.tools(tools[:QUESTIONS_OVER], system=SYSTEM)
        chosen.generate(questions[-1], max_new_tokens=1)
        for number in left:
            if not time_left():
                return
            hit = chosen.generate(questions[number], max_new_tokens=answer_tokens)
            yield times.add({"kind": "question", "tools": QUESTIONS_OVER, "number": number, **_parts(hit)})


def _scaling(engine: Engine, tools: Sequence[Tool], questions: Sequence[str]) -> Row | None:
    chosen = engine.tool_sets.register(tools, system=SYSTEM, warm=False)
    window = engine.model.context_window
    tokens = chosen.explain(questions[0]).prompt_tokens
    if window is not None and tokens + 1 > window:
        return None
    before = engine.stats().bytes["ram"]
    compiled = chosen.warm()
    engine.archive.flush()
    size = engine.stats().bytes["ram"] - before
    hits = [chosen.generate(question, max_new_tokens=1) for question in questions[1 : 2 + _HITS]][1:]
    full = chosen.generate(questions[0], max_new_tokens=1, reuse="off")
    return {
        "set_tokens": compiled.tokens,
        "compile_ms": compiled.seconds * 1e3,
        "cache_bytes": size,
        "full_ms": full.ttft_ms,
        "hit_ms": statistics.median(hit.ttft_ms for hit in hits),
        "hits": len(hits),
        "all_hits": all(hit.cached_tokens >= compiled.tokens for hit in hits),
        "question_tokens": statistics.median(hit.prompt_tokens - hit.cached_tokens for hit in hits),
    }


def _parts(hit: Generation) -> Row:
    times = hit.timings
    return {
        "link_ms": times["compile"] + times["link"] + times["load"],
        "prefill_ms": times["prefill"],
        "decode_ms": times["decode"],
        "total_ms": hit.total_ms,
        "ttft_ms": hit.ttft_ms,
        "tokens": len(hit.token_ids),
        "question_tokens": hit.prompt_tokens - hit.cached_tokens,
        "cached_tokens": hit.cached_tokens,
    }
