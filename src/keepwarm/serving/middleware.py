"""Handles every request before and beside its handler: an id, guards of a local service, limits, a log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepwarm.serving.observability import logs
from keepwarm.serving.protocols.errors import ApiError, Protocol

if TYPE_CHECKING:
    from keepwarm.serving.service import Service

log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_SECRET_PARAMS = ("key", "api_key", "apikey", "token", "access_token")


class ClientGone(OSError):
    """A client has stopped reading."""


class Guard:
    """The outermost application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._limits = service.config.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        number = given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        logs.request_id.set(number)
        state = scope.setdefault("state", {})
        state["request_id"] = number
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                found = MutableHeaders(scope=message)
                found["x-request-id"] = found["request-id"] = number
                found["x-content-type-options"] = "nosniff"
            try:
                async with asyncio.timeout(self._limits.send_timeout):
                    await send(message)
            except TimeoutError:
                raise ClientGone(f"a client read nothing for {self._limits.send_timeout} s") from None

        with self._service.tracing.span(f"{scope['method']} {scope['path'][:200]}", headers) as told:
            try:
                refusal = self._refusal(scope, headers)
                if refusal is not None:
                    protocol = Protocol.of(scope["path"])
                    await refusal.response(protocol, number)(scope, receive, sending)
                else:
                    body = _Body(receive, self._limits.max_body, self._limits.body_timeout)
                    await self._app(scope, body, sending)
            except ClientGone as error:
                log.warning("%s", error)
            except Exception:
                if not status:  # else the application has answered and logged it
                    raise
            finally:
                for held in (*state.get("holds", ()), *([state["held"]] if "held" in state else ())):
                    held.close()
                line = {"method": scope["method"], "path": scope["path"][:200], "status": status or None}
                line["ms"] = round((time.perf_counter() - started) * 1e3, 2)
                line |= state.get("log", {})
                told(line)
                log.info("request", extra=line)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Return the refusal of a request that may not come in at all; None for any other."""
        server = self._service.config.server
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._limits.max_body:
            return _too_large(self._limits.max_body, f"{length} are sent")
        if scope["method"] == "POST" and (length != "0" or "transfer-encoding" in headers):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":  # a page of another origin may send other types without a preflight
                return ApiError("unsupported_media", f"the body must be application/json, got {kind[:100]!r}")
        names = [part.partition(b"=")[0].decode("latin-1").lower() for part in scope["query_string"].split(b"&")]
        if any(name in _SECRET_PARAMS for name in names):
            return ApiError(
                "invalid_request", "keys are not taken from the URL, where they would be logged: send a header"
            )
        origin = headers.get("origin")
        if origin is not None and origin not in server.cors_origins and not _same(origin, headers.get("host", "")):
            return ApiError("permission", f"pages of {origin[:100]!r} may not call this service (server.cors_origins)")
        if not self._service.tenants.keyed:
            host = _name(headers.get("host", ""))
            if host not in (*_LOCAL, server.host, *server.allowed_hosts):  # a foreign name bound to our address
                return ApiError("permission", f"this service is not called {host[:100]!r} (server.allowed_hosts)")
        return None


class _Body:
    """`receive`, until more came than is allowed, or too slowly."""

    def __init__(self, receive: Receive, most: int, timeout: float) -> None:
        self._receive = receive
        self._most = most
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._read = 0
        self._whole = False

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise ApiError("timeout", f"the body did not arrive within {self._timeout:g} s") from None
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._read > self._most:
                raise _too_large(self._most, f"{self._read} came so far")
        return message


def _too_large(most: int, seen: str) -> ApiError:
    return ApiError("too_large", f"the body has more than {most} bytes: {seen} (limits.max_body)")


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _same(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc == host
    except ValueError:  # not a URL
        return False
