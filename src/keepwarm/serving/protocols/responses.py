"""OpenAI's Responses protocol. Answers consist of items, and are kept so that clients can continue them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from keepwarm.core.identity import json_text
from keepwarm.errors import KeepwarmError, PromptTooLong
from keepwarm.serving.events import HEARTBEAT, EventStream, disconnected
from keepwarm.serving.generation import errors_as, log_generation, new_tokens, sampling, single
from keepwarm.serving.protocols import items as convert
from keepwarm.serving.protocols import response_events
from keepwarm.serving.protocols.bodies import BodyRoute, apart
from keepwarm.serving.protocols.choices import SECONDS, STREAMED, About
from keepwarm.serving.protocols.errors import ApiError, Protocol, unsupported
from keepwarm.serving.protocols.reasoning import template_args
from keepwarm.serving.protocols.response_objects import Wanted, whole
from keepwarm.serving.protocols.retention import Keep
from keepwarm.serving.schemas import responses as shapes
from keepwarm.serving.schemas.openai import ErrorResponse, JsonFormat
from keepwarm.serving.service import Asked, Service
from keepwarm.serving.tenancy.access import Calling, LookingService, ServiceOf, SessionId, asked_for, noted
from keepwarm.serving.tenancy.tenants import Caller

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=BodyRoute, responses=errors_as(ErrorResponse))

_NAMES = {"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}  # fields' names here, by those in chat

ResponsePath = Annotated[str, Path(min_length=1, max_length=100)]


@router.post("", response_model=shapes.ResponseShown, responses=STREAMED)
async def create(
    body: shapes.ResponsesRequest, request: Request, service: ServiceOf, caller: Calling, session: SessionId = None
) -> Response:
    """Answer a conversation, streamed or whole."""
    service = await asked_for(request, body)
    noted(request, model=body.model, user=body.user or body.safety_identifier)
    earlier = await _earlier(body, request, service, caller)

    def work() -> tuple[Wanted, Asked]:
        return _wanted(body, service, caller, earlier, session)

    wanted, asked = await apart(request, work, large=bool(earlier))
    gone = functools.partial(disconnected, request.receive)
    try:
        answers = await service.ask(caller, [asked], Protocol.OPENAI, gone)
    except PromptTooLong as error:
        raise ApiError("invalid_request", str(error), code="context_length_exceeded", param="input") from None
    keep = functools.partial(_keep, service, caller, wanted)
    if body.stream:
        await answers.begin(HEARTBEAT)
        return EventStream(response_events.events(request, answers, wanted, keep))
    (result,) = await single(request, answers)
    log_generation(request, service, asked.arguments, [result])
    shown = whole(wanted, result, answers.each[0])
    await keep(shown)
    return JSONResponse(shown)


async def _earlier(
    body: shapes.ResponsesRequest, request: Request, service: Service, caller: Caller
) -> list[dict[str, Any]]:
    """Return the items of the conversation that the request continues. They count as part of its body, before the
    bodies of others are read."""
    number = body.previous_response_id
    if number is None:
        return []

    def count(found: Any) -> None:
        request.scope["state"]["held"].take(len(json_text(found.items)))

    told = "previous_response_id", "previous_response_not_found"
    found = await _found(service, caller, number, *told, seen=count)
    return list(found.items)


def _wanted(
    body: shapes.ResponsesRequest, service: Service, caller: Caller, earlier: list[dict[str, Any]], session: str | None
) -> tuple[Wanted, Asked]:
    """Return what the response will repeat of the request, and the question to the engine. Raises ApiError."""
    items = [*earlier, *convert.taken(body)]
    if len(items) > service.config.limits.max_messages:
        raise ApiError(
            "too_large",
            f"the conversation has {len(items)} items, and at most {service.config.limits.max_messages} are allowed "
            "(limits.max_messages)",
            param="input",
        )
    reasoning = "reasoning_content" in (service.engine.pipeline.tokenizer.template(tools=True) or "")
    arguments = _arguments(body, service)
    arguments["messages"] = convert.messages_of(items, body.instructions, reasoning=reasoning)
    if service.config.server.cache_key_sessions:
        session = session or body.prompt_cache_key
    found, unread = template_args(
        service.engine.pipeline.adapter,
        effort=body.reasoning.effort if body.reasoning else None,
        thinks=body.thinks,
        verbosity=body.text.verbosity if body.text else None,
        given=body.chat_template_kwargs,
    )
    arguments |= {"template_args": found} if found else {}
    left_out = [*convert.left_out(body, items, reasoning=reasoning), *(_NAMES.get(name, name) for name in unread)]
    asked = Asked(
        None,
        arguments,
        body.cache_salt,
        session,
        fit=body.max_output_tokens is None,
        keep=_kept(body),
        left_out=tuple(left_out),
    )
    return Wanted(body, About("resp_", body, arguments, service, caller), items), asked


def _arguments(body: shapes.ResponsesRequest, service: Service) -> dict[str, Any]:
    """Return the arguments of `Engine.generate`, without messages. Raises ApiError for what does not fit together."""
    if body.stream_options is not None and not body.stream:
        raise ApiError("invalid_request", "stream_options needs stream", param="stream_options")
    arguments = sampling(body, service.sampling) | convert.tool_arguments(body)
    arguments["max_new_tokens"] = new_tokens(body.max_output_tokens, service.config.limits)
    match body.text.format if body.text else None:
        case JsonFormat():
            arguments["response_schema"] = {}
        case shapes.SchemaFormat() as form:
            arguments["response_schema"] = form.json_schema
    if "message.output_text.logprobs" in (body.include or ()):
        arguments["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ApiError(
            "invalid_request", 'top_logprobs needs include=["message.output_text.logprobs"]', param="top_logprobs"
        )
    return arguments | service.adapted(body.model)


def _kept(body: shapes.ResponsesRequest) -> tuple[Keep, ...]:
    """Return how long the request asks to keep the KV of the whole prompt."""
    options = body.prompt_cache_options
    seconds = SECONDS.get(body.prompt_cache_retention or (options.ttl if options else None) or "", 0.0)
    return (Keep("all", seconds),) if seconds else ()


# ---- what is kept ----


async def _keep(service: Service, caller: Caller, wanted: Wanted, shown: dict[str, Any]) -> None:
    """Keep an answer, unless the request asks not to. If this fails, the answer is sent anyway, and says that it is not
    kept."""
    if not shown["store"]:
        return
    limits = service.config.limits
    kept = wanted.kept(shown) | {"most": limits.max_responses, "seconds": limits.response_ttl}

    def work() -> None:
        size = len(json_text(kept["items"]).encode())
        if size > limits.max_body:  # otherwise every turn could add as much, and the next turn reads all of it
            raise ApiError(
                "too_large",
                f"its conversation has {size} bytes, and at most {limits.max_body} are allowed (limits.max_body)",
            )
        answers = service.running.sessions.answers
        answers.put(shown["id"], caller.salt, epoch=caller.epoch, **kept)

    try:
        await service.managed(caller, work)
    except (ApiError, KeepwarmError) as error:
        log.warning("the response %s is not kept: %s", shown["id"], error)
        shown["store"] = False


async def _found(
    service: Service,
    caller: Caller,
    number: str,
    param: str,
    code: str | None = None,
    seen: Callable[[Any], None] | None = None,
) -> Any:
    """Return a kept response of this tenant's, after `seen` was called with it. Raises ApiError if there is none."""
    seconds = service.config.limits.response_ttl

    def read() -> Any:
        found = service.engine.sessions.answers.get(number, caller.salt, seconds)
        if found is not None and seen is not None:
            seen(found)
        return found

    found = await service.managed(caller, read)
    if found is None:
        raise ApiError(
            "not_found",
            f"there is no response {number[:100]!r}: it was not stored, was deleted, or has expired; send "
            "the whole conversation as input",
            param=param,
            code=code,
        )
    return found


@router.get("/{response_id}", response_model=shapes.ResponseShown)
async def retrieve(
    response_id: ResponsePath, service: LookingService, caller: Calling, stream: Annotated[bool, Query()] = False
) -> Response:
    """Return a stored response."""
    if stream:
        raise unsupported("stream", "a stored response is told whole: leave it out")
    found = await _found(service, caller, response_id, "response_id")
    return JSONResponse({**found.body, "output": list(found.output)})


@router.delete("/{response_id}", response_model=shapes.DeletedShown)
async def delete(response_id: ResponsePath, service: LookingService, caller: Calling) -> dict[str, Any]:
    """Delete a stored response. Responses that continue it stay. Its KV stays until the store evicts it."""
    await _found(service, caller, response_id, "response_id")
    await service.managed(caller, lambda: service.engine.sessions.answers.drop(response_id, caller.salt))
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/{response_id}/input_items", response_model=shapes.ItemsShown)
async def input_items(
    response_id: ResponsePath,
    service: LookingService,
    caller: Calling,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
    after: Annotated[str | None, Query(max_length=200, description="id of an item: what follows it")] = None,
) -> dict[str, Any]:
    """Return the items that a stored response answers: its input, with the conversation before it. The last item comes
    first."""
    found = await _found(service, caller, response_id, "response_id")
    items = list(found.items[: found.inputs])
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [at for at, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError("not_found", f"there is no item {after!r} in this response", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ids = [item["id"] for item in page]
    more = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": len(items) > limit}
    return {"object": "list", "data": page, **more}
