"""The path of a request: compile, link, execute, emit. Read this module first; `engine` is what users see of it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextlib import closing as closed
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Unpack

import torch
from transformers import DynamicCache

from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.config import EngineConfig
from keepwarm.core.activity import Activity
from keepwarm.core.codecs import codec
from keepwarm.core.cost import Costs
from keepwarm.core.counts import Counts
from keepwarm.core.drafts import StepCosts
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.plan import Compute, LinkPlan
from keepwarm.core.request import GenerateArgs, PromptArgs
from keepwarm.core.results import Generation, Piece
from keepwarm.core.schedule import PAGE_ENCODED, PAGE_TOKENS, Grid, Pages, Schedule, Scratch, Serial
from keepwarm.core.spans import MissReason, Reuse
from keepwarm.core.uncached import CACHED, Uncached, Why
from keepwarm.core.unclosed import closing, nothing, remaining, weakly
from keepwarm.errors import PromptTooLong, TemplateError, UnsupportedModel
from keepwarm.linker.diagnose import Misses
from keepwarm.models.choose import choose_adapter
from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.pipeline.answering import new_answer
from keepwarm.pipeline.chunk_reuse import Chunks, check
from keepwarm.pipeline.linked import Linked
from keepwarm.pipeline.placed import Placed
from keepwarm.pipeline.prefix_loader import PrefixLoader, StoreRules
from keepwarm.pipeline.prepared import Opened, Prepared
from keepwarm.pipeline.prompts import Prompts
from keepwarm.pipeline.snapshots import Snapshots
from keepwarm.pipeline.stored import archive_of
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.constrain import Constraints
from keepwarm.runtime.execute import Answer, decode, prefill
from keepwarm.runtime.loader import LoadedModel
from keepwarm.runtime.native.reads import cached_reads
from keepwarm.runtime.runner import Runner
from keepwarm.store.archive import Archive
from keepwarm.store.runfile.codec import coded_bytes

log = logging.getLogger(__name__)


class Turn(Protocol):
    """A request that is a turn of a session."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of `Engine.generate`, with the whole conversation."""
        ...


class Turns(Protocol):
    """What the pipeline needs from sessions, which belong to a higher layer."""

    def begin(self, prompt: str | Sequence[int] | None, arguments: Mapping[str, Any], epoch: int) -> Turn:
        """Begin a turn with what the user says next."""
        ...

    def finish(self, turn: Any, compiled: CompiledPrompt, result: Generation) -> None:
        """Record the turn's answer."""
        ...


class Pipeline:
    """One model with its cache; takes a request from its arguments to its answer. Threads may share it."""

    def __init__(self, model: LoadedModel, config: EngineConfig, turns: Callable[[Pipeline], Turns]) -> None:
        """`turns` makes the sessions when the first request names one."""
        check(model, config)
        self.config = config
        self.model = model
        self.tokenizer = HFTokenizer(model.tokenizer, model.context_window)
        self.adapter = choose_adapter(
            model.model.config.to_dict(),
            self.tokenizer,
            tool_order=config.tool_order,
            template_args=config.template_args,
        )
        _check_encoded(model.runner, model.geometry, config)
        self.pool = ArenaPool(
            model.geometry,
            model.runner.port,
            model.context_window,
            cached_reads(),
            config.max_device,
            keep_encoded=config.kv_in_memory == "encoded",
            form=model.form,
        )
        self.lossy = config.kv_codec != "raw"
        self.archive = archive_of(config, model.geometry, model.runner.port)
        self.costs = Costs(model.geometry.bytes_per_token)
        self.step_costs = StepCosts()
        self.stop_tokens = model.stop_tokens | self.adapter.stop_tokens
        self.constraints = Constraints(self.tokenizer, self.adapter, self.stop_tokens, model.runner.vocabulary)
        self.prompts = Prompts(model, config, self.tokenizer, self.adapter, self.constraints)
        self.chunks = Chunks(model, config, self.tokenizer, self.adapter, self.archive, self.pool)
        chunks = self.chunks  # holds no reference to the pipeline; a callback must not
        self.misses = Misses(self.archive, self.tokenizer.decode, self.costs, model.geometry.bytes_per_token)
        self.loader = PrefixLoader(
            self.pool,
            self.archive,
            model.runner,
            self.costs,
            self.misses,
            StoreRules(config.is_choosy, config.store_answers, self.lossy, twice=config.admit == "second_use"),
            relocator=lambda: chunks.relocator,
            is_current=model.is_current,
            snapshots=self._snapshots() if model.form.has_states else None,
        )
        self.activity = Activity()
        self.archive.rest_while(self.activity.quiet_seconds)
        self.counts = Counts(("device", "ram", "disk", *self.archive.remotes.names))
        self.on_purge: list[Callable[[frozenset[bytes]], object]] = []  # called after purges, with their salts' tags
        self.on_close: list[Callable[[float], bool]] = []  # called by `close`, with a deadline
        self._make_turns, self._making = turns, threading.Lock()
        self._turns: Turns | None = None
        with suppress(TemplateError):  # compiles the template now, not within the first request's time
            self.adapter.render([{"role": "user", "content": "."}])
        if model.uncached_reason:
            log.warning("running uncached: %s", model.uncached_reason)
        # The archive's threads call back. They must not keep the pipeline alive.
        self.archive.on_purge(weakly(self.forget, nothing))
        self.archive.remotes.report(partial(_reported, self.counts, self.archive))
        let_go = partial(self.archive.let_go, self.chunks.stop)
        self._unclosed = closing(self, Pipeline.close, let_go, config.exit_timeout, name="Engine")

    def _snapshots(self) -> Snapshots:
        geometry, step = self.model.geometry, self.config.step_for(invariant=False)
        coded = coded_bytes(geometry, codec(self.config.kv_codec), step) if self.lossy else 0
        each = -(-(coded or geometry.stored.block_bytes(step)) // step)  # as it is stored
        return Snapshots(self.archive, each, self.model.form.state_bytes, self.config.snapshot_budget)

    # ---- compile ----

    @property
    def turns(self) -> Turns:
        """The sessions."""
        with self._making:
            if self._turns is None:
                self._turns = self._make_turns(self)
            return self._turns

    def prepare(
        self,
        prompt: str | Sequence[int] | None,
        arguments: Mapping[str, Any],
        epoch: int | None = None,
        *,
        answers: bool = True,
        room: int | None = None,
        started: float | None = None,
    ) -> Prepared:
        """Check and compile the arguments of `Engine.generate`, as a turn of a session if they name one. The request's
        clock starts here. Pass `epoch` (from `Archive.epoch`) and `started` (of `time.perf_counter`) if the request
        began earlier. Without `answers`, the request is only looked up, not answered. With `room`, an answer that does
        not fit with its prompt into this number of tokens is shortened until it fits. Raises PromptError and
        ConfigError."""
        if answers:
            self.activity.touch()
        now = self.archive.epoch()  # always called: it makes this process forget what was purged
        epoch = now if epoch is None else epoch
        started = time.perf_counter() if started is None else started
        if arguments.get("session") is None:
            return self.prompts.prepare(prompt, arguments, started, epoch, answers=answers, room=room)
        turns = self.turns
        turn = turns.begin(prompt, arguments, epoch)
        prepared = self.prompts.prepare(None, turn.arguments, started, epoch, answers=answers, room=room)
        return replace(prepared, on_result=partial(turns.finish, turn, prepared.compiled))

    def uncached_reason(self, length: int) -> Why:
        """Return why a sequence of this length runs without the cache; empty when it uses the cache."""
        if self.model.model.training:
            return Uncached.TRAINING.told()
        window = self.model.cacheable_window
        if self.model.uncached_reason:
            return self.model.uncached_reason
        if window is not None and length > window:
            return Uncached.LONG.told(window=window, length=length)
        return CACHED

    # ---- link ----

    @property
    def grid(self) -> Grid:
        """Where blocks and steps end. It depends on the runner's kind of arithmetic."""
        scratch = Scratch(*self.model.scratch_bytes, self.config.max_scratch)
        step = self.config.step_for(invariant=self.model.runner.is_invariant)
        if self.model.runner.is_invariant:
            return Pages(step, scratch, PAGE_ENCODED if self.lossy else PAGE_TOKENS)
        kind = Serial if self.model.runner.serial else Schedule
        return kind(step, self.config.min_step, scratch)

    def linked(self, compiled: CompiledPrompt, epoch: int | None = None) -> Linked:
        """Return the prompt with its blocks' names under the current model. `epoch` is the one at which the request
        began (None: now); what was purged since then is not stored."""
        epoch = self.archive.epoch() if epoch is None else epoch
        namespace = self.model.namespace(self.adapter.identity if compiled.templated else "", compiled.lora)
        stateful = self.model.form.has_states
        return Linked.of(compiled, namespace, self.grid, epoch, self.loader.naming, stateful=stateful)

    def lease(
        self,
        linked: Linked,
        reuse: Reuse,
        capacity: int,
        *,
        warming: bool = False,
        overlap: bool = False,
        wait: float = 0.0,
    ) -> AbstractContextManager[Placed]:
        """See `PrefixLoader.lease`."""
        return self.loader.lease(linked, reuse, capacity, warming=warming, overlap=overlap, wait=wait)

    # ---- execute ----

    @contextmanager
    def open(
        self, prepared: Prepared, linked: Linked | None, capacity: int, uncached: Why, wait: float = 0.0
    ) -> Iterator[Opened]:
        """Open a cache of `capacity` positions with the stored KV of `linked`; an empty cache if that is None. `wait`:
        see `ArenaPool.acquire`."""
        if linked is None and (lora := prepared.compiled.lora) is not None:
            raise UnsupportedModel(
                f"adapter {lora.name!r} needs the compiled kernels, and this request runs without them: {uncached}"
            )
        leased = self.lease(linked, prepared.reuse, capacity, overlap=True, wait=wait) if linked else nullcontext()
        alone = self.model.alone.held() if self.model.alone else nullcontext()
        with alone, self.activity, self.chunks.busy(), leased as placed:
            prepared.times.ready = time.perf_counter()
            if placed:
                placed.largest = prepared.largest
                yield Opened(placed, None, None)
            else:
                plan = self.bare_plan(len(prepared.compiled.tokens))
                cache = DynamicCache(config=self.model.model.config)
                yield Opened(None, (plan, cache), self.misses.uncached(prepared.compiled, uncached))

    @staticmethod
    def bare_plan(length: int) -> LinkPlan:
        """Return the plan of a prompt that runs without the store."""
        return LinkPlan(length, (Compute(0, length),), 0, MissReason.UNCACHEABLE)

    def begin_answer(self, prepared: Prepared, opened: Opened) -> Answer:
        """Record that the prompt is computed. Return its answer, which is empty so far."""
        self.activity.first_token()
        if opened.placed:
            opened.placed.computed_to = opened.placed.plan.blended_from
            prepared.times.placed(opened.placed.link_ms, opened.placed.load_ms, opened.placed.arena.waited * 1e3)
        self.count(len(prepared.compiled.tokens), opened.by_tier)
        ends = prepared.decoding.ends(self.stop_tokens)
        drafted = self.config.draft_tokens
        return new_answer(prepared, opened, self.model.runner, self.tokenizer, ends, drafted, self.archive)

    def linked_for(self, prepared: Prepared) -> Linked | None:
        """Return the request's prompt, linked for its reuse mode; None when it runs uncached."""
        if self.uncached_reason(len(prepared.compiled.tokens) + prepared.decoding.max_new_tokens):
            return None
        linked = self.linked(prepared.compiled, prepared.epoch)
        if prepared.reuse is not Reuse.CHUNKS:
            return linked
        rule = prepared.decoding.repair_rule(self.config.repair)
        bases = self._linked_bases(prepared.bases, prepared.epoch)
        return replace(linked, blending=self.chunks.blending(prepared.compiled, linked.namespace, rule, bases))

    def _linked_bases(self, bases: Sequence[PromptArgs], epoch: int) -> Iterator[Linked]:
        """Yield the prompts of which the request's is an edit. Each is compiled when it is reached."""
        for base in bases:
            with suppress(PromptTooLong):  # then it was never computed
                yield self.linked(self.prompts.compiled(None, base), epoch)

    def first_logits(self, prepared: Prepared, opened: Opened) -> torch.Tensor:
        """Compute the rest of the prompt. Return the logits after its last token, `[vocab]`."""
        placed = opened.placed
        if placed is None:
            return prefill(opened.plan, prepared.compiled.tokens, opened.cache, self.model.runner)

        def compute() -> torch.Tensor:  # after a relink the new plan may have chunks
            if self.chunks.compute(placed):
                assert placed.blended is not None
                return placed.blended.logits
            return self.loader.compute(placed)

        return self.loader.repeated(placed, compute)

    def run(self, prepared: Prepared) -> Generator[Piece, None, None]:
        """Run a request from its plan to its answer, piece by piece; the last piece carries the result."""
        tokens = prepared.compiled.tokens
        capacity = len(tokens) + prepared.decoding.max_new_tokens
        linked = self.linked_for(prepared)
        uncached, wait = self.uncached_reason(capacity), self.config.device_timeout
        with self.open(prepared, linked, capacity, uncached, wait) as opened:
            placed = opened.placed
            logits = self.first_logits(prepared, opened)
            answer = self.begin_answer(prepared, opened)
            if placed:
                placed.generated = answer.token_ids  # this list grows
            with closed(
                decode(self.model.runner, opened.cache, logits, len(tokens), answer, self.step_costs)
            ) as pieces:
                yield next(pieces)
                if placed:
                    self.loader.explain(placed)
                yield from pieces
            if placed:
                self.chunks.keep(placed)
        if linked and placed:
            self.chunks.answered(linked, placed, answer.token_ids)
        blended = placed.blended if placed else None
        yield answer.result(opened.plan, opened.all_by_tier, opened.miss, blended)

    def count(self, length: int, by_tier: Mapping[str, int]) -> None:
        """Count a request of `length` tokens, and where its KV came from: here, and in the store for all its users."""
        for name, number in self.counts.add(length, by_tier).items():
            self.archive.contents.count(name, number)

    def stream(
        self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]
    ) -> Generator[Piece, None, None]:
        """See `Engine.stream`."""
        return self.run(self.prepare(prompt, arguments))

    def generate(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> Generation:
        """See `Engine.generate`."""
        result = None
        for piece in self.stream(prompt, **arguments):
            result = piece.result
        assert result is not None
        return result

    # ---- what is forgotten, and the end ----

    def forget(self, tags: frozenset[bytes] = frozenset()) -> None:
        """Forget what this process must not keep after a purge of these salts, here or in another process: KV in
        arenas, texts of earlier prompts, and what the callbacks in `on_purge` remove."""
        self.pool.forget()
        self.adapter.forget()
        self.chunks.forget()
        self.constraints.forget()
        self.loader.naming.forget()
        with ExitStack() as every:  # calls each one, even when another raises
            for forget in reversed(self.on_purge):
                every.callback(forget, tags)

    def close(self, seconds: float = math.inf) -> bool:
        """Settle sessions, write what is still queued and release the store, within about `seconds`. Return False when
        something was not done by then. It may be called twice."""
        until = time.monotonic() + seconds
        settled = True
        for close in () if self.prompts.closed else self.on_close:
            settled = close(until) and settled
        self.prompts.closed = True
        self._unclosed.detach()
        self.chunks.close(remaining(until))
        written = self.archive.close(remaining(until))
        self.pool.close()
        return settled and written


def _reported(counts: Counts, archive: Archive) -> dict[str, int]:
    """Return the counts that `keepwarm stats --fleet` adds up over replicas."""
    stored = archive.stats()
    return counts.named() | {name: stored[name] for name in ("corrupt", "dropped_writes", "store_errors")}


def _check_encoded(runner: Runner, geometry: KVGeometry, config: EngineConfig) -> None:
    """Raise UnsupportedModel if KV is to stay encoded in memory and no kernel can attend to it."""
    if config.kv_in_memory != "encoded":
        return
    cure = "take kv_in_memory='decoded', which keeps KV encoded in RAM and on disk and decodes it for attention"
    if runner.lean is None or not runner.lean.reads_encoded:
        why = "the log of level INFO says why" if runner.lean is None else "but on the kernels for GPUs"
        raise UnsupportedModel(
            "kv_in_memory='encoded' needs the compiled kernels for the processor, and this model does not run on them "
            f"(on {runner.device.type}; {why}): {cure}"
        )
    if any(layer.window is not None for layer in geometry.layers):
        raise UnsupportedModel(f"kv_in_memory='encoded' needs layers without a window, and this model has some: {cure}")
