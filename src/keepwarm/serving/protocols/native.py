"""The native protocol: register tools, ask, compare cold with warm, look, and remove."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from keepwarm.core.results import Generation
from keepwarm.serving.answers import Answers
from keepwarm.serving.events import HEARTBEAT, EventStream, disconnected, event
from keepwarm.serving.generation import changed, errors_as, log_generation, new_tokens, sampling, single
from keepwarm.serving.observability.joined import exposition
from keepwarm.serving.observability.metrics import CONTENT_TYPE
from keepwarm.serving.protocols import misses
from keepwarm.serving.protocols.bodies import BodyRoute
from keepwarm.serving.protocols.errors import ApiError, Protocol, in_stream
from keepwarm.serving.schemas import native as shapes
from keepwarm.serving.schemas.common import NAME
from keepwarm.serving.service import Asked, Service
from keepwarm.serving.tenancy import sets
from keepwarm.serving.tenancy.access import (
    Administering,
    Calling,
    LookingService,
    ModelParam,
    ModelsOf,
    ServiceOf,
    SessionId,
    serving,
)
from keepwarm.serving.tenancy.tenants import Caller

router = APIRouter(tags=["Keepwarm"], route_class=BodyRoute, responses=errors_as(shapes.NativeError))

SetPath = Annotated[str, Path(pattern=NAME, max_length=100)]
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.get("/health", response_model=shapes.HealthShown)
async def health(service: ServiceOf) -> dict[str, Any]:
    """Tell whether the process lives, and how far it has started. The status is always 200; load balancers use
    `/health/ready`."""
    return service.health.to_dict()


@router.get("/health/ready", response_model=shapes.HealthShown)
async def ready(service: ServiceOf) -> Response:
    """Answer 200 once requests are answered, and 503 before."""
    return JSONResponse(service.health.to_dict(), 200 if service.ready else 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(models: ModelsOf, caller: Administering) -> Response:
    """Return counters for Prometheus. With API keys only an administrator may read them, because they concern all
    tenants."""
    each = {one.model_id: one.metrics for one in models.services}
    text = await asyncio.get_running_loop().run_in_executor(None, exposition, each, models.described(), models.counts)
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/status")
async def status(models: ModelsOf, caller: Calling, model: ModelParam = None) -> dict[str, Any]:
    """Return the service's state, and the tenant's sets and usage. Administrators also get engine, batch and store. Of
    several models it shows a loaded one, or the one that is named, as far as it is loaded: looking loads none."""
    service = models.at_hand if model is None else models.find(model)
    shown = service.describe() | {"usage": service.tenants.usage(caller), "sets": []}
    if caller.admin:
        shown["tasks"] = len(asyncio.all_tasks())
    with service.parts() as parts:
        if service.ready and parts is not None:
            shown |= await service.managed(caller, functools.partial(_looked_at, service, caller))
    return shown


def _looked_at(service: Service, caller: Caller) -> dict[str, Any]:
    engine, room = service.engine, service.batcher.room()
    window = engine.pipeline.model.context_window
    shown: dict[str, Any] = {
        "sets": sets.listed(engine, caller),
        "catalogue": sorted(service.catalogue.entries),
        "context_window": window,
        "max_request_tokens": room if window is None else min(window, room),  # prompt and answer together
        "limits": {name: getattr(service.config.limits, name) for name in ("max_new_tokens", "max_tools", "max_body")},
    }
    if service.rewriting:
        shown["rewrite"] = service.rewriting.described()
    if caller.admin:
        batch = service.batcher.stats()
        shown |= {
            "engine": engine.stats().to_dict()
            | {"reuse": str(engine.pipeline.config.reuse), "device": str(engine.pipeline.model.runner.device)},
            "batch": vars(batch) | {"pages": vars(batch.pages)},
            "requests": service.live,
            "store": {
                "folder": None if service.store is None else str(service.store),
                "max_ram": engine.pipeline.config.max_ram,
                "max_disk": engine.pipeline.config.max_disk,
            },
            "uptime_s": round(time.time() - service.started, 3),
        }
    return shown


@router.post("/tools", response_model=shapes.RegisterResponse)
async def register(body: shapes.RegisterRequest, request: Request, service: ServiceOf, caller: Calling) -> Response:
    """Register a set and compile its KV, or load it if it was compiled before. It is durable when this returns."""
    service = await serving(request, body.model)
    documents = [_document(document) for document in body.documents]

    def work() -> dict[str, Any]:
        salt = service.tenants.salt(caller, body.cache_salt)
        return sets.register(
            service.engine,
            caller,
            salt,
            body.tools,
            system=body.system,
            documents=documents,
            name=body.name,
            based_on=body.based_on,
            catalogue=service.catalogue,
        )

    with service.tenants.entered(caller):
        done = await service.managed(caller, work, functools.partial(disconnected, request.receive))
    service.tenants.charge(caller, done["prefix_tokens"], done["reused_tokens"], 0)
    return JSONResponse(done)


def _document(document: str | shapes.Document) -> Any:
    return document if isinstance(document, str) else document.model_dump(exclude_none=True)


@router.get("/tools", response_model=list[shapes.SetShown])
async def tool_sets(service: LookingService, caller: Calling) -> Any:
    """List the tenant's registered sets."""
    return await service.managed(caller, lambda: sets.listed(service.engine, caller))


@router.get("/tools/{name}")
async def tool_set(name: SetPath, service: LookingService, caller: Calling) -> dict[str, Any]:
    """Return one set with its schemas, in the order in which they are rendered."""

    def work() -> dict[str, Any]:
        found = sets.get(service.engine, caller, name)
        version = found.version
        return {
            "name": name,
            "version": version.number,
            "hash": version.hash,
            "key": found.key,
            "tools": list(version.tools),
            "system": version.system,
            "documents": list(version.documents),
            "created": version.created,
        }

    return await service.managed(caller, work)


@router.delete("/tools")
async def remove_all(
    service: LookingService, caller: Calling, name: Annotated[str | None, Query(pattern=NAME, max_length=100)] = None
) -> dict[str, Any]:
    """Forget the named set, or all of this tenant's, with their KV in RAM and on disk."""

    def work() -> dict[str, Any]:
        engine = service.engine
        if name is None:
            return {"removed": sets.remove_all(engine, caller, service.remove_run)}
        return {"removed": [sets.remove(engine, caller, name, service.remove_run)]}

    return await service.managed(caller, work)


@router.delete("/tools/{name}")
async def remove(name: SetPath, service: LookingService, caller: Calling) -> dict[str, Any]:
    """Forget one set, with its KV in RAM and on disk."""
    return {
        "removed": [
            await service.managed(caller, lambda: sets.remove(service.engine, caller, name, service.remove_run))
        ]
    }


@router.post("/query", response_model=shapes.Answered, responses=_STREAMED)
async def query(
    body: shapes.QueryRequest, request: Request, service: ServiceOf, caller: Calling, session: SessionId = None
) -> Response:
    """Ask a registered set, or no set. With `stream`, events named `token` carry the text, and `done` carries the whole
    answer."""
    service = await serving(request, body.model)
    gone = functools.partial(disconnected, request.receive)
    arguments = await service.prepared(caller, functools.partial(_arguments, service, caller, body), gone)
    asked = Asked(None, arguments, body.cache_salt, session, registered=body.tools is not None)
    answers = await service.ask(caller, [asked], Protocol.NATIVE, gone)
    if body.stream:
        return EventStream(_events(request, service, answers, arguments))
    results = await single(request, answers)
    log_generation(request, service, arguments, results)
    return JSONResponse(answered(results[0], answers))


@router.post("/query/compare", response_model=shapes.CompareResponse)
async def compare(
    body: shapes.QueryRequest, request: Request, service: ServiceOf, caller: Calling, session: SessionId = None
) -> Response:
    """Answer the same question twice: cold, without the store, and then with it."""
    if body.stream:
        raise ApiError("invalid_request", "a comparison is not streamed", param="stream")
    if body.reuse is not None:
        raise ApiError("invalid_request", "a comparison runs with reuse off, and with the engine's own", param="reuse")
    service = await serving(request, body.model)
    gone = functools.partial(disconnected, request.receive)
    arguments = await service.prepared(caller, functools.partial(_arguments, service, caller, body), gone)
    found: dict[str, Generation] = {}
    told: dict[str, dict[str, Any]] = {}
    for kind, more in (("cold", {"reuse": "off"}), ("warm", {})):
        name, registered = None if kind == "cold" else session, body.tools is not None
        asked = Asked(None, arguments | {"trace": True} | more, body.cache_salt, name, registered=registered)
        answers = await service.ask(caller, [asked], Protocol.NATIVE, gone)
        (found[kind],) = await single(request, answers)
        told[kind] = answered(found[kind], answers)
    cold, warm = found["cold"], found["warm"]
    log_generation(request, service, arguments, [warm])
    return JSONResponse({
        **told,
        "same_answer": cold.token_ids == warm.token_ids,
        "bit_identical": cold.logits_digest == warm.logits_digest,
        "ttft_speedup": cold.ttft_ms / warm.ttft_ms,
    })


def _arguments(service: Service, caller: Caller, body: shapes.QueryRequest) -> dict[str, Any]:
    """Return the arguments of `Engine.generate`. Reads the registered set. Raises ApiError."""
    if (body.query is None) == (body.messages is None):
        raise ApiError("invalid_request", "give either query or messages", param="query")
    turns = [{"role": "user", "content": body.query}] if body.messages is None else list(body.messages)
    arguments = sampling(body, {"temperature": 0.0}) | service.adapted(body.model)
    arguments["max_new_tokens"] = new_tokens(body.max_new_tokens, service.config.limits)
    for name in ("tool_choice", "parallel_tool_calls", "response_schema"):
        if (value := getattr(body, name)) is not None:
            arguments[name] = value
    if body.tools is None:
        if body.version is not None:
            raise ApiError("invalid_request", "version needs tools", param="version")
        return {"messages": turns} | arguments
    found = sets.get(service.engine, caller, body.tools, body.version)
    return found.request(messages=turns, **arguments)


async def _events(
    request: Request, service: Service, answers: Answers, arguments: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    try:
        async for found in answers.pieces(HEARTBEAT):
            if found is None:
                yield b": still at work\n\n"
            elif found[1].text:
                yield event({"text": found[1].text}, "token")
        log_generation(request, service, arguments, answers.results)
        yield event(answered(answers.results[0], answers), "done")
    except Exception as error:
        yield event(in_stream(error, Protocol.NATIVE), "error")
    finally:
        answers.close()


def answered(result: Generation, answers: Answers) -> dict[str, Any]:
    """Return the whole of an answer that is the only one of its request."""
    return {
        "answer": result.text,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in result.tool_calls],
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "cached_tokens": result.cached_tokens,
        "cached_by_tier": result.cached_by_tier,
        "exactness": result.exactness,
        "ttft_ms": result.ttft_ms,
        "total_ms": result.total_ms,
        "tokens_per_sec": result.tokens_per_sec,
        "drafted_tokens": result.drafted_tokens,
        "accepted_tokens": result.accepted_tokens,
        "timings": result.timings,
        "uncached_reason": result.uncached_reason,
        "miss": misses.shown(result.miss),
        "segments": [asdict(segment) for segment in answers.each[0].segments],
        **changed(answers.each[0]),
    }
