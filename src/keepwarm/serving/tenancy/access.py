"""Gives handlers the service, the caller and the session of a request."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import Depends, Header, Query, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from keepwarm.serving.events import disconnected
from keepwarm.serving.models import Models
from keepwarm.serving.protocols.bodies import caller_of
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.service import Service
from keepwarm.serving.tenancy.tenants import Caller

_bearer = HTTPBearer(auto_error=False, description="An API key; not needed where the service runs without keys.")
_header = APIKeyHeader(name="x-api-key", auto_error=False, description="The same, as Anthropic's clients send it.")


ModelParam = Annotated[
    str | None, Query(alias="model", max_length=200, description="where there are several: whose view is wanted")
]


class AsksModel(Protocol):
    """A request's body. `model` is empty if the request names none."""

    model: str


async def service_of(request: Request) -> Service:
    """Return the service, as a coroutine: a plain function would be run in another thread."""
    found: Service = request.app.state.service
    return found


async def models_of(request: Request) -> Models:
    """Return all models of the service."""
    found: Models = request.app.state.models
    return found


async def calling(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)] = None,
    header: Annotated[str | None, Security(_header)] = None,
) -> Caller:
    """Return the caller. The headers are listed to be documented. Raises ApiError without a key where one is needed."""
    caller, models = caller_of(request), await models_of(request)
    return replace(caller, epoch=await models.at_hand.epoch(caller))


async def administering(caller: Annotated[Caller, Depends(calling)]) -> Caller:
    """Return the caller. Raises ApiError unless they may see what concerns all tenants."""
    if not caller.admin:
        raise ApiError("permission", "this needs a key that was made with `keepwarm keys add --admin`")
    return caller


async def serving(request: Request, model: str | None, *, looks: bool = False) -> Service:
    """Return the service for a model, which is loaded until the request has ended; None: for the first one. `looks` is
    as for `Models.hold`.

    Raises ApiError for a model that is not served, and what `Models.hold` raises.
    """
    models = await models_of(request)
    service = models.first if model is None else models.find(model)
    if service.several:
        caller = caller_of(request)
        owner = "" if caller.salt is None else caller.tenant
        hold = await models.hold(service, owner, partial(disconnected, request.receive), looks=looks)
        request.scope["state"].setdefault("holds", []).append(hold)
    return service


async def asked_for(request: Request, body: AsksModel) -> Service:
    """Return the service for the model that a request's body names, as `serving` does. A body that names none gets the
    first model's name."""
    service = await serving(request, body.model or None)
    body.model = body.model or service.model_id
    return service


async def looking(request: Request, caller: Annotated[Caller, Depends(calling)], model: ModelParam = None) -> Service:
    """Return a service to look into the store with: for the model that is named, or else for one that is loaded."""
    models = await models_of(request)
    return await serving(request, models.at_hand.model_id if model is None else model, looks=True)


def noted(request: Request, **what: Any) -> None:
    """Add to the request's line in the log."""
    request.scope["state"].setdefault("log", {}).update(what)


LookingService = Annotated[Service, Depends(looking)]
ModelsOf = Annotated[Models, Depends(models_of)]
ServiceOf = Annotated[Service, Depends(service_of)]
Calling = Annotated[Caller, Depends(calling)]
Administering = Annotated[Caller, Depends(administering)]
SessionId = Annotated[str | None, Header(alias="x-session-id", max_length=256, description="names a conversation")]
