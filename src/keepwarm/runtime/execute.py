"""Executes a plan: places stored KV in an arena, prefills the rest, decodes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import numpy as np
import torch
from transformers.cache_utils import Cache

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.cost import Costs
from keepwarm.core.drafts import Draft, Drafter, Pace, StepCosts
from keepwarm.core.plan import LinkPlan
from keepwarm.core.ports import BlockRef, KVSink
from keepwarm.core.results import Generation, Miss, Piece, TokenLogprob
from keepwarm.core.tools import ToolCall
from keepwarm.runtime.arena.arena import Arena, ArenaCache
from keepwarm.runtime.blend.repair import Blended
from keepwarm.runtime.blend.rope import Relocator
from keepwarm.runtime.runner import Runner
from keepwarm.runtime.sampling import Choice, Sampler, TextStream, fetched, logprobs

_UNKNOWN = token_ids([0])  # stands for a token that only the device knows
LoadFunction = Callable[[Sequence[BlockRef], TokenIds, int, KVSink], dict[str, int]]


def place(plan: LinkPlan, tokens: TokenIds, arena: Arena, load: LoadFunction) -> dict[str, int]:
    """Load every stored span of a plan into the arena, or start the load (`Arena.arrive`). Return tokens by tier.

    Blocks resident in this arena stay as they are. Raises CorruptRun when stored bytes fail verification; then only the
    resident part of the arena is valid.
    """
    by_tier = {"device": plan.resident} if plan.resident else {}
    arena.seek(plan.resident)
    arena.expect(plan.prefix_end)
    for span in plan.loads:
        rest = [ref for ref in span.refs if ref.tier != "device"]
        if rest:
            for tier, count in load(rest, tokens[rest[0].start : span.end], span.end, arena).items():
                by_tier[tier] = by_tier.get(tier, 0) + count
    arena.seek(plan.prefix_end)
    return by_tier


def relocate(
    plan: LinkPlan, tokens: TokenIds, arena: Arena, load: LoadFunction, relocator: Relocator
) -> dict[str, int]:
    """Load every relocated span of a plan, after the valid positions. Return tokens by tier. Raises CorruptRun."""
    by_tier: dict[str, int] = {}
    for moved in plan.relocates:
        end = moved.source_start + moved.end - moved.start
        expected = np.concatenate([token_ids(moved.before), tokens[moved.start : moved.end]])
        for tier, count in load([moved.ref], expected, end, relocator.sink(arena, moved)).items():
            by_tier[tier] = by_tier.get(tier, 0) + count - len(moved.before)
    return by_tier


def prefill(
    plan: LinkPlan, tokens: TokenIds, cache: Cache, runner: Runner, costs: Costs | None = None, *, largest: bool = False
) -> torch.Tensor:
    """Run the computed spans in order. Return the logits after the last token, `[vocab]`. `costs` gets the time
    unless steps may have waited for copies. `largest`: see `Runner.step`."""
    started = time.perf_counter()
    if isinstance(cache, ArenaCache) and cache.arena.is_copying:
        costs = None
    *earlier, last = plan.computes
    for span in earlier:
        runner.extend(tokens[span.start : span.end], cache, span.start)
    logits = runner.step(tokens[last.start : last.end], cache, last.start, largest=largest)
    if costs is not None:
        logits[:1].cpu()  # waits for the device, which computes asynchronously
        waited = cache.arena.waited if isinstance(cache, ArenaCache) else 0.0
        costs.computed(last.end - plan.computes[0].start, time.perf_counter() - started - waited)
    return logits


@dataclass
class Times:
    """When a request reached each stage (seconds of `time.perf_counter`), and how long parts of it took."""

    started: float
    compiled: float
    ready: float = 0.0  # stored KV in place
    first: float = 0.0  # first token chosen
    ended: float = 0.0
    constrain_ms: float = 0.0  # part of the time up to `compiled`
    queue_ms: float = 0.0
    link_ms: float = 0.0
    load_ms: float = 0.0
    waited_ms: float = 0.0  # part of `load_ms`: prefill waited for layers that had not arrived yet

    def placed(self, link_ms: float, load_ms: float, waited_ms: float) -> None:
        """Record the times of placing stored KV."""
        self.link_ms, self.load_ms, self.waited_ms = link_ms, load_ms + waited_ms, waited_ms

    def milliseconds(self) -> dict[str, float]:
        return {
            "compile": (self.compiled - self.started) * 1e3 - self.constrain_ms,
            "constrain": self.constrain_ms,
            "queue": self.queue_ms,
            "link": self.link_ms,
            "load": self.load_ms,
            "prefill": (self.first - self.ready) * 1e3 - self.waited_ms,
            "decode": (self.ended - self.first) * 1e3,
        }


@dataclass
class Answer:
    """One answer as it grows token by token, alone or in a batch."""

    sampler: Sampler
    text: TextStream
    max_new_tokens: int
    stop_tokens: frozenset[int]
    times: Times
    trace: hashlib._Hash | None = None  # fed with the bytes of every step's logits
    top: int | None = None  # number of likeliest tokens to report with each token; None: no log-probabilities
    read_calls: Callable[[str], Sequence[ToolCall]] | None = None  # finds the calls in a text; None: do not look
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "length"
    done: bool = False
    there: torch.Tensor | None = None  # the last token on the model's device, `[1]`, if that is not the host
    as_generated: bool = False  # some of the prompt's ids are those that an earlier request ran
    largest: bool = False  # nothing but the largest logit is asked for
    drafter: Drafter | None = None  # None: a step computes one token
    on_result: Callable[[Generation], None] = lambda result: None

    def take(self, logits: torch.Tensor, choice: Choice | None = None) -> Piece:
        """Choose the next token from logits `[vocab]`, unless the `choice` was made already. `done` then tells whether
        it was the last.

        A stop token ends the answer and is in its ids, but not in its text. A stop string is not in the text either.
        """
        if self.trace is not None:
            self.trace.update(logits.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        chosen = fetched([self.sampler.choose(logits)])[0] if choice is None else choice
        token, self.there = chosen.token, chosen.there
        self.sampler.take(token)
        self.token_ids.append(token)
        if self.drafter is not None:
            self.drafter.add(token)
        if self.top is not None:
            self.logprobs.append(logprobs(logits, token, self.top))
        ends = token in self.stop_tokens
        text = "" if ends else self.text.push(token)
        ends = ends or self.sampler.ended
        self.done = ends or self.text.cut or len(self.token_ids) == self.max_new_tokens
        if self.done:
            text += self.text.finish()
            self.finish_reason = "stop" if ends or self.text.cut else "length"
            if self.read_calls is not None:
                self.tool_calls = tuple(self.read_calls(self.text.whole()))
        now = time.perf_counter()
        if len(self.token_ids) == 1:
            self.times.first = now
        self.times.ended = now
        return Piece(text, token, len(self.token_ids) - 1, logprob=self.logprobs[-1] if self.logprobs else None)

    def take_each(self, rows: Iterable[torch.Tensor], draft: Draft) -> Iterator[Piece]:
        """Choose tokens from the logits after the newest token and after those of a draft, as long as the draft is
        right and the answer goes on."""
        for number, (logits, drafted) in enumerate(zip_longest(rows, draft.tokens)):
            piece = self.take(logits)
            is_right = drafted == self.token_ids[-1]
            ends = self.done or not is_right
            if ends and self.drafter is not None:
                self.drafter.was(draft, number + is_right)
            yield piece
            if ends:
                return

    def result(
        self, plan: LinkPlan, by_tier: dict[str, int], miss: Miss | None, blended: Blended | None = None
    ) -> Piece:
        """Return the last piece of a stream, which carries the whole answer."""
        times = self.times
        whole = Generation(
            text=self.text.text,
            token_ids=tuple(self.token_ids),
            prompt_tokens=plan.length,
            cached_tokens=plan.cached_tokens,
            cached_by_tier=by_tier,
            ttft_ms=(times.first - times.started) * 1e3,
            total_ms=(times.ended - times.started) * 1e3,
            timings=times.milliseconds() | (blended.milliseconds() if blended else {}),
            exactness=plan.exactness.label,
            finish_reason=self.finish_reason,
            last_cut=plan.last_cut,
            blended_tokens=plan.blended_tokens,
            repaired_tokens=blended.repaired if blended else 0,
            divergence=blended.divergence if blended else None,
            logits_digest=self.trace.hexdigest() if self.trace else None,
            tool_calls=self.tool_calls,
            logprobs=tuple(self.logprobs) if self.top is not None else None,
            tokens="as_generated" if self.as_generated else "canonical",
            drafted_tokens=self.drafter.drafted if self.drafter else 0,
            accepted_tokens=self.drafter.accepted if self.drafter else 0,
            miss=miss,
        )
        self.on_result(whole)
        return Piece("", None, len(self.token_ids), whole)


def decode(
    runner: Runner, cache: Cache, logits: torch.Tensor, position: int, answer: Answer, costs: StepCosts
) -> Generator[Piece, None, None]:
    """Choose tokens one by one from `position` on. Yield a piece for each. If the answer has a drafter, `costs` says
    how many drafted tokens a step computes, and learns.

    On a device, the step over a token begins before the host knows the token. If it is the last one, the step is
    forgotten.
    """
    if answer.drafter is not None and isinstance(cache, ArenaCache):
        yield from _with_drafts(runner, cache, logits, position, answer, answer.drafter, costs)
        return
    ahead = _goes_ahead(runner, cache, answer)
    try:
        while True:
            at = position + len(answer.token_ids)
            if not ahead or len(answer.token_ids) + 1 == answer.max_new_tokens:
                yield answer.take(logits)
                if answer.done:
                    return
                last = token_ids(answer.token_ids[-1:])
                logits = runner.step(last, cache, at, answer.there, largest=answer.largest)
                continue
            chosen = answer.sampler.choose(logits)
            assert isinstance(chosen, torch.Tensor)
            arrived = runner.port.fetch(chosen)
            if runner.lean is None and (answer.trace is not None or answer.top is not None):
                logits = logits.clone()  # a compiled model may write the next ones in their place
            following = _attempt(partial(_next, runner, cache, at, chosen))
            stream = runner.port.current()
            yield answer.take(logits, Choice(int(arrived()), chosen))
            if answer.done:
                return
            logits = following()
            if runner.port.current() != stream:  # the caller goes on in another one
                stream.record().synchronize()
                logits = logits.clone()
                runner.port.current().record().synchronize()  # nobody waits for this stream to reuse what it read
    finally:
        if ahead and isinstance(cache, ArenaCache):
            cache.arena.advance(min(cache.arena.length, position + max(0, len(answer.token_ids) - 1)))


def _with_drafts(
    runner: Runner,
    cache: ArenaCache,
    logits: torch.Tensor,
    position: int,
    answer: Answer,
    drafter: Drafter,
    costs: StepCosts,
) -> Generator[Piece, None, None]:
    """Do what `decode` does, with drafted tokens in the steps. The KV of those that were wrong is forgotten."""
    arena, rows, draft, pace = cache.arena, logits[None], Draft(), Pace(costs)
    try:
        while True:
            yield from answer.take_each(rows, draft)
            if answer.done:
                return
            at = position + len(answer.token_ids) - 1
            arena.advance(at)
            (draft,) = pace.drafts([drafter if runner.is_invariant else None])
            began = time.perf_counter()
            tokens = token_ids([answer.token_ids[-1], *draft.tokens])
            rows = runner.step_each(tokens, cache, at, largest=answer.largest)
            pace.took(1, len(rows), time.perf_counter() - began)
    finally:
        arena.advance(min(arena.length, position + max(0, len(answer.token_ids) - 1)))


def _next(runner: Runner, cache: Cache, at: int, chosen: torch.Tensor) -> torch.Tensor:
    """Run a step over a token that only the device knows. Its logits stay as they are whatever else runs."""
    logits = runner.step(_UNKNOWN, cache, at, chosen.clamp(min=0))
    return logits.clone() if runner.lean is None else logits


def _goes_ahead(runner: Runner, cache: Cache, answer: Answer) -> bool:
    """Whether a step may begin before its token is known, and be forgotten: recurrent states have no way back."""
    has_states = isinstance(cache, ArenaCache) and bool(cache.arena.states)
    return runner.port.goes_ahead and answer.sampler.needs_no_host and not has_states


def _attempt(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Run something now. What is returned returns its result, or raises its error."""
    try:
        found = run()
    except Exception as error:
        return partial(_raised, error)
    return lambda: found


def _raised(error: Exception) -> torch.Tensor:
    raise error
