"""The service behind every protocol: the engine's life, the path of a request, and who may see what.

The engine lives in a thread of this process (decision 34): the event loop hands it requests through a small pool of
threads, which render and tokenize, and gets tokens back by callbacks. Nothing here computes in the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from keepwarm.config import EngineConfig
from keepwarm.core.deadline import go_on
from keepwarm.core.snapshots import snapshot_id
from keepwarm.errors import ConfigError, Overloaded
from keepwarm.serving.answers import Answer, Answers
from keepwarm.serving.catalogue import Catalogue
from keepwarm.serving.held import Held
from keepwarm.serving.observability.metrics import Metrics
from keepwarm.serving.observability.recent import Recent
from keepwarm.serving.observability.shadow import Shadow
from keepwarm.serving.observability.tracing import tracing
from keepwarm.serving.protocols.errors import ApiError, Protocol, told
from keepwarm.serving.protocols.history import History
from keepwarm.serving.protocols.retention import Keep, placed, retain
from keepwarm.serving.settings import ServeConfig, model_id
from keepwarm.serving.tenancy.tenants import Caller, Tenants
from keepwarm.serving.workers import Workers

if TYPE_CHECKING:
    from keepwarm.batching import Batcher
    from keepwarm.engine import Engine

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Gone = Callable[[], Awaitable[None]] | None  # returns when the client has left
_THREADS = 5  # for rendering and tokenizing, and as many for registering, explaining and reading the store
_QUICK = 2  # of them, for tenants whose requests are quick
_NICE = 10  # niceness, for the sake of answers under way, whose kernels need the same cores
_EACH = 2  # most of them for one tenant: more would only take turns at the interpreter's lock


@dataclass(frozen=True)
class Asked:
    """One requested answer: the arguments of `Engine.generate`, without a salt."""

    prompt: str | Sequence[int] | None
    arguments: Mapping[str, Any]
    cache_salt: str | None = None
    session: str | None = None  # name of the conversation that this is a turn of
    fit: bool = False  # the answer's length was not asked for, so nobody is told when it is cut
    keep: tuple[Keep, ...] = ()
    left_out: tuple[str, ...] = ()  # names of parts of the request that have no effect


@dataclass
class Health:
    """The state of the service."""

    status: str = "loading"  # then "ready", "failed" or "stopping"
    progress: str = "starting"
    since: float = field(default_factory=time.monotonic)

    def to_dict(self) -> dict[str, Any]:
        return {"status": self.status, "progress": self.progress, "seconds": round(time.monotonic() - self.since, 3)}


class Service:
    """One engine with its batch, its tenants and its counters."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError for an unusable keys file; loads nothing heavy yet."""
        self.config = config
        self.health = Health()
        store = config.engine_settings["store"]
        self.store = None if store is None else Path(store).expanduser()
        self.tenants = Tenants(config.tenants.keys_file, config.limits, self.store)
        self.held = Held(config.limits)
        self.catalogue = Catalogue()
        self.model_id = model_id(config.model)
        self.started = time.time()
        self.failure: BaseException | None = None
        self._engine: Engine | None = None
        self._batcher: Batcher | None = None
        queue = config.batch.max_queue
        shared: Any = {
            "threads": _THREADS,
            "each": _EACH,
            "waiting": queue,
            "quick": _QUICK,
            "beside": self.tenants.others_run,
        }
        self._preparing = Workers("keepwarm-prepare", **shared, nice=_NICE)
        self._managing = Workers("keepwarm-manage", **shared)  # it computes under the model's lock: not nice
        self._live: set[Answers] = set()
        self.metrics = Metrics(self)
        self.shadow = Shadow(
            EngineConfig.build(**config.engine).shadow,
            lambda *prompt, **more: self.batcher.submit(*prompt, fit=True, **more),
            self.metrics.compared,
        )
        self.tracing = tracing(config.tracing)
        self.history = History()
        self.recent = Recent()

    # ---- life ----

    async def start(self) -> None:
        """Load model, store and catalogue; returns when ready. Raises what stopped it, after setting `health`."""
        try:
            await asyncio.to_thread(self._load)
        except Exception as error:
            self.health = Health("failed", str(error))
            self.failure = error
            raise
        if self.health.status == "loading":
            self.health = Health("ready", "")
        log.info("ready", extra={"model": self.model_id, "seconds": round(time.time() - self.started, 2)})

    def _load(self) -> None:
        self._say("loading torch")  # takes seconds by itself
        from keepwarm.batching import Batcher
        from keepwarm.engine import Engine

        self.catalogue = Catalogue.read(self.config.catalogue, EngineConfig.build(**self.config.engine).tool_order)
        self._say("loading the model")
        engine = Engine.from_pretrained(
            self.config.model, adapters=self.config.adapters, progress=self._say, **self.config.engine_settings
        )
        try:
            with suppress(ConfigError):  # where nothing can be constrained, requests for it are refused
                engine.pipeline.constraints.prepare()
            self._say("warming the catalogue")
            self.catalogue.warm(engine)
            self._say("loading registered sets")
            leaves = [
                engine.pipeline.archive.contents.names().get(name) for name in engine.tool_sets.registry.all_names()
            ]
            wanted = [name for leaf in leaves if leaf is not None for name in (leaf, snapshot_id(leaf))]
            stored = engine.pipeline.archive.find(wanted)
            engine.pipeline.archive.promote(ref.run_id for ref in stored.values())
            batch = self.config.batch
            self._batcher = Batcher(
                engine,
                max_batch=batch.max_batch,
                max_queue=batch.max_queue,
                max_prefill_tokens=batch.max_prefill_tokens,
            )
        except BaseException:
            engine.close()
            raise
        engine.pipeline.on_purge.append(lambda _: self.shadow.forget())
        gc.collect()
        gc.freeze()  # else every full collection walks over torch and the model: 0.2 s holding the interpreter's lock
        self._engine = engine

    def _say(self, text: str) -> None:
        self.health.progress = text
        log.info(text)

    def stopping(self) -> None:
        """Take no more requests; cancel what still runs after the configured grace. Call this in the event loop."""
        self.health = Health("stopping", "")
        asyncio.get_running_loop().call_later(self.config.limits.shutdown_grace, self._cancel_all)

    def _cancel_all(self) -> None:
        for workers in (self._preparing, self._managing):
            workers.wait_no_longer()
        for answers in list(self._live):
            answers.close()

    async def stop(self) -> None:
        """Cancel what still runs, write what is queued, and close."""
        self.health = Health("stopping", "")
        self._cancel_all()
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        timeout = self.config.limits.shutdown_timeout / 8
        self._preparing.close(timeout)
        self._managing.close(timeout)
        self.shadow.close()
        if self._batcher is not None:
            self._batcher.close(cancel=True)
        self.tenants.save(now=True)
        self.tracing.close()
        if self._engine is not None:
            self._engine.close()

    @property
    def ready(self) -> bool:
        return self.health.status == "ready"

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError while there is none."""
        if self._engine is None or not self.ready:
            raise ApiError("overloaded", f"the service is {self.health.status}: {self.health.progress}", retry_after=2)
        return self._engine

    @property
    def running(self) -> Engine:
        """The engine for requests under way, also while the service stops and new ones are refused."""
        assert self._engine is not None, "requests come when there is one"
        return self._engine

    @property
    def batcher(self) -> Batcher:
        self.engine  # noqa: B018 (raises while there is none)
        assert self._batcher is not None
        return self._batcher

    @property
    def parts(self) -> tuple[Engine, Batcher] | None:
        """Engine and batch for callers that only look, also while stopping; None while there are none."""
        if self._engine is None or self._batcher is None:
            return None
        return self._engine, self._batcher

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use: the model's, then those of its adapters."""
        return (self.model_id, *self.config.server.model_names, *self.config.adapters)

    def adapted(self, name: str) -> dict[str, str]:
        """Return the arguments of `Engine.generate` for a model's name: the adapter, if it is that of one."""
        return {"adapter": name} if name in self.config.adapters else {}

    def check_model(self, name: str) -> None:
        """Raise ApiError for a model that is not served here."""
        if name not in self.model_names:
            raise ApiError(
                "not_found",
                f"the model {name!r} is not served here; served are {', '.join(self.model_names)}",
                code="model_not_found",
                param="model",
            )

    # ---- the path of a request ----

    async def ask(self, caller: Caller, wanted: Sequence[Asked], protocol: Protocol, gone: Gone) -> Answers:
        """Queue the answers to one request; the caller must close them. Raises ApiError and KeepwarmError."""
        self.batcher  # noqa: B018 (raises while loading)
        self.tenants.enter(caller)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.limits.request_timeout
        ended = functools.partial(self._ended, caller, protocol)
        answers = Answers(len(wanted), ended, deadline)
        self._live.add(answers)
        self.shadow.pause()
        try:
            await self.prepared(caller, functools.partial(self._submit, caller, wanted, answers), gone)
        except BaseException as error:
            answers.close()
            self.metrics.refused(protocol, told(error) if isinstance(error, Exception) else None)
            raise
        finally:
            answers.all_submitted()
            self._leave(caller, answers)
        return answers

    def _submit(self, caller: Caller, wanted: Sequence[Asked], answers: Answers) -> None:
        """Submit the answers, in a worker's thread: rendering and tokenizing a long prompt takes a while."""
        for asked, answer in zip(wanted, answers.each, strict=True):
            go_on()
            if answers.closed:
                return
            arguments = self.arguments(caller, asked)
            if (traced := self.shadow.traced(arguments)) is not None:
                arguments = traced
                answer.ask_again = functools.partial(self.shadow.put, asked.prompt, arguments)
            answer.wanted, answer.left_out = None if asked.fit else arguments["max_new_tokens"], asked.left_out
            if (most := self.tenants.limit(caller, "max_new_tokens")) is not None:
                arguments["max_new_tokens"] = min(arguments["max_new_tokens"], most)
            answer.keep = placed(asked.keep, arguments.get("messages") or (), session="session" in arguments)
            listener, owner = answers.listener(answer), "" if caller.salt is None else caller.tenant
            ticket = self.batcher.submit(
                asked.prompt, owner=owner, listener=listener, epoch=caller.epoch, fit=True, **arguments
            )
            answers.submitted(answer, ticket)

    def arguments(self, caller: Caller, asked: Asked) -> dict[str, Any]:
        """Return the arguments of `Engine.generate`, with the caller's salt. A header of the public catalogue stays
        public."""
        arguments = dict(asked.arguments)
        if asked.session is not None:
            arguments["session"] = asked.session
        salt = self.tenants.salt(caller, asked.cache_salt)
        if salt is not None:
            arguments["salt"] = salt
            if (entry := self.catalogue.find(arguments)) is not None:
                arguments |= entry.prompt(()) | {"messages": arguments["messages"], "public_header": True}
        return arguments

    def _ended(
        self, caller: Caller, protocol: Protocol, answers: Answers, answer: Answer, error: BaseException | None
    ) -> None:
        self.metrics.answered(protocol, answer, error)
        self.charge(caller, answer)
        if answer.result is not None:
            self.recent.put(caller, protocol, answer.result)
            if answer.ask_again is not None:
                answer.ask_again(answer.result)
            if answer.keep and answer.ticket is not None and self.ready:
                with suppress(Overloaded):  # too many wait: what is stored is evicted as usual
                    public = caller.salt is None
                    work = functools.partial(retain, self.engine, answer.ticket, answer.keep, public=public)
                    self._managing.submit(caller.tenant, work, self.config.limits.request_timeout)
        self._leave(caller, answers)

    def charge(self, caller: Caller, answer: Answer) -> None:
        """Charge what an answer took, even if it was cancelled or failed midway; nothing if it never began."""
        if (result := answer.result) is not None:
            self.tenants.charge(caller, result.prompt_tokens, result.cached_tokens, len(result.token_ids))
        elif answer.ticket is not None and (plan := answer.ticket.plan) is not None:
            self.tenants.charge(caller, plan.length, plan.cached_tokens, len(answer.times))

    def _leave(self, caller: Caller, answers: Answers) -> None:
        """Note the end of a request, once its last answer has ended in any way."""
        if answers.over and answers in self._live:
            self._live.discard(answers)
            self.tenants.leave(caller)
            if not self._live:
                self.shadow.resume()

    async def epoch(self, caller: Caller) -> int:
        """Return the store's epoch as a request comes: nothing of it is stored if its salt is purged from now on. After
        a purge, the first caller has to forget what was removed, which may take a while. Raises as `prepared`."""
        if not self.ready:
            return 0
        archive = self.engine.pipeline.archive
        known = archive.epoch_known()
        return await self.prepared(caller, archive.epoch) if known is None else known

    async def prepared(self, caller: Caller, work: Callable[[], _Result], gone: Gone = None) -> _Result:
        """Run `work`, whose time is in proportion to a request, outside the event loop. Raises what it raises,
        Overloaded, TookTooLong, and ApiError when the client is `gone`."""
        return await self._preparing.run(caller.tenant, work, self.config.limits.prepare_timeout, gone)

    async def managed(self, caller: Caller, work: Callable[[], _Result], gone: Gone = None) -> _Result:
        """Run `work` that may wait for the disk or compute. Raises as `prepared`."""
        self.engine  # noqa: B018 (raises while loading)
        return await self._managing.run(caller.tenant, work, self.config.limits.request_timeout, gone)

    @property
    def live(self) -> int:
        """Requests that are under way."""
        return len(self._live)

    def describe(self) -> dict[str, Any]:
        """Return what every client may know."""
        return {
            "version": version("keepwarm"),
            "model": self.model_id,
            "model_names": list(self.model_names),
            "health": self.health.to_dict(),
        }
