"""The engine: what users see of one model with its cache. How a request is answered: `driver`."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from keepwarm.checks import check
from keepwarm.config import EngineConfig
from keepwarm.core.counts import Counts
from keepwarm.core.identity import salt_key
from keepwarm.core.repair import RepairRule
from keepwarm.core.request import GenerateArgs, PromptArgs
from keepwarm.core.results import ChunkHit, EngineStats, Explanation, Generation, Miss, Piece, WarmReport
from keepwarm.core.spans import Reuse
from keepwarm.core.unclosed import closing, nothing, remaining
from keepwarm.driver import Driver, Prepared
from keepwarm.errors import PromptError
from keepwarm.placing import Linked
from keepwarm.runtime.loader import LoadedModel, ModelSource, load
from keepwarm.store.archive import Archive
from keepwarm.store.purge import Purged

if TYPE_CHECKING:
    from keepwarm.sessions import Sessions
    from keepwarm.toolsets import ToolSet, ToolSets

log = logging.getLogger("keepwarm.engine")

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Engine(Driver):
    """One model with its cache. Threads may share it; requests then take turns step by step."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.on_purge: list[Callable[[], object]] = []  # what else keeps KV under names; called in any thread
        # Threads of the archive call back, and must not keep an engine that nobody else holds.
        self.archive.on_purge(_weakly(self._purged, nothing))
        self.archive.remotes.report(partial(_reported, self.counts, self.archive))
        let_go = partial(self.archive.let_go, self.chunks.stop)
        self._unclosed = closing(self, Engine._close, let_go, config.exit_timeout)

    @classmethod
    def from_pretrained(
        cls, model: ModelSource, *, progress: Callable[[str], None] = log.info, **settings: Any
    ) -> Engine:
        """Load a model and open its store.

        `model` is a folder, a hub id (`HF_TOKEN` is honoured), `"demo"` or a loaded `(model, tokenizer)` pair;
        `settings` are the fields of `EngineConfig`; `progress` is told what takes long. Raises ConfigError, ModelError
        and StoreError with the cure in the message.
        """
        config = EngineConfig.build(**settings)
        check(config)
        return cls(load(model, config, progress), config)

    # ---- requests ----

    def generate(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> Generation:
        """Answer a prompt, reusing stored KV and storing what was computed.

        Arguments are the fields of `core.request.Request` (`messages`, `tools`, `documents`, `segments`, `salt`) and of
        `core.request.Decoding` (`max_new_tokens`, `temperature`, `stop`, `reuse`, ...). With `session`, a name, the
        request is a turn of that session: `messages` are the whole conversation, a prompt is what the user says next
        (see `sessions`). Raises PromptError and ConfigError, and Overloaded when other requests take all of
        `max_device`.
        """
        result = None
        for piece in self.stream(prompt, **arguments):
            result = piece.result
        assert result is not None
        return result

    def stream(
        self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]
    ) -> Generator[Piece, None, None]:
        """As `generate`, piece by piece; the last piece carries the result. A bad request is refused here, at once."""
        return self.run(self.prepare(prompt, arguments))

    def prepare(
        self, prompt: str | Sequence[int] | None, arguments: Mapping[str, Any], epoch: int | None = None
    ) -> Prepared:
        """Check and compile the arguments of `generate`; the request's clock starts here. `epoch` is the store's
        (`Archive.epoch`), taken before, if something of the request began before."""
        self.activity.touch()
        now = self.archive.epoch()  # asked in any case: what was purged is forgotten here before anything is met
        return self._asked(prompt, arguments, now if epoch is None else epoch)

    def _asked(
        self, prompt: str | Sequence[int] | None, arguments: Mapping[str, Any], epoch: int, *, answers: bool = True
    ) -> Prepared:
        """A request, as a turn of its session if it names one. With `answers` off it is only looked up."""
        started = time.perf_counter()
        if arguments.get("session") is None:
            return self.checked(prompt, arguments, started, epoch, answers=answers)
        turn = self.sessions.begin(prompt, arguments, epoch)
        prepared = self.checked(None, turn.arguments, started, epoch, answers=answers)
        return replace(prepared, on_result=partial(self.sessions.finish, turn, prepared.compiled))

    def warm(
        self, prompt: str | Sequence[int] | None = None, *, name: str | None = None, **arguments: Unpack[PromptArgs]
    ) -> WarmReport:
        """Compute and store the KV of a prompt's beginning, so that later prompts that begin with it hit.

        Takes the prompt arguments of `generate`. Later prompts reuse it up to the first token that differs; where
        models run through transformers, up to the last cut before it: of a header (system prompt, tools, documents),
        a segment or a message, and of whole steps of `EngineConfig.step` tokens. Returns when the KV is usable in
        this process; `close` (or leaving the `with` block) makes it durable. `name` labels it in the catalogue. With
        `reuse="chunks"`, and without messages or tools, the documents, segments and what the chunker makes of a raw
        prompt are computed each by itself, for any place, and nothing as a prefix.
        """
        return self.warmed(arguments, prompt=prompt, name=name)

    def warmed(
        self,
        arguments: PromptArgs,
        epoch: int | None = None,
        *,
        prompt: str | Sequence[int] | None = None,
        name: str | None = None,
    ) -> WarmReport:
        """As `warm`. `epoch` is the store's (`Archive.epoch`), taken before, if something of it began before."""
        started, epoch = time.perf_counter(), self.archive.epoch() if epoch is None else epoch
        compiled = self.compiled(prompt, arguments)
        length = len(compiled.tokens)
        reason = "reuse is off" if self.config.reuse is Reuse.OFF else self.uncached_reason(length)
        if reason:
            raise PromptError(f"nothing can be warmed: {reason}")
        linked = self.linked(compiled, epoch)
        if self.config.reuse is Reuse.CHUNKS and not (arguments.get("messages") or arguments.get("tools")):
            return self._warm_chunks(linked, name, started)
        ids = [block.exact for block in linked.blocks]
        new, reused = 0, length
        stored = self.archive.lookup(ids)
        self.archive.promote(ref.run_id for ref in stored if ref.tier == "disk")  # into RAM, before it is asked for
        self.archive.pull(stored, epoch)
        if len(stored) < len(ids):
            with self.lease(linked, Reuse.EXACT, length, warming=True, overlap=True) as placed:
                self.placing.prefill(placed)
                placed.computed_to = length
            reused = placed.plan.cached_tokens
            new = sum(block.end > reused for block in linked.blocks)
        self.archive.replicate(ids, epoch)
        self._count_warmed(length)
        if name is not None:
            self.archive.contents.name(name, ids[-1], epoch, linked.tags)
        return WarmReport(length, new, reused, time.perf_counter() - started)

    def _count_warmed(self, tokens: int) -> None:
        self.archive.contents.count("warmed_prompts")
        self.archive.contents.count("warmed_tokens", tokens)

    def _warm_chunks(self, linked: Linked, name: str | None, started: float) -> WarmReport:
        """What may come back in any order is computed piece by piece, nothing as a prefix."""
        blending = self.chunks.blending(linked.prompt, linked.namespace, RepairRule.parse(self.config.repair))
        new, reused = self.chunks.learn(blending, linked.namespace, linked.epoch, asked=True)
        learnt = [chunk for chunk in blending.chunks if chunk.learn]
        if name is not None and learnt:
            self.archive.contents.name(name, learnt[-1].ids[-1], linked.epoch, linked.tags)
        self._count_warmed(len(linked.prompt.tokens))
        return WarmReport(len(linked.prompt.tokens), new, reused, time.perf_counter() - started)

    def explain(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> Explanation:
        """What a prompt would hit, up to where, and what differs there. Runs and stores nothing.

        Takes the arguments of `generate`, `session` included, and plans as that would at this instant: the same tokens
        are reused, and the reason why no more are is the answer's `miss`, unless what is stored turns out damaged when
        it is read, or chunks to diverge too far when they are computed.
        """
        prepared = self._asked(prompt, arguments, self.archive.epoch(), answers=False)
        compiled = prepared.compiled
        length = len(compiled.tokens)
        linked = self.linked_for(prepared)
        if linked is None:
            why = self.uncached_reason(length + prepared.decoding.max_new_tokens)
            linked, plan, widest = self.linked(compiled), self.bare_plan(length), self.bare_plan(length)
            miss: Miss | None = self.misses.uncached(compiled, why)
        else:
            resident = self.pool.peek(linked.held) if prepared.reuse is not Reuse.OFF else 0
            costs = self.costs.copy()
            plan, miss = self.placing.plan(linked, prepared.reuse, resident, costs)
            widest = self.placing.link(linked, Reuse.PREFIX, resident, costs)
        by_tier: dict[str, int] = {}
        for span in plan.loads:
            for ref in span.refs:
                by_tier[ref.tier] = by_tier.get(ref.tier, 0) + min(ref.end, span.end) - ref.start
        for moved in plan.relocates:
            by_tier[moved.ref.tier] = by_tier.get(moved.ref.tier, 0) + moved.end - moved.start
        return Explanation(
            length, plan.cached_tokens, by_tier, plan.exactness.label, compiled.segments,
            () if linked.grid.inside else tuple(block.end for block in linked.blocks), widest.cached_tokens, miss,
            tuple(ChunkHit(moved.start, moved.end, moved.ref.tier) for moved in plan.relocates),
        )  # fmt: skip

    @cached_property
    def sessions(self) -> Sessions:
        """Conversations by name, with branches; with a store they outlive the process."""
        from keepwarm.sessions import Sessions

        return Sessions(self)

    @cached_property
    def tool_sets(self) -> ToolSets:
        """The registered sets of tools, system prompts and documents; with a store they outlive the process."""
        from keepwarm.toolsets import ToolSets

        return ToolSets(self)

    def tools(
        self,
        schemas: Sequence[Any] | Mapping[str, Any] = (),
        *,
        system: str | None = None,
        documents: Sequence[Any] = (),
        name: str | None = None,
        based_on: str | None = None,
        warm: bool = True,
        salt: str | None = None,
    ) -> ToolSet:
        """Register tools (OpenAI's, Anthropic's or MCP's shape) with a system prompt and documents, and warm them.

        A set that continues one of the same `name`, or `based_on` another, keeps its order with new and changed tools
        last: only what follows the unchanged head is computed. With `warm` off not even that: requests compute it, or,
        with `reuse="chunks"`, take it from the version before, moved and repaired (see `ToolSet.look`). A set under
        a `salt` is found with it alone, and goes when that is purged. Raises PromptError naming the tool and the path
        in its schema, and ConfigError.
        """
        return self.tool_sets.register(
            schemas, system=system, documents=documents, name=name, based_on=based_on, warm=warm, salt=salt
        )

    def purge(self, *salts: str) -> Purged:
        """Remove the KV, the sessions and the tool sets stored under some salts, from every tier. Nothing of them is
        left in the store's folder, and nothing of what is under way now is stored later, by whatever process.

        Raises StoreError when the store refuses. Calling again, or opening the store, then finishes the work; nothing
        is stored under these salts until that is done.
        """
        return self.archive.purge(*(salt_key(salt) for salt in salts))

    def purge_all(self) -> Purged:
        """The same for all KV, sessions and tool sets, under salts and under none."""
        return self.archive.purge_all()

    def remove(self, run_id: str) -> int:
        """Remove a stored run and every run that continues it, from every tier; returns how many there were.

        Raises StoreError when the store refuses.
        """
        removed = self.archive.remove(run_id)
        self._forget()
        return removed

    def _purged(self, tags: frozenset[bytes]) -> None:
        """A purge of salts has begun, here or in another process."""
        if "sessions" in self.__dict__:
            self.sessions.forget(tags)
        if "tool_sets" in self.__dict__:
            self.tool_sets.registry.purged(tags)
        self._forget()

    def _forget(self) -> None:
        """Forget what a purge must not leave in this process: KV in arenas, texts of earlier prompts."""
        self.pool.forget()
        self.adapter.forget()
        self.chunks.forget()
        self.constraints.forget()
        self.placing.naming.forget()
        for forget in list(self.on_purge):
            forget()

    def stats(self) -> EngineStats:
        """Counters of this engine and sizes of its tiers."""
        counts = self.counts.named()
        stored = self.archive.stats()
        for what, number in self.pool.stats().items():
            stored[what] = {"device": number, **stored[what]}
        return EngineStats(
            requests=counts["requests"],
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
            cached_by_tier=self.counts.by_tier,
            constraint_tables_ms=self.constraints.tables_ms,
            **stored | {"extra": stored["extra"] | {"chunks": self.chunks.stats()}},
        )

    def close(self) -> None:
        """Settle sessions, write what is still queued and release the store. Safe to call twice.

        An engine that nobody closes is closed when the program ends, within `exit_timeout` seconds; one that is
        collected before writes what is queued, in the background.
        """
        self._close(math.inf)

    def _close(self, seconds: float) -> bool:
        """The same within about so many seconds; False when something was not done by then."""
        until = time.monotonic() + seconds
        settled = True
        if "sessions" in self.__dict__ and not self._closed:
            settled = self.sessions.close(until)
        self._closed = True
        self._unclosed.detach()
        self.chunks.close(remaining(until))
        written = self.archive.close(remaining(until))
        self.pool.close()
        return settled and written

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _weakly(method: Callable[_Given, _Result], otherwise: Callable[[], _Result]) -> Callable[_Given, _Result]:
    """A method of an object that is called as long as the object is there, without holding it."""
    held = weakref.WeakMethod(method)

    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        there = held()
        return otherwise() if there is None else there(*given, **named)

    return call


def _reported(counts: Counts, archive: Archive) -> dict[str, int]:
    """What `keepwarm stats --fleet` adds up over replicas."""
    stored = archive.stats()
    return counts.named() | {name: stored[name] for name in ("corrupt", "dropped_writes", "store_errors")}
