"""Request bodies: they are accepted from callers that may ask, counted before they are parsed, and checked before
anything is done.

A worker parses large bodies, since parsing some megabytes holds the interpreter for a good part of a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from keepwarm.serving.events import disconnected
from keepwarm.serving.held import PER_VALUE, HeldBody
from keepwarm.serving.protocols.errors import ApiError, told
from keepwarm.serving.settings import LimitsSection
from keepwarm.serving.tenancy.tenants import Caller

if TYPE_CHECKING:
    from keepwarm.serving.service import Service

_Result = TypeVar("_Result")
_SMALL = 32 << 10  # bytes; up to this size bodies are read in the event loop, in some milliseconds at worst
_FAULTS = 1000  # of a body; each takes a kilobyte to tell, and there may be as many as values
MAX_DEPTH = 128  # of nested objects and lists
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_BREAKPOINTS = ("cache_control", "prompt_cache_breakpoint")


def caller_of(request: Request) -> Caller:
    """Return the caller. Raises ApiError without a key where one is needed."""
    state = request.scope.setdefault("state", {})
    if "caller" not in state:
        service: Service = request.app.state.service
        scheme, credentials = get_authorization_scheme_param(request.headers.get("authorization"))
        key = credentials if scheme.lower() == "bearer" and credentials else request.headers.get("x-api-key")
        state["caller"] = service.tenants.caller(key)
        state.setdefault("log", {})["tenant"] = state["caller"].tenant
    found: Caller = state["caller"]
    return found


async def apart(request: Request, work: Callable[[], _Result], *, large: bool = False) -> _Result:
    """Return the result of `work`, whose time grows with the body. A worker runs it if the body is large, or if `large`
    says that another part is."""
    service: Service = request.app.state.service
    if not large and request.scope["state"].get("body_size", 0) <= _SMALL:
        return work()
    return await service.prepared(caller_of(request), work, partial(disconnected, request.receive))


class BodyRequest(Request):
    """A request whose JSON is an instance of `shape`, within all limits."""

    def __init__(self, scope: Scope, receive: Receive, shape: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._shape = shape

    async def body(self) -> bytes:
        caller = caller_of(self)  # checked before anything of the body is read
        if not hasattr(self, "_body"):
            held = HeldBody(self.app.state.service.held, "" if caller.salt is None else caller.tenant)
            self.scope["state"]["held"] = held  # it is closed when the request has ended
            chunks = []
            async for chunk in self.stream():
                held.take(len(chunk))
                chunks.append(chunk)
            self._body = b"".join(chunks)
            self.scope["state"]["body_size"] = len(self._body)
        return self._body

    async def json(self) -> Any:
        body, limits = await self.body(), self.app.state.service.config.limits

        def work() -> BaseModel:
            self.scope["state"]["held"].take(PER_VALUE * min(_values(body), limits.max_values))
            return read(body, self._shape, limits)

        return await apart(self, work)


class BodyRoute(APIRoute):
    """Routes that read their bodies as `BodyRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        shape = self.body_field.field_info.annotation
        assert isinstance(shape, type)
        assert issubclass(shape, BaseModel)

        async def reading(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive, shape))

        return reading


def read(body: bytes, shape: type[BaseModel], limits: LimitsSection) -> BaseModel:
    """Return a body as an instance of its shape. Raises ApiError, JSONDecodeError."""
    if not json.detect_encoding(body).startswith("utf-8"):
        raise ApiError("invalid_request", "the body must be JSON in UTF-8", code="invalid_json")
    _check_size(body, limits.max_values, "the body")
    value = json.loads(body)
    if _HALF_PAIR.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(
                "invalid_request", "the body holds half a surrogate pair, which is no Unicode text"
            ) from None
    if isinstance(value, dict):
        check_counts(value, limits)
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        if error.error_count() > _FAULTS:
            raise ApiError("invalid_request", f"the body has {error.error_count()} faults, too many to tell") from None
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise told(RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in problems])) from None


def check_counts(body: Mapping[str, Any], limits: LimitsSection) -> None:
    """Check that a request of any protocol holds no more of anything than it may. Raises ApiError."""
    for name, most in (
        ("tools", limits.max_tools),
        ("documents", limits.max_documents),
        ("messages", limits.max_messages),
    ):
        if isinstance(body.get(name), list) and len(body[name]) > most:
            raise ApiError(
                "too_large", f"more than {most} {name}: {len(body[name])} are sent (limits.max_{name})", param=name
            )
    messages = list(_objects(body.get("messages")))
    parts = [part for holder in (*messages, {"content": body.get("system")}) for part in _parts(holder)]
    items = list(_objects(body.get("input")))  # of the Responses protocol
    for name, found in (("messages", messages), ("input", items)):
        if (weight := sum(_weight(message) for message in found)) > limits.max_messages:
            raise ApiError(
                "too_large",
                f"more than {limits.max_messages} messages, parts of messages and calls: {weight} are sent "
                "(limits.max_messages)",
                param=name,
            )
    tools = [(tool, tool.get("function")) for tool in _objects(body.get("tools"))]
    declaring = [body, *messages, *parts, *(one for pair in tools for one in pair if isinstance(one, dict))]
    count = sum(one.get(name) is not None for one in declaring for name in _BREAKPOINTS)
    if count > limits.max_breakpoints:
        raise ApiError(
            "invalid_request", f"at most {limits.max_breakpoints} blocks may have cache_control, and {count} have"
        )
    calls = [call.get("function") for message in messages for call in _objects(message.get("tool_calls"))]
    for called in (*calls, *items):
        arguments = called.get("arguments") if isinstance(called, dict) else None
        if isinstance(arguments, str):  # it is parsed, too
            _check_size(arguments.encode("utf-8", "surrogatepass"), limits.max_values, "a call's arguments")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    yield from (one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message, and the parts of the tool results in it."""
    for part in _objects(message.get("content")):
        yield part
        yield from _objects(part.get("content"))


def _weight(message: Mapping[str, Any]) -> int:
    """Return how many messages this one counts as: tool results become messages, and calls and parts take as long."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = sum(1 for _ in _parts(message)) if isinstance(content, list) else len(list(_objects(message.get("output"))))
    return max(1, parts) + (len(calls) if isinstance(calls, list) else 0)


def _check_size(text: bytes, most: int, what: str) -> None:
    """Raise ApiError for a JSON text of more than `most` values, or nested too deeply, without parsing it."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH and _values(text) <= most:
        return
    values, depth = _structure(text)
    if depth > MAX_DEPTH:
        raise ApiError("invalid_request", f"{what} is nested more than {MAX_DEPTH} levels deep")
    if values > most:
        raise ApiError("too_large", f"{what} holds more than {most} values: {values} (limits.max_values)")


def _values(text: bytes) -> int:
    """Return a number that the values of a JSON text do not exceed. It costs little."""
    return 1 + text.count(b"[") + text.count(b"{") + text.count(b",")


def _structure(text: bytes, piece: int = 1 << 20) -> tuple[int, int]:
    """Return how many values a JSON text holds at most, and how deep they lie; any numbers if it is not JSON.

    It reads `piece` bytes at a time, because its arrays take several times the memory of the bytes that they describe.
    """
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    values, depth, deepest, quotes = 1, 0, 0, 0
    for start in range(0, len(text), piece):
        found = np.frombuffer(text, np.uint8, min(piece, len(text) - start), start)
        parity = (np.cumsum(found == ord('"'), dtype=np.uint8) + np.uint8(quotes)) & 1  # parity survives overflow
        outside, quotes = parity == 0, int(parity[-1])  # of strings
        opening = outside & ((found == ord("[")) | (found == ord("{")))
        closing = outside & ((found == ord("]")) | (found == ord("}")))
        values += int(np.count_nonzero(opening) + np.count_nonzero(outside & (found == ord(","))))
        depths = depth + np.cumsum(opening.astype(np.int8) - closing.astype(np.int8), dtype=np.int32)
        depth, deepest = int(depths[-1]), max(deepest, int(depths.max()))
    return values, deepest
