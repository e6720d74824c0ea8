"""The way of a request: compile, link, execute, emit. Read this page first; `engine` is what users see of it."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
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
from keepwarm.core.plan import Compute, LinkPlan
from keepwarm.core.request import GenerateArgs, PromptArgs
from keepwarm.core.results import Generation, Piece
from keepwarm.core.schedule import PAGE_ENCODED, PAGE_TOKENS, Grid, Pages, Schedule, Scratch, Serial
from keepwarm.core.spans import MissReason, Reuse
from keepwarm.core.unclosed import closing, nothing, remaining, weakly
from keepwarm.errors import PromptTooLong, TemplateError, UnsupportedModel
from keepwarm.linker.diagnose import Misses
from keepwarm.models.choose import choose_adapter
from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.pipeline.chunk_reuse import Chunks, check
from keepwarm.pipeline.linked import Linked
from keepwarm.pipeline.prefix_loader import Placed, PrefixLoader
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
from keepwarm.runtime.sampling import Sampler, TextStream
from keepwarm.store.archive import Archive
from keepwarm.store.runfile.codec import coded_bytes

log = logging.getLogger(__name__)


class Turn(Protocol):
    """A request that is a turn of a session."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Of `Engine.generate`: the whole conversation."""
        ...


class Turns(Protocol):
    """What the pipeline asks of sessions, which stand above it."""

    def begin(self, prompt: str | Sequence[int] | None, arguments: Mapping[str, Any], epoch: int) -> Turn:
        """A turn out of what the user says next."""
        ...

    def finish(self, turn: Any, compiled: CompiledPrompt, result: Generation) -> None:
        """Take note of its answer."""
        ...


class Pipeline:
    """One model with its cache: the way of a request from its arguments to its answer. Threads may share it."""

    def __init__(self, model: LoadedModel, config: EngineConfig, turns: Callable[[Pipeline], Turns]) -> None:
        """`turns` makes the sessions, when the first request names one."""
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
        _check_encoded(model.runner, config)
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
        self.archive = archive_of(config, model.geometry)
        self.costs = Costs(model.geometry.bytes_per_token)
        self.stop_tokens = model.stop_tokens | self.adapter.stop_tokens
        self.constraints = Constraints(self.tokenizer, self.adapter, self.stop_tokens, model.runner.vocabulary)
        self.prompts = Prompts(model, config, self.tokenizer, self.adapter, self.constraints)
        self.chunks = Chunks(model, config, self.tokenizer, self.adapter, self.archive, self.pool)
        chunks = self.chunks  # which does not hold the pipeline, as what calls back must not
        self.misses = Misses(self.archive, self.tokenizer.decode, self.costs, model.geometry.bytes_per_token)
        self.loader = PrefixLoader(
            self.pool,
            self.archive,
            model.runner,
            self.costs,
            self.misses,
            choosy=config.is_choosy,
            answers=config.store_answers,
            lossy=self.lossy,
            relocator=lambda: chunks.relocator,
            is_current=model.is_current,
            snapshots=self._snapshots() if model.form.has_states else None,
        )
        self.activity = Activity()
        self.archive.rest_while(self.activity.quiet_seconds)
        self.counts = Counts(("device", "ram", "disk", *self.archive.remotes.names))
        self.on_purge: list[Callable[[frozenset[bytes]], object]] = []  # told of purges, with the tags of their salts
        self.on_close: list[Callable[[float], bool]] = []  # what else is to be done by `close`, and until when
        self._make_turns, self._making = turns, threading.Lock()
        self._turns: Turns | None = None
        with suppress(TemplateError):  # the template is compiled now, not inside the first request's clock
            self.adapter.render([{"role": "user", "content": "."}])
        if model.uncached_reason:
            log.warning("running uncached: %s", model.uncached_reason)
        # Threads of the archive call back, and must not keep a pipeline that nobody else holds.
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
    ) -> Prepared:
        """Check and compile the arguments of `Engine.generate`, as a turn of its session if it names one; the request's
        clock starts here. `epoch` is the store's (`Archive.epoch`), taken before, if something of the request began
        before. With `answers` off it is only looked up. With `room`, an answer is cut to what fits, with its prompt,
        into so many tokens. Raises PromptError and ConfigError."""
        if answers:
            self.activity.touch()
        now = self.archive.epoch()  # asked in any case: what was purged is forgotten here before anything is met
        epoch, started = now if epoch is None else epoch, time.perf_counter()
        if arguments.get("session") is None:
            return self.prompts.prepare(prompt, arguments, started, epoch, answers=answers, room=room)
        turns = self.turns
        turn = turns.begin(prompt, arguments, epoch)
        prepared = self.prompts.prepare(None, turn.arguments, started, epoch, answers=answers, room=room)
        return replace(prepared, on_result=partial(turns.finish, turn, prepared.compiled))

    def uncached_reason(self, length: int) -> str:
        """Why a sequence of this length runs without the cache; empty when it does not."""
        if self.model.model.training:
            return "the model is in training mode, where dropout makes KV random: call model.eval()"
        window = self.model.cacheable_window
        if self.model.uncached_reason:
            return self.model.uncached_reason
        if window is not None and length > window:
            return (
                f"the model's rotary embedding changes for all tokens beyond {window} tokens, and this sequence may "
                f"reach {length}: its KV depends on the length"
            )
        return ""

    # ---- link ----

    @property
    def grid(self) -> Grid:
        """Where blocks and steps end, by the kind of arithmetic that the runner says it has."""
        scratch = Scratch(*self.model.scratch_bytes, self.config.max_scratch)
        step = self.config.step_for(invariant=self.model.runner.is_invariant)
        if self.model.runner.is_invariant:
            return Pages(step, scratch, PAGE_ENCODED if self.lossy else PAGE_TOKENS)
        kind = Serial if self.model.runner.serial else Schedule
        return kind(step, self.config.min_step, scratch)

    def linked(self, compiled: CompiledPrompt, epoch: int | None = None) -> Linked:
        """The prompt's blocks under their names, with the model as it is now. `epoch` is that at which what is linked
        began (None: now); what was purged since then is not stored."""
        epoch = self.archive.epoch() if epoch is None else epoch
        namespace = self.model.namespace(self.adapter.identity if compiled.templated else "")
        stateful = self.model.form.has_states
        return Linked.of(compiled, namespace, self.grid, epoch, self.loader.naming, stateful=stateful)

    def lease(
        self, linked: Linked, reuse: Reuse, capacity: int, *, warming: bool = False, overlap: bool = False
    ) -> AbstractContextManager[Placed]:
        """See `PrefixLoader.lease`."""
        return self.loader.lease(linked, reuse, capacity, warming=warming, overlap=overlap)

    # ---- execute ----

    @contextmanager
    def open(self, prepared: Prepared, linked: Linked | None, capacity: int, uncached: str) -> Iterator[Opened]:
        """A cache of `capacity` positions with the stored KV of `linked` in place, or an empty one without it."""
        leased = self.lease(linked, prepared.reuse, capacity, overlap=True) if linked else nullcontext()
        alone = self.model.alone.held() if self.model.alone else nullcontext()
        with alone, self.activity, self.chunks.busy(), leased as placed:
            prepared.times.ready = time.perf_counter()
            if placed:
                yield Opened(placed, None, None)
            else:
                plan = self.bare_plan(len(prepared.compiled.tokens))
                cache = DynamicCache(config=self.model.model.config)
                yield Opened(None, (plan, cache), self.misses.uncached(prepared.compiled, uncached))

    @staticmethod
    def bare_plan(length: int) -> LinkPlan:
        """Of a prompt that runs without the store."""
        return LinkPlan(length, (Compute(0, length),), 0, MissReason.UNCACHEABLE)

    def begin_answer(self, prepared: Prepared, opened: Opened) -> Answer:
        """Take note that the prompt is computed; returns its answer, to be grown."""
        self.activity.first_token()
        decoding, tokens = prepared.decoding, prepared.compiled.tokens
        ends = decoding.ends(self.stop_tokens)
        if opened.placed:
            opened.placed.computed_to = opened.placed.plan.blended_from
            prepared.times.placed(opened.placed.link_ms, opened.placed.load_ms, opened.placed.arena.waited * 1e3)
        self.count(len(tokens), opened.by_tier)
        return Answer(
            Sampler(decoding, tokens, self.model.runner.device, prepared.constraint, ends),
            TextStream(self.tokenizer, decoding.stop_strings, decoding.min_tokens),
            decoding.max_new_tokens,
            ends,
            prepared.times,
            hashlib.sha256() if decoding.trace else None,
            decoding.logprobs,
            prepared.parse,
            as_generated=prepared.compiled.match.as_generated,
            on_result=prepared.on_result,
        )

    def linked_for(self, prepared: Prepared) -> Linked | None:
        """The request's prompt, linked under its own mode; None when it runs uncached."""
        if self.uncached_reason(len(prepared.compiled.tokens) + prepared.decoding.max_new_tokens):
            return None
        linked = self.linked(prepared.compiled, prepared.epoch)
        if prepared.reuse is not Reuse.CHUNKS:
            return linked
        rule = prepared.decoding.repair_rule(self.config.repair)
        bases = self._linked_bases(prepared.bases, prepared.epoch)
        return replace(linked, blending=self.chunks.blending(prepared.compiled, linked.namespace, rule, bases))

    def _linked_bases(self, bases: Sequence[PromptArgs], epoch: int) -> Iterator[Linked]:
        """Prompts that another is an edit of, each compiled when it is looked at."""
        for base in bases:
            with suppress(PromptTooLong):  # then it was never computed
                yield self.linked(self.prompts.compiled(None, base), epoch)

    def first_logits(self, prepared: Prepared, opened: Opened) -> torch.Tensor:
        """Compute what the plan leaves to compute; the logits after the prompt's last token, `[vocab]`."""
        placed = opened.placed
        if placed is None:
            return prefill(opened.plan, prepared.compiled.tokens, opened.cache, self.model.runner)

        def compute() -> torch.Tensor:  # a plan that follows may have chunks where this one had none
            if self.chunks.compute(placed):
                assert placed.blended is not None
                return placed.blended.logits
            return self.loader.compute(placed)

        return self.loader.repeated(placed, compute)

    def run(self, prepared: Prepared) -> Generator[Piece, None, None]:
        """A request from its plan to its answer, piece by piece; the last piece carries the result."""
        tokens = prepared.compiled.tokens
        capacity = len(tokens) + prepared.decoding.max_new_tokens
        linked = self.linked_for(prepared)
        with self.open(prepared, linked, capacity, self.uncached_reason(capacity)) as opened:
            placed = opened.placed
            logits = self.first_logits(prepared, opened)
            answer = self.begin_answer(prepared, opened)
            if placed:
                placed.generated = answer.token_ids  # which grows
            pieces = decode(self.model.runner, opened.cache, logits, len(tokens), answer)
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
        """Note a request of so many tokens, and where its KV came from: here, and for all who use the store."""
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
        """Forget what a purge of these salts, here or in another process, must not leave in this one: KV in arenas,
        texts of earlier prompts, and what `on_purge` knows of."""
        self.pool.forget()
        self.adapter.forget()
        self.chunks.forget()
        self.constraints.forget()
        self.loader.naming.forget()
        with ExitStack() as every:  # each is told, whatever another one raises
            for forget in reversed(self.on_purge):
                every.callback(forget, tags)

    def close(self, seconds: float = math.inf) -> bool:
        """Settle sessions, write what is still queued and release the store, within about so many seconds; False when
        something was not done by then. Safe to call twice."""
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
    """What `keepwarm stats --fleet` adds up over replicas."""
    stored = archive.stats()
    return counts.named() | {name: stored[name] for name in ("corrupt", "dropped_writes", "store_errors")}


def _check_encoded(runner: Runner, config: EngineConfig) -> None:
    """Raises UnsupportedModel where nothing attends to encoded KV."""
    if config.kv_in_memory == "encoded" and runner.lean is None:
        raise UnsupportedModel(
            "kv_in_memory='encoded' needs the compiled kernels, and this model does not run on them (on "
            f"{runner.device.type}; the log of level INFO says why): take kv_in_memory='decoded', which keeps KV "
            "encoded in RAM and on disk and decodes it for attention"
        )
