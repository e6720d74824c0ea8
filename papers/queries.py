"""Thirty questions over one set of 20 tools, each a hit: where the time of a request goes.

What compiling a set costs and saves, for 5 to 100 tools, is measured by `keepwarm bench tools` (`economics.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from keepwarm.core.results import Generation
from keepwarm.engine import Engine
from papers.bfcl import Tool
from papers.conditions import SYSTEM
from papers.journal import Journal, Row

TIMES = "queries.jsonl"
KEYS = ("number",)
TOOLS = 20
QUESTIONS = 30


def measure(
    engine: Engine,
    tools: Sequence[Tool],
    questions: Sequence[str],
    times: Journal,
    *,
    max_new_tokens: int = 32,
    time_left: Callable[[], bool] = lambda: True,
) -> Iterator[Row]:
    """One row per question; what is there already is left out. Times are wall time in milliseconds."""
    left = [number for number in range(len(questions)) if (number,) not in times.done]
    if not left:
        return
    chosen = engine.tools(tools, system=SYSTEM)
    chosen.generate(questions[-1], max_new_tokens=1)  # the first hit after the compilation
    for number in left:
        if not time_left():
            return
        yield times.add({"number": number, **_parts(chosen.generate(questions[number], max_new_tokens=max_new_tokens))})


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
