"""Gives handlers the service, the caller and the session of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from keepwarm.serving.protocols.bodies import caller_of
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.service import Service
from keepwarm.serving.tenancy.tenants import Caller

_bearer = HTTPBearer(auto_error=False, description="An API key; not needed where the service runs without keys.")
_header = APIKeyHeader(name="x-api-key", auto_error=False, description="The same, as Anthropic's clients send it.")


async def service_of(request: Request) -> Service:
    """Return the service, as a coroutine: a plain function would be run in another thread."""
    found: Service = request.app.state.service
    return found


async def calling(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)] = None,
    header: Annotated[str | None, Security(_header)] = None,
) -> Caller:
    """Return the caller. The headers are listed to be documented. Raises ApiError without a key where one is needed."""
    caller, service = caller_of(request), await service_of(request)
    return replace(caller, epoch=await service.epoch(caller))


async def administering(caller: Annotated[Caller, Depends(calling)]) -> Caller:
    """Return the caller. Raises ApiError unless they may see what concerns all tenants."""
    if not caller.admin:
        raise ApiError("permission", "this needs a key that was made with `keepwarm keys add --admin`")
    return caller


def noted(request: Request, **what: Any) -> None:
    """Add to the request's line in the log."""
    request.scope["state"].setdefault("log", {}).update(what)


ServiceOf = Annotated[Service, Depends(service_of)]
Calling = Annotated[Caller, Depends(calling)]
Administering = Annotated[Caller, Depends(administering)]
SessionId = Annotated[str | None, Header(alias="x-session-id", max_length=256, description="names a conversation")]
