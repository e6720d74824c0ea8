"""What a prompt would reuse, and why no more: `Engine.explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepwarm.core.results import ChunkHit, Explanation, Miss
from keepwarm.core.spans import Reuse
from keepwarm.pipeline.pipeline import Pipeline


def explain(pipeline: Pipeline, prompt: str | Sequence[int] | None, arguments: Mapping[str, Any]) -> Explanation:
    """See `Engine.explain`."""
    prepared = pipeline.prepare(prompt, arguments, answers=False)
    compiled = prepared.compiled
    length = len(compiled.tokens)
    linked = pipeline.linked_for(prepared)
    if linked is None:
        why = pipeline.uncached_reason(length + prepared.decoding.max_new_tokens)
        linked, plan, widest = pipeline.linked(compiled), pipeline.bare_plan(length), pipeline.bare_plan(length)
        miss: Miss | None = pipeline.misses.uncached(compiled, why)
    else:
        resident = pipeline.pool.peek(linked.held) if prepared.reuse is not Reuse.OFF else 0
        costs = pipeline.costs.copy()
        plan, miss = pipeline.loader.plan(linked, prepared.reuse, resident, costs)
        widest = pipeline.loader.link(linked, Reuse.PREFIX, resident, costs)
    by_tier: dict[str, int] = {}
    for span in plan.loads:
        for ref in span.refs:
            by_tier[ref.tier] = by_tier.get(ref.tier, 0) + min(ref.end, span.end) - ref.start
    for moved in plan.relocates:
        by_tier[moved.ref.tier] = by_tier.get(moved.ref.tier, 0) + moved.end - moved.start
    return Explanation(
        length,
        plan.cached_tokens,
        by_tier,
        plan.exactness.label,
        compiled.segments,
        () if linked.grid.inside else tuple(linked.blocks.ends),
        widest.cached_tokens,
        miss,
        tuple(ChunkHit(moved.start, moved.end, moved.ref.tier) for moved in plan.relocates),
    )
