"""The driver: compile, link, execute, emit. Read this page first; `engine` is what users see of it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from keepwarm.chunks import Chunks, check
from keepwarm.compiler.segment import CompiledPrompt, render, segment
from keepwarm.config import EngineConfig, store_key
from keepwarm.core.activity import Activity
from keepwarm.core.codecs import codec
from keepwarm.core.cost import Costs
from keepwarm.core.counts import Counts
from keepwarm.core.plan import Compute, LinkPlan
from keepwarm.core.request import Decoding, GenerateArgs, PromptArgs, Request, split
from keepwarm.core.results import Generation, Miss, Piece
from keepwarm.core.schedule import PAGE_ENCODED, PAGE_TOKENS, Grid, Pages, Schedule, Scratch
from keepwarm.core.spans import MissReason, Reuse
from keepwarm.core.tools import ToolCall
from keepwarm.errors import ConfigError, CorruptRun, PromptError, PromptTooLong, TemplateError
from keepwarm.linker.diagnose import Misses
from keepwarm.linker.text import TextPolicy
from keepwarm.models.choose import choose_adapter
from keepwarm.models.tokenizer import HFTokenizer
from keepwarm.placing import Linked, Placed, Placing
from keepwarm.runtime.arenas import ArenaPool
from keepwarm.runtime.codecs import TorchCodec
from keepwarm.runtime.constrain import Constraint, Constraints
from keepwarm.runtime.encoded import check_encoded
from keepwarm.runtime.execute import Answer, Times, decode, prefill
from keepwarm.runtime.loader import LoadedModel
from keepwarm.runtime.native.reads import cached_reads
from keepwarm.runtime.sampling import Sampler, TextStream
from keepwarm.store.archive import Archive
from keepwarm.store.coding import Coding
from keepwarm.store.remote import Limits
from keepwarm.store.retention import Rules

log = logging.getLogger("keepwarm.engine")


@dataclass(frozen=True)
class Prepared:
    """A request that is checked and compiled."""

    compiled: CompiledPrompt
    decoding: Decoding
    reuse: Reuse
    times: Times
    epoch: int  # of the store, when the request began
    constraint: Constraint | None = None
    bases: tuple[PromptArgs, ...] = ()
    parse: Callable[[str], list[ToolCall]] | None = None  # finds calls in the answer
    on_result: Callable[[Generation], None] = lambda result: None  # called once, before the answer's last piece


@dataclass(frozen=True)
class Opened:
    """A request under way: what to compute, and the cache to compute it in."""

    placed: Placed | None  # None: it runs without the store, by `bare`
    bare: tuple[LinkPlan, Cache] | None
    uncached: Miss | None  # why it does

    @property
    def miss(self) -> Miss | None:
        return self.placed.miss if self.placed else self.uncached

    @property
    def plan(self) -> LinkPlan:
        return self.bare[0] if self.bare else self._there.plan

    @property
    def cache(self) -> Cache:
        return self.bare[1] if self.bare else self._there.arena.cache

    @property
    def _there(self) -> Placed:
        assert self.placed is not None
        return self.placed

    @property
    def by_tier(self) -> dict[str, int]:
        return self.placed.by_tier if self.placed else {}

    @property
    def all_by_tier(self) -> dict[str, int]:
        """Blended tokens included."""
        moved = self.placed.blended_by_tier if self.placed else {}
        return {tier: self.by_tier.get(tier, 0) + moved.get(tier, 0) for tier in {**self.by_tier, **moved}}


class Driver:
    """One model with its cache: the way of a request from its arguments to its answer. Threads may share it."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
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
        check_encoded(model.runner, config)
        self.pool = ArenaPool(
            model.geometry, model.runner.port, model.context_window, cached_reads(), config.max_device,
            keep_encoded=config.kv_in_memory == "encoded",
        )  # fmt: skip
        self.lossy = config.kv_codec != "raw"
        self.archive = Archive.open(
            config.store,
            max_ram=config.max_ram,
            max_disk=config.max_disk,
            key=store_key(config.store_key_file) if config.store is not None or config.remote else None,
            patience=config.store_timeout,
            map_files=config.map_files,
            rules=Rules(
                ram_policy=config.ram_policy,
                disk_policy=config.disk_policy,
                admit=config.admit,
                min_tokens=config.min_store_tokens,
                min_write=config.min_write_tokens,
                ttl=config.store_ttl,
                writes_per_day=config.max_disk_writes_per_day,
            ),
            coding=Coding(TorchCodec(codec(config.kv_codec)), model.geometry) if self.lossy else None,
            remotes=config.remote_urls,
            limits=Limits(
                timeout=config.remote_timeout,
                load_timeout=config.remote_load_timeout,
                cap=config.max_remote,
                ttl=config.store_ttl,
            ),
        )
        self.costs = Costs(model.geometry.bytes_per_token)
        self.stop_tokens = model.stop_tokens | self.adapter.stop_tokens
        self.constraints = Constraints(self.tokenizer, self.adapter, self.stop_tokens, model.runner.vocabulary)
        self.chunks = Chunks(model, config, self.tokenizer, self.adapter, self.archive, self.pool)
        chunks = self.chunks  # which does not hold the engine, as what calls back must not
        self.misses = Misses(self.archive, self.tokenizer.decode, self.costs, model.geometry.bytes_per_token)
        self.placing = Placing(
            self.pool, self.archive, model.runner, self.costs, self.misses,
            choosy=config.is_choosy, answers=config.store_answers, lossy=self.lossy,
            relocator=lambda: chunks.relocator, is_current=model.is_current,
        )  # fmt: skip
        self.activity = Activity()
        self.counts = Counts(("device", "ram", "disk", *self.archive.remotes.names))
        self._closed = False
        with suppress(TemplateError):  # the template is compiled now, not inside the first request's clock
            self.adapter.render([{"role": "user", "content": "."}])
        if model.uncached_reason:
            log.warning("running uncached: %s", model.uncached_reason)

    # ---- compile ----

    def checked(
        self,
        prompt: str | Sequence[int] | None,
        arguments: Mapping[str, Any],
        started: float,
        epoch: int,
        *,
        answers: bool = True,
    ) -> Prepared:
        """Check and compile the arguments of a request whose clock began at `started`, at an epoch of the store. Raises
        PromptError and ConfigError. With `answers` off it is only looked up: nothing that chooses tokens is built, and
        no room is kept for an answer of a length that nobody asked for."""
        request, decoding = split(prompt, arguments)
        reuse = decoding.reuse_mode(self.config.reuse)
        if decoding.repair is not None:
            decoding.repair_rule(self.config.repair)
        compiled = self._compile(request, decoding.max_new_tokens if answers or "max_new_tokens" in arguments else 0)
        constrained = time.perf_counter()
        constraint = self.constraints.of(request, decoding) if answers else None
        ready = time.perf_counter()
        times = Times(started, ready, constrain_ms=(ready - constrained) * 1e3)
        calls = decoding.tool_choice != "none" and decoding.response_schema is None
        return Prepared(
            compiled,
            decoding,
            reuse,
            times,
            epoch,
            constraint,
            request.salted_bases,
            self._parser(request) if calls else None,
        )

    def _parser(self, request: Request) -> Callable[[str], list[ToolCall]] | None:
        return self.adapter.call_parser(request.tools) if request.tools else None

    def compiled(self, prompt: str | Sequence[int] | None, arguments: Mapping[str, Any]) -> CompiledPrompt:
        """A prompt as `warm` takes it: what is given, without the beginning of an answer."""
        return self._compile(split(prompt, arguments, answer=False, decoding=False)[0], 0)

    def count_tokens(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> int:
        """How many tokens a prompt has as `generate` would run it, more than the context window holds too."""
        request = split(prompt, arguments)[0]
        try:
            return len(self._segmented(request).tokens)
        except PromptTooLong:
            rendered = render(request, self.adapter)
            return self.tokenizer.count(rendered.text, special=rendered.special)

    def _compile(self, request: Request, max_new_tokens: int) -> CompiledPrompt:
        compiled = self._segmented(request)
        self._check_fits(compiled, max_new_tokens)
        return compiled

    def _segmented(self, request: Request) -> CompiledPrompt:
        if self._closed:
            raise ConfigError("this engine is closed; make a new one")
        policy = TextPolicy(self.tokenizer, request.ran, least_share=self.config.least_text_share)
        return segment(request, policy, self.adapter)

    def _check_fits(self, compiled: CompiledPrompt, max_new_tokens: int) -> None:
        length, window = len(compiled.tokens), self.model.context_window
        if window is not None and length + max_new_tokens > window:
            raise PromptTooLong(
                f"the prompt has {length} tokens and {max_new_tokens} new ones are asked for, but the context window "
                f"is {window}: shorten the prompt or lower max_new_tokens",
                length,
            )
        vocabulary = self.model.runner.vocabulary
        if (largest := int(np.maximum.reduce(compiled.tokens))) >= vocabulary:
            raise PromptError(
                f"token id {largest} is outside the model's vocabulary of {vocabulary}: "
                "was the prompt made with this model's tokenizer?"
            )

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
        return Schedule(step, self.config.min_step, scratch)

    def linked(self, compiled: CompiledPrompt, epoch: int | None = None) -> Linked:
        """The prompt's blocks under their names, with the model as it is now. `epoch` is that at which what is linked
        began (None: now); what was purged since then is not stored."""
        epoch = self.archive.epoch() if epoch is None else epoch
        namespace = self.model.namespace(self.adapter.identity if compiled.templated else "")
        return Linked.of(compiled, namespace, self.grid, epoch, self.placing.naming)

    def lease(
        self, linked: Linked, reuse: Reuse, capacity: int, *, warming: bool = False, overlap: bool = False
    ) -> AbstractContextManager[Placed]:
        """See `Placing.lease`."""
        return self.placing.lease(linked, reuse, capacity, warming=warming, overlap=overlap)

    # ---- execute ----

    @contextmanager
    def open(self, prepared: Prepared, linked: Linked | None, capacity: int, uncached: str) -> Iterator[Opened]:
        """A cache of `capacity` positions with the stored KV of `linked` in place, or an empty one without it."""
        leased = self.lease(linked, prepared.reuse, capacity, overlap=True) if linked else nullcontext()
        with self.activity, self.chunks.busy(), leased as placed:
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

    def prefilled(self, prepared: Prepared, opened: Opened) -> Answer:
        """Take note that the prompt is computed; returns its answer, to be grown."""
        decoding, tokens = prepared.decoding, prepared.compiled.tokens
        if opened.placed:
            opened.placed.computed_to = opened.placed.plan.blended_from
            prepared.times.placed(opened.placed.link_ms, opened.placed.load_ms, opened.placed.arena.waited * 1e3)
        self.count(len(tokens), opened.by_tier)
        return Answer(
            Sampler(decoding, tokens, self.model.runner.device, prepared.constraint),
            TextStream(self.tokenizer, decoding.stop_strings),
            decoding.max_new_tokens,
            self.stop_tokens,
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
                yield self.linked(self.compiled(None, base), epoch)

    def first_logits(self, prepared: Prepared, opened: Opened) -> torch.Tensor:
        """Compute what the plan leaves to compute; the logits after the prompt's last token, `[vocab]`."""
        placed = opened.placed
        if placed is None:
            return prefill(opened.plan, prepared.compiled.tokens, opened.cache, self.model.runner)
        while True:
            try:
                if self.chunks.compute(placed):
                    assert placed.blended is not None
                    return placed.blended.logits
                return self.placing.compute(placed)
            except CorruptRun as error:  # the plan that follows may have chunks where this one had none
                self.placing.relink(placed, error)

    def run(self, prepared: Prepared) -> Generator[Piece, None, None]:
        """A request from its plan to its answer, piece by piece; the last piece carries the result."""
        tokens = prepared.compiled.tokens
        capacity = len(tokens) + prepared.decoding.max_new_tokens
        linked = self.linked_for(prepared)
        with self.open(prepared, linked, capacity, self.uncached_reason(capacity)) as opened:
            placed = opened.placed
            logits = self.first_logits(prepared, opened)
            answer = self.prefilled(prepared, opened)
            if placed:
                placed.generated = answer.token_ids  # which grows
            pieces = decode(self.model.runner, opened.cache, logits, len(tokens), answer)
            yield next(pieces)
            if placed:
                self.placing.explain(placed)
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
