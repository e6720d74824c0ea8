"""The service behind every protocol: one model's engine, the path of a request, and who may see what.

The engine lives in a thread of this process (decision 34): the event loop hands it requests through a small pool of
threads, which render and tokenize, and gets tokens back by callbacks. Nothing here computes in the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar
from typing import Protocol as Interface

from keepwarm.config import EngineConfig
from keepwarm.core.deadline import go_on
from keepwarm.errors import Overloaded
from keepwarm.serving.answers import Answer, Answers
from keepwarm.serving.catalogue import Catalogue
from keepwarm.serving.loaded import Loaded, return_freed_memory
from keepwarm.serving.observability.metrics import Metrics
from keepwarm.serving.observability.shadow import Shadow
from keepwarm.serving.protocols.errors import ApiError, Protocol, told
from keepwarm.serving.protocols.retention import Keep, placed, retain
from keepwarm.serving.rewrite import Applied, Rewriting
from keepwarm.serving.settings import Served
from keepwarm.serving.shared import Health, Shared
from keepwarm.serving.tenancy.tenants import Caller
from keepwarm.serving.uses import Hold, Uses

if TYPE_CHECKING:
    from keepwarm.batching import Batcher
    from keepwarm.engine import Engine

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Gone = Callable[[], Awaitable[None]] | None  # returns when the client has left


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
    registered: bool = False  # the header is a registered set's, which is shown as it was registered


class Siblings(Interface):
    """What a model's service needs to know of all models (`serving.models`)."""

    @property
    def services(self) -> Sequence[Service]:
        """Of all models, loaded or not."""
        ...

    def described(self) -> list[dict[str, Any]]:
        """What clients may know of each model."""
        ...


class Service:
    """One model of the service with its batch and its counters, as requests for it see it."""

    def __init__(self, shared: Shared, served: Served, siblings: Siblings) -> None:
        """Loads nothing yet."""
        self.shared, self.served, self._siblings = shared, served, siblings
        self.config, self.store, self.started = shared.config, shared.store, shared.started
        self.tenants, self.held, self.tracing = shared.tenants, shared.held, shared.tracing
        self.history, self.recent = shared.history, shared.recent
        self.model_id, self.model_names = served.name, served.names
        self.catalogue = Catalogue()
        self.rewriting = Rewriting(self.config.rewrite)
        self.uses = Uses()
        self.decoder: tuple[list[str], Callable[[Sequence[int]], str]] | None = None  # with `_digests`, once known
        self.sampling: Mapping[str, float] = {"temperature": 1.0}  # for what a request does not say
        self._loaded: Loaded | None = None
        self._preparing, self._managing = shared.preparing, shared.managing
        self.metrics = Metrics(self)
        self.shadow = Shadow(
            EngineConfig.build(**served.engine_settings).shadow,
            lambda *prompt, **more: self.batcher.submit(*prompt, fit=True, **more),
            self.metrics.compared,
        )
        shared.shadows.append(self.shadow)

    # ---- life ----

    def load(self) -> None:
        """Load the model and warm the catalogue, in a thread. Raises what stopped it."""
        order = EngineConfig.build(**self.served.engine_settings).tool_order
        self.catalogue = Catalogue.read(self.config.catalogue, order)
        loaded = Loaded.load(self.served, self.catalogue, self.config.batch, self._say)
        loaded.engine.pipeline.on_purge.append(lambda _: self.shadow.forget())
        return_freed_memory()
        pipeline = loaded.engine.pipeline
        self.decoder = _digests(loaded.engine), pipeline.tokenizer.decode
        follows = self.config.server.sampling_defaults == "model"
        recommended = pipeline.model.recommended_sampling if follows else {}
        if recommended:
            log.info("requests are sampled as the model recommends", extra={"model": self.model_id, **recommended})
        self.sampling = {"temperature": 1.0} | recommended
        self._loaded = loaded
        self.uses.open()

    def _say(self, text: str) -> None:
        if self.health.status == "loading":
            self.health.progress = text
        log.info(text)

    def unload(self) -> None:
        """Give the model up, in a thread, once nothing uses it any more. What its KV needs is written first."""
        loaded, self._loaded = self._loaded, None
        self.shadow.forget()
        if loaded is not None:
            loaded.close()
        del loaded
        self.shadow.forget()  # what was broken off came back
        return_freed_memory()

    def close(self) -> None:
        """Cancel what still runs, write what is queued, and close."""
        self.shadow.close()
        if self._loaded is not None:
            self._loaded.batcher.close(cancel=True)

    @property
    def health(self) -> Health:
        return self.shared.health

    @property
    def ready(self) -> bool:
        return self.health.status == "ready"

    def check_ready(self) -> None:
        """Raise ApiError while the service takes no requests."""
        if not self.ready:
            raise ApiError("overloaded", f"the service is {self.health.status}: {self.health.progress}", retry_after=2)

    @property
    def loaded(self) -> Loaded | None:
        """The model in memory; None while it is not there."""
        return self._loaded

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError while there is none."""
        self.check_ready()
        if self._loaded is None:
            raise ApiError("overloaded", f"the model {self.model_id!r} is not loaded", retry_after=2)
        return self._loaded.engine

    @property
    def running(self) -> Engine:
        """The engine for requests under way, also while the service stops and new ones are refused."""
        assert self._loaded is not None, "requests come when there is one"
        return self._loaded.engine

    @property
    def batcher(self) -> Batcher:
        self.engine  # noqa: B018 (raises while there is none)
        assert self._loaded is not None
        return self._loaded.batcher

    def each_engine(self) -> Iterator[Engine]:
        """The engines of all loaded models, this one's first: each has a RAM of its own over the one store."""
        yield self.engine
        for other in self._siblings.services:
            with other.parts() as parts:
                if other is not self and parts is not None:
                    yield parts[0]

    def remove_run(self, run_id: str) -> int:
        """Remove a run and what continues it, in the RAM of all loaded models and on disk; return how many."""
        return max(engine.remove(run_id) for engine in self.each_engine())

    def adapted(self, name: str | None) -> dict[str, str]:
        """Return the arguments of `Engine.generate` for a model's name: the adapter, if it is that of one."""
        return {"adapter": name} if name is not None and name in self.served.adapters else {}

    def text_of(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of stored tokens. Of several models it must be known which one's they are; else it is empty.

        `model` is the beginning of a model's digest, as entries of the store tell it.
        """
        if not self.several:
            return self.engine.pipeline.tokenizer.decode(ids)
        known = (each.decoder for each in self._siblings.services if each.decoder is not None)
        decode = next((decode for digests, decode in known if any(each.startswith(model) for each in digests)), None)
        return "" if decode is None else decode(ids)

    @contextmanager
    def parts(self) -> Iterator[tuple[Engine, Batcher] | None]:
        """Engine and batch for those who only look, also while stopping; None while there are none."""
        with self.uses.one() as is_there:
            loaded = self._loaded if is_there else None
            yield None if loaded is None else (loaded.engine, loaded.batcher)

    # ---- the path of a request ----

    async def ask(self, caller: Caller, wanted: Sequence[Asked], protocol: Protocol, gone: Gone) -> Answers:
        """Queue the answers to one request; the caller must close them. Raises ApiError and KeepwarmError."""
        self.batcher  # noqa: B018 (raises while loading)
        self.tenants.enter(caller)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.limits.request_timeout
        ended = functools.partial(self._ended, caller, protocol)
        answers = Answers(len(wanted), ended, deadline)
        self._begun(answers)
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
            asked, answer.rewritten = self.rewritten(asked)
            self.metrics.rewritten(answer.rewritten)
            answer.shown = asked.arguments if any(one.count for one in answer.rewritten) else None
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

    def rewritten(self, asked: Asked) -> tuple[Asked, tuple[Applied, ...]]:
        """Return what is asked with the operator's rules applied, and what they did."""
        if not self.rewriting or asked.registered:
            return asked, ()
        arguments, applied = self.rewriting.apply(asked.arguments)
        return replace(asked, arguments=arguments), applied

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
            self.recent.put(caller, protocol, answer.result, self.model_id if self.several else None)
            if answer.ask_again is not None:
                answer.ask_again(answer.result)
            if answer.keep and answer.ticket is not None and self.ready:
                with suppress(Overloaded):  # too many wait: what is stored is evicted as usual
                    public = caller.salt is None
                    work = functools.partial(retain, self.engine, answer.ticket, answer.keep, public=public)
                    kept = self._managing.submit(caller.tenant, work, self.config.limits.request_timeout)
                    hold = Hold(self.uses)
                    kept.future.add_done_callback(lambda _: hold.close())
        self._leave(caller, answers)

    def charge(self, caller: Caller, answer: Answer) -> None:
        """Charge what an answer took, even if it was cancelled or failed midway; nothing if it never began."""
        if (result := answer.result) is not None:
            self.tenants.charge(caller, result.prompt_tokens, result.cached_tokens, len(result.token_ids))
        elif answer.ticket is not None and (plan := answer.ticket.plan) is not None:
            self.tenants.charge(caller, plan.length, plan.cached_tokens, len(answer.times))

    def _begun(self, answers: Answers) -> None:
        answers.hold = Hold(self.uses)
        self.shared.entered(answers)

    def _leave(self, caller: Caller, answers: Answers) -> None:
        """Note the end of a request, once its last answer has ended in any way."""
        if answers.over and answers in self.shared.live:
            self.shared.left(answers)
            self.tenants.leave(caller)
            if answers.hold is not None:
                answers.hold.close()

    async def epoch(self, caller: Caller) -> int:
        """Return the store's epoch as a request comes: nothing of it is stored if its salt is purged from now on. While
        no model tells it, it is the last one that was told. After a purge, the first caller has to forget what was
        removed, which may take a while. Raises as `prepared`."""
        with self.parts() as parts:
            if self.ready and parts is not None:
                archive = parts[0].pipeline.archive
                known = archive.epoch_known()
                self.shared.epoch = await self.prepared(caller, archive.epoch) if known is None else known
        return self.shared.epoch

    async def prepared(self, caller: Caller, work: Callable[[], _Result], gone: Gone = None) -> _Result:
        """Run `work`, whose time is in proportion to a request, outside the event loop. Raises what it raises,
        Overloaded, TookTooLong, and ApiError when the client is `gone`."""
        timeout = self.config.limits.prepare_timeout
        return await self._preparing.run(caller.tenant, self._using(work), timeout, gone)

    async def managed(self, caller: Caller, work: Callable[[], _Result], gone: Gone = None) -> _Result:
        """Run `work` that may wait for the disk or compute. Raises as `prepared`."""
        self.engine  # noqa: B018 (raises while loading)
        timeout = self.config.limits.request_timeout
        return await self._managing.run(caller.tenant, self._using(work), timeout, gone)

    def _using(self, work: Callable[[], _Result]) -> Callable[[], _Result]:
        """Return the work with a use of the model around it: a thread may still be at it when its client has left."""

        def using() -> _Result:
            with self.uses.one():
                return work()

        return using

    @property
    def several(self) -> bool:
        """Whether other models are served beside this one."""
        return len(self._siblings.services) > 1

    @property
    def live(self) -> int:
        """Requests that are under way, for all models."""
        return len(self.shared.live)

    def describe(self) -> dict[str, Any]:
        """Return what every client may know."""
        several = {"models": self._siblings.described()} if self.several else {}
        return {
            "version": version("keepwarm"),
            "model": self.model_id,
            "model_names": list(self.model_names),
            "health": self.health.to_dict(),
            **several,
        }


def _digests(engine: Engine) -> list[str]:
    """Return the digests by which a model's entries in the store are known: without an adapter, and with each."""
    model = engine.pipeline.model
    loras = [None, *map(model.adapters.get, model.adapters.names)]
    return [model.namespace(lora=lora).model.digest.hex() for lora in loras]
