"""Executes a plan: places stored KV in an arena, prefills what is left, decodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.plan import LinkPlan
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.runtime.arena import Arena
from keepwarm.runtime.runner import Runner
from keepwarm.runtime.sampling import Sampler, TextStream

LoadFunction = Callable[[Sequence[BlockRef], TokenIds, int, KVSink], dict[str, int]]


def place(plan: LinkPlan, tokens: TokenIds, arena: Arena, load: LoadFunction) -> dict[str, int]:
    """Put every loaded span of a plan in place; returns tokens by tier.

    Blocks resident in this arena are left where they are. Raises CorruptRun when stored bytes fail verification; the
    arena is then valid up to its resident part only.
    """
    by_tier: dict[str, int] = {}
    there = [ref for span in plan.loads for ref in span.refs if ref.tier == "device"]  # they lead
    if there:
        by_tier["device"] = there[-1].end
    arena.seek(by_tier.get("device", 0))
    for span in plan.loads:
        rest = [ref for ref in span.refs if ref.tier != "device"]
        if rest:
            for tier, count in load(rest, tokens[rest[0].start : span.end], span.end, arena).items():
                by_tier[tier] = by_tier.get(tier, 0) + count
    arena.seek(plan.cached_tokens)
    return by_tier


def prefill(plan: LinkPlan, tokens: TokenIds, cache: Cache, runner: Runner) -> torch.Tensor:
    """Run the computed spans in order; returns the logits after the last token, `[vocab]`."""
    *earlier, last = plan.computes
    for span in earlier:
        runner.extend(tokens[span.start : span.end], cache, span.start)
    return runner.step(tokens[last.start : last.end], cache, last.start)


@dataclass
class Answer:
    """One answer while it grows."""

    sampler: Sampler
    text: TextStream
    trace: hashlib._Hash | None = None  # fed with the bytes of every step's logits
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"


def decode(
    runner: Runner,
    cache: Cache,
    logits: torch.Tensor,
    position: int,
    answer: Answer,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
) -> Iterator[tuple[int, str]]:
    """Choose tokens one by one from `position` on; yields each token with the text that became printable.

    A stop token ends the answer and is part of its ids, not of its text; a stop string is neither in the text.
    """
    for count in range(max_new_tokens):
        if answer.trace is not None:
            answer.trace.update(logits.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        token = answer.sampler.next(logits)
        answer.token_ids.append(token)
        piece = "" if token in stop_tokens else answer.text.push(token)
        last = token in stop_tokens or answer.text.stopped() or count + 1 == max_new_tokens
        if last:
            piece += answer.text.finish()
            answer.finish_reason = "stop" if token in stop_tokens or answer.text.cut else "length"
        yield token, piece
        if last:
            return
        logits = runner.step(token_ids([token]), cache, position + count)
