"""The models of a service: which are in memory, who waits for one, and which is given up for another.

One model is loaded at a time, in the order in which models were asked for. What a model needs is taken from the one
that was used least lately. A model with requests under way is waited for, and what asks for it meanwhile waits behind
the model that is to come: so two models under a cap that holds one take turns, and neither starves. Nobody waits for a
model while holding another, so no two requests wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepwarm.checks import check, check_model
from keepwarm.config import EngineConfig
from keepwarm.core.shares import may_hold
from keepwarm.errors import ConfigError, Overloaded
from keepwarm.models.lora_folders import settings_of
from keepwarm.serving.catalogue import Catalogue
from keepwarm.serving.loaded import bytes_on_disk, machine_memory
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.service import Gone, Service
from keepwarm.serving.settings import ServeConfig
from keepwarm.serving.shared import Health, Shared
from keepwarm.serving.uses import Hold
from keepwarm.serving.warming import warm_last

log = logging.getLogger(__name__)

_SHARE = 0.75  # of a machine's memory, for weights where no cap is set
_LOOK_AGAIN = 0.05  # seconds between two looks at a model whose requests are waited for
_SAVE_EVERY = 30.0  # seconds


def check_served(config: ServeConfig) -> None:
    """Refuse what can be seen to be wrong without loading. Raises ConfigError, ModelNotFound, StoreError."""
    cap = config.server.model_memory
    for served in config.served:
        settings = EngineConfig.build(**served.engine_settings)
        check(settings)
        check_model(served.source)
        for folder in served.adapters.values():
            settings_of(folder)
        Catalogue.read(config.catalogue, settings.tool_order)
        if cap is not None and config.models and (need := bytes_on_disk(served.source)) > cap:
            raise ConfigError(
                f"server.model_memory: the weights of {served.name!r} take {need} bytes as files, and all models may "
                f"take {cap}"
            )


class _Unwanted(Exception):
    """Nobody waits for the model any more."""


@dataclass(eq=False)
class _Place:
    """One model, and what is done with it. Only the event loop changes it."""

    service: Service
    nbytes: int  # of its weights; those of its files until it was loaded once
    device: str = "cpu"
    last_used: float = 0.0  # `time.monotonic`
    leaving: bool = False  # it makes room for another one
    loading: asyncio.Task[None] | None = None
    waiting: dict[asyncio.Future[Hold], str] = field(default_factory=dict)  # with whose it is

    @property
    def is_loaded(self) -> bool:
        return self.service.loaded is not None

    @property
    def state(self) -> str:
        return "loaded" if self.is_loaded else "loading" if self.loading else "unloaded"

    @property
    def stays(self) -> bool:
        """Whether it is loaded, and makes room for no other."""
        return self.is_loaded and not self.leaving

    @property
    def is_wanted(self) -> bool:
        return not self.service.shared.ending.is_set() and any(not each.done() for each in self.waiting)


class Models:
    """All models of a service. Use it in the event loop."""

    def __init__(self, config: ServeConfig) -> None:
        """Loads nothing yet. Raises ConfigError for an unusable keys file."""
        self.shared = Shared(config)
        self._places = [_Place(Service(self.shared, one, self), bytes_on_disk(one.source)) for one in config.served]
        self._by_name = {name: place for place in self._places for name in place.service.model_names}
        self._turn = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()  # models that were loaded, given up, or failed to load

    @property
    def services(self) -> list[Service]:
        return [place.service for place in self._places]

    @property
    def first(self) -> Service:
        """The one that is loaded at start."""
        return self._places[0].service

    @property
    def names(self) -> list[str]:
        """All names that requests may use."""
        return list(self._by_name)

    @property
    def at_hand(self) -> Service:
        """A model to look into the store with: a loaded one that stays, or else one that comes anyway. Among several
        the first has precedence."""

        def at_hand(place: _Place) -> tuple[bool, bool, bool, float]:
            return place.stays, place.loading is not None, place is self._places[0], place.last_used

        return max(self._places, key=at_hand).service

    # ---- life ----

    async def start(self) -> None:
        """Load the first model; returns when ready. Raises what stopped it, after setting the service's health."""
        shared, first = self.shared, self._places[0]
        first.loading = asyncio.current_task()
        try:
            await self._read(first)
        except Exception as error:
            shared.health = Health("failed", str(error))
            shared.failure = error
            raise
        finally:
            first.loading = None
        if shared.health.status == "loading":
            shared.health = Health("ready", "")
        seconds = round(time.time() - shared.started, 2)
        log.info("ready", extra={"model": first.service.model_id, "seconds": seconds})
        self._warm(first)

    async def stop(self) -> None:
        """Cancel what still runs, write what is queued, and close."""
        self.shared.health = Health("stopping", "")
        self.shared.cancel_all()
        for task in self._background:
            task.cancel()
        tasks = [place.loading for place in self._places if place.loading is not None]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._close)  # first: nothing can break off the load of a model
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)
        await loop.run_in_executor(None, self._close_models)  # one may have come meanwhile

    def _close(self) -> None:
        self.shared.close_threads()
        for service in self.services:
            service.close()
        self.shared.tenants.save(now=True)
        self.shared.tracing.close()
        self._close_models()

    def _close_models(self) -> None:
        for service in self.services:
            service.close()
            with service.parts() as parts:  # None: another thread gives it up just now
                if parts is not None:
                    parts[0].close()

    async def keep_usage(self) -> None:
        """Write the tenants' usage now and then, until cancelled."""
        while True:
            await asyncio.sleep(_SAVE_EVERY)
            await asyncio.to_thread(self.shared.tenants.save)

    # ---- who asks for a model ----

    def find(self, name: str) -> Service:
        """Return the service for a model, loaded or not. Raises ApiError for one that is not served here."""
        if name not in self._by_name:
            raise ApiError(
                "not_found",
                f"the model {name!r} is not served here; served are {', '.join(self.names)}",
                code="model_not_found",
                param="model",
            )
        return self._by_name[name].service

    async def hold(self, service: Service, owner: str = "", gone: Gone = None, *, looks: bool = False) -> Hold:
        """Return a hold on a model for an owner's request, once it is loaded: it stays so until the hold is closed. A
        request that only `looks` is no reason to keep the model rather than another.

        Raises ApiError when it cannot be loaded, takes longer than `limits.load_timeout`, or the client is `gone`, and
        Overloaded when too many wait or the service stops.
        """
        place = self._by_name[service.model_id]
        if not looks:
            place.last_used = time.monotonic()
        if place.stays:
            return Hold(service.uses)
        service.check_ready()
        limits, free = self.shared.config.limits, self.shared.config.batch.max_queue - len(place.waiting)
        if free < 1 or not may_hold(owner, list(place.waiting.values()).count(owner), 1, free):
            raise Overloaded(f"{len(place.waiting)} requests wait for the model {service.model_id!r}: ask again later")
        waiting: asyncio.Future[Hold] = asyncio.get_running_loop().create_future()
        place.waiting[waiting] = owner
        if place.loading is None:
            place.loading = asyncio.create_task(self._bring(place))
        try:
            return await self._first(place, waiting, gone, limits.load_timeout)
        except BaseException:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().close()  # it came as its client left
            waiting.cancel()
            raise
        finally:
            del place.waiting[waiting]

    async def _first(self, place: _Place, waiting: asyncio.Future[Hold], gone: Gone, seconds: float) -> Hold:
        leaving: asyncio.Future[Any] | None = None if gone is None else asyncio.ensure_future(gone())
        ending: asyncio.Future[Any] = asyncio.ensure_future(self.shared.ending.wait())
        beside = [ending] if leaving is None else [ending, leaving]
        try:
            await asyncio.wait({waiting, *beside}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in beside:
                each.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        if waiting.done():
            return waiting.result()
        if self.shared.ending.is_set():
            raise Overloaded("the service is stopping")
        if leaving is not None and not leaving.cancelled():
            raise ApiError("timeout", "the client has gone")
        busy = [other.service.model_id for other in self._places if other.leaving]
        why = f"{', '.join(busy)} must be given up for it and has requests under way" if busy else "it is still loading"
        raise ApiError(
            "overloaded",
            f"the model {place.service.model_id!r} was not there within {seconds:g} s (limits.load_timeout): {why}; "
            "ask again later, or raise server.model_memory",
            retry_after=5,
        )

    # ---- loading and giving up ----

    async def _bring(self, place: _Place) -> None:
        """Load a model for those who wait for it, and give each a hold before anything else can take it away."""
        try:
            async with self._turn:
                if not place.is_loaded:
                    await asyncio.to_thread(check_model, place.service.served.source)  # before others must go for it
                    await self._make_room(place)
                    if not place.is_wanted:
                        raise _Unwanted
                    await self._read(place)
                    self._warm(place)
                for each in place.waiting:
                    if not each.done():
                        each.set_result(Hold(place.service.uses))
                await self._trim(place)
        except _Unwanted:
            log.info("a model is not loaded: nobody waits for it any more", extra={"model": place.service.model_id})
        except Exception as error:
            self.counts["failed"] += 1
            log.error("the model %s cannot be loaded: %s", place.service.model_id, error)
            self._refuse(place, error)
        finally:
            place.loading = None
            if place.is_wanted:  # it came after the last look
                place.loading = asyncio.create_task(self._bring(place))

    def _refuse(self, place: _Place, error: Exception) -> None:
        for each in place.waiting:
            if not each.done():
                told = f"the model {place.service.model_id!r} cannot be loaded: {error}"
                each.set_exception(ApiError("internal", told, code="model_not_loaded"))

    async def _read(self, place: _Place) -> None:
        started = time.monotonic()
        await asyncio.to_thread(place.service.load)
        loaded = place.service.loaded
        assert loaded is not None
        place.nbytes, place.device, place.last_used = loaded.nbytes, loaded.device, time.monotonic()
        self._share_ram()
        self.counts["loaded"] += 1
        if self.first.several:
            told = {"model": place.service.model_id, "bytes": place.nbytes}
            log.info("loaded a model", extra=told | {"seconds": round(time.monotonic() - started, 2)})

    def _warm(self, place: _Place) -> None:
        loaded = place.service.loaded
        task = asyncio.create_task(warm_last(place.service, lambda: place.stays and place.service.loaded is loaded))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _make_room(self, place: _Place) -> None:
        """Give up what must go for a model. Raises _Unwanted when nobody waits for the model any more."""
        if not await self._clear(self._going(place), lambda: place.is_wanted):
            raise _Unwanted

    async def _trim(self, place: _Place) -> None:
        """Give up what a model takes beyond the cap, for that is known only once it is loaded."""
        await self._clear(self._going(place), lambda: not self.shared.ending.is_set())

    async def _clear(self, going: Sequence[_Place], waits: Callable[[], bool]) -> bool:
        """Give up models once their requests have ended, for as long as one `waits`; whether all were given up."""
        for other in going:
            other.leaving = True
        try:
            for other in going:
                while waits() and not other.service.uses.close():
                    await asyncio.sleep(_LOOK_AGAIN)
                if not waits():
                    return False
                await self._give_up(other)
        finally:
            for other in going:
                other.leaving = False
        return True

    async def _give_up(self, place: _Place) -> None:
        """Give up a model whose uses are closed."""
        log.info("giving up a model", extra={"model": place.service.model_id, "bytes": place.nbytes})
        place.leaving = True
        try:
            await asyncio.to_thread(place.service.unload)
        finally:
            place.leaving = False
        self.counts["given_up"] += 1
        self._share_ram()

    def _going(self, place: _Place) -> list[_Place]:
        """Return the models that must go before another one fits: idle ones first, of them the least lately used."""
        cap = self._cap()
        there = [other for other in self._places if other.is_loaded and other is not place]
        taken = place.nbytes + sum(other.nbytes for other in there)
        going = []
        for other in sorted(there, key=lambda other: (other.service.uses.count > 0, other.last_used)):
            if taken > cap:
                going.append(other)
                taken -= other.nbytes
        return going

    def _cap(self) -> int:
        cap = self.shared.config.server.model_memory
        if cap is not None:
            return cap
        devices = {place.device for place in self._places if place.is_loaded}
        return int(_SHARE * min((machine_memory(device) for device in devices), default=machine_memory("cpu")))

    def _share_ram(self) -> None:
        """Divide the RAM for KV among the models that are loaded: `max_ram` is a bound of the process."""
        there = [place.service.loaded for place in self._places if place.service.loaded is not None]
        for loaded in there if self.first.several else ():
            loaded.engine.pipeline.archive.limit_ram(loaded.engine.pipeline.config.max_ram // len(there))

    # ---- what is shown ----

    def described(self) -> list[dict[str, Any]]:
        """Return what clients may know of each model."""
        return [
            {
                "name": place.service.model_id,
                "names": list(place.service.model_names),
                "state": place.state,
                "bytes": place.nbytes,
                "waiting": len(place.waiting),
            }
            for place in self._places
        ]

    def state(self, service: Service) -> str:
        """Return "loaded", "loading" or "unloaded"."""
        return self._by_name[service.model_id].state
