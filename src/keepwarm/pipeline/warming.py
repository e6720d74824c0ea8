"""Compute the beginnings of prompts before a request needs them: `Engine.warm`, and registered sets."""

from __future__ import annotations

import time
from collections.abc import Sequence

from keepwarm.core.repair import RepairRule
from keepwarm.core.request import PromptArgs
from keepwarm.core.results import WarmReport
from keepwarm.core.schedule import Serial
from keepwarm.core.snapshots import snapshot_id
from keepwarm.core.spans import Reuse
from keepwarm.core.uncached import Uncached
from keepwarm.errors import PromptError
from keepwarm.pipeline.linked import Linked
from keepwarm.pipeline.pipeline import Pipeline


def warm(
    pipeline: Pipeline,
    arguments: PromptArgs,
    epoch: int | None = None,
    *,
    prompt: str | Sequence[int] | None = None,
    name: str | None = None,
) -> WarmReport:
    """See `Engine.warm`. Pass `epoch` (from `Archive.epoch`) if the work began earlier."""
    started, epoch = time.perf_counter(), pipeline.archive.epoch() if epoch is None else epoch
    compiled = pipeline.prompts.compiled(prompt, arguments)
    length = len(compiled.tokens)
    reason = Uncached.REUSE_OFF.told() if pipeline.config.reuse is Reuse.OFF else pipeline.uncached_reason(length)
    if reason:
        raise PromptError(f"nothing can be warmed: {reason}")
    linked = pipeline.linked(compiled, epoch)
    if pipeline.config.reuse is Reuse.CHUNKS and not (arguments.get("messages") or arguments.get("tools")):
        return _warm_chunks(pipeline, linked, name, started)
    ids = linked.blocks.exact
    new, reused = 0, length
    states = _states(linked) if linked.stateful else []
    stored = pipeline.archive.lookup(ids)
    at_end = pipeline.archive.find(states[-1:], far=True)
    found = [*stored, *at_end.values()]
    pipeline.archive.promote(ref.run_id for ref in found if ref.tier == "disk")  # into RAM, ahead of requests
    pipeline.archive.pull(found, epoch)
    if len(stored) < len(ids) or len(at_end) < len(states[-1:]):
        wait = pipeline.config.device_timeout
        with pipeline.lease(linked, Reuse.EXACT, length, warming=True, overlap=True, wait=wait) as placed:
            pipeline.loader.prefill(placed)
            placed.computed_to = length
        reused = placed.plan.cached_tokens
        new = sum(end > reused for end in linked.blocks.ends)
    pipeline.archive.replicate([*ids, *states], epoch)
    _count_warmed(pipeline, length)
    if name is not None:
        pipeline.archive.contents.name(name, ids[-1], epoch, linked.tags)
    return WarmReport(length, new, reused, time.perf_counter() - started, _shared(linked))


def _states(linked: Linked) -> list[bytes]:
    """Return the names of the snapshots that a prompt may have, its own end's last."""
    blocks, places = linked.blocks, (point.position for point in linked.prompt.breakpoints)
    ends = sorted({*blocks.ends, *(at for at in places if linked.grid.inside and 1 < at < blocks.ends[-1])})
    return [snapshot_id(blocks.up_to(at).exact) for at in ends]


def _shared(linked: Linked) -> int:
    """Return the position from which a longer prompt that begins with this one must compute."""
    *cuts, length = linked.blocks.ends
    ends_at_cut = any(point.position == length and not point.soft for point in linked.prompt.breakpoints)
    if linked.grid.inside or ends_at_cut:
        return length
    return 0 if isinstance(linked.grid, Serial) else max(cuts, default=0)  # Serial cuts near each prompt's own end


def _count_warmed(pipeline: Pipeline, tokens: int) -> None:
    pipeline.archive.contents.count("warmed_prompts")
    pipeline.archive.contents.count("warmed_tokens", tokens)


def _warm_chunks(pipeline: Pipeline, linked: Linked, name: str | None, started: float) -> WarmReport:
    """Compute and store the prompt's chunks one by one, as they may come back in any order; store no prefix."""
    blending = pipeline.chunks.blending(linked.prompt, linked.namespace, RepairRule.parse(pipeline.config.repair))
    new, reused = pipeline.chunks.learn(blending, linked.namespace, linked.epoch, asked=True)
    learnt = [chunk for chunk in blending.chunks if chunk.learn]
    if name is not None and learnt:
        pipeline.archive.contents.name(name, learnt[-1].ids[-1], linked.epoch, linked.tags)
    length = len(linked.prompt.tokens)
    _count_warmed(pipeline, length)
    return WarmReport(length, new, reused, time.perf_counter() - started, length)
