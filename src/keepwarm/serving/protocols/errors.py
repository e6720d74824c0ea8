"""Errors of the service, in the shape and with the status code of the request's protocol.

| kind | status | OpenAI's type, code | Anthropic's type |
|---|---|---|---|
| invalid_request | 400 | invalid_request_error | invalid_request_error |
| authentication | 401 | invalid_request_error, invalid_api_key | authentication_error |
| permission | 403 | permission_error | permission_error |
| not_found | 404 | invalid_request_error | not_found_error |
| too_large | 413 | invalid_request_error | request_too_large |
| rate_limit | 429 | rate_limit_error, rate_limit_exceeded | rate_limit_error |
| overloaded | 503, Anthropic's 529 | overloaded_error | overloaded_error |
| timeout | 408, 504 | timeout_error | timeout_error |
| internal | 500 | server_error | api_error |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import CancelledError
from enum import StrEnum
from typing import Any

from fastapi.exceptions import HTTPException as FastAPIError
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from keepwarm.errors import ConfigError, KeepwarmError, Overloaded, PromptError, PromptTooLong, StoreError, TookTooLong

log = logging.getLogger(__name__)

RETRY_AFTER = 2  # seconds, where nothing better is known
_LONGEST = 2000  # characters of a message: some show what was sent
_SHOWN = 3  # problems of a body that a message lists


class Protocol(StrEnum):
    NATIVE = "native"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"

    @classmethod
    def of(cls, path: str) -> Protocol:
        """Return the protocol that a path belongs to."""
        if path.startswith("/v1/messages"):
            return cls.ANTHROPIC
        if path.startswith("/v1/") and not path.startswith(("/v1/cache", "/v1/usage", "/v1/sessions")):
            return cls.OPENAI
        return cls.NATIVE


_STATUS = {
    "invalid_request": 400,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "timeout": 408,
    "conflict": 409,
    "too_large": 413,
    "unsupported_media": 415,
    "rate_limit": 429,
    "internal": 500,
    "overloaded": 503,
    "too_slow": 504,
}
_OPENAI = {
    "permission": "permission_error",
    "rate_limit": "rate_limit_error",
    "internal": "server_error",
    "overloaded": "overloaded_error",
    "timeout": "timeout_error",
    "too_slow": "timeout_error",
}
_OPENAI_CODES = {"authentication": "invalid_api_key", "rate_limit": "rate_limit_exceeded"}
_ANTHROPIC = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate_limit": "rate_limit_error",
    "internal": "api_error",
    "overloaded": "overloaded_error",
    "timeout": "timeout_error",
    "too_slow": "timeout_error",
}


class ApiError(FastAPIError):
    """A refusal, before it is put into a protocol's shape."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
        super().__init__(_STATUS[kind], message)
        self.kind, self.message, self.code, self.param, self.retry_after = kind, message, code, param, retry_after

    def status(self, protocol: Protocol) -> int:
        if self.kind == "overloaded" and protocol is Protocol.ANTHROPIC:
            return 529
        return _STATUS[self.kind]

    def body(self, protocol: Protocol, request_id: str = "") -> dict[str, Any]:
        if protocol is Protocol.ANTHROPIC:
            kind = _ANTHROPIC.get(self.kind, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id or None}
        if protocol is Protocol.OPENAI:
            kind = _OPENAI.get(self.kind, "invalid_request_error")
            code = self.code or _OPENAI_CODES.get(self.kind)
            return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}
        shown = {"type": self.kind, "message": self.message, "param": self.param, "code": self.code}
        return {"error": {name: value for name, value in shown.items() if value is not None}}

    def response(self, protocol: Protocol, request_id: str = "") -> Response:
        headers = dict(self.headers or {})
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        if self.kind == "authentication":
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(protocol, request_id), self.status(protocol), headers)


def unsupported(param: str, cure: str) -> ApiError:
    """Return the refusal of a parameter that this service cannot honour."""
    return ApiError(
        "invalid_request",
        f"the parameter {param!r} is not supported: {cure}",
        code="unsupported_parameter",
        param=param,
    )


def told(error: BaseException) -> ApiError:
    """Turn any exception into an error for a client. An error that is not the client's fault shows no details."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError("invalid_request", str(error), code="context_length_exceeded", param="messages")
        case PromptError() | ConfigError():
            return ApiError("invalid_request", str(error))
        case Overloaded():
            return ApiError("overloaded", str(error), retry_after=RETRY_AFTER)
        case TookTooLong():
            return ApiError("too_slow", f"{error} (limits.prepare_timeout)")
        case CancelledError():
            return ApiError("overloaded", "the answer was cancelled: the service is stopping", retry_after=RETRY_AFTER)
        case StoreError():
            return ApiError("conflict", str(error))
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return _http(error)
        case KeepwarmError():
            return ApiError("internal", str(error))
    return ApiError("internal", "the service failed; its log has the cause under this request's id")


def _invalid(error: RequestValidationError) -> ApiError:
    problems = error.errors()
    first = problems[0] if problems else {"loc": (), "type": "", "msg": "the request is not valid"}
    param = _path(first)
    if first["type"] == "extra_forbidden":
        return ApiError(
            "invalid_request",
            f"the parameter {param!r} is not known or not supported here",
            code="unsupported_parameter",
            param=param,
        )
    if first["type"] == "json_invalid":
        return ApiError("invalid_request", "the body is no JSON text", code="invalid_json")
    texts = [f"{_path(problem)}: {problem['msg']}" for problem in problems[:_SHOWN]]
    more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
    return ApiError("invalid_request", "; ".join(texts) + more, param=param)


def _path(problem: Mapping[str, Any]) -> str:
    parts = [str(part) for part in problem["loc"] if part not in ("body", "query", "path")]
    return ".".join(part for part in parts if not part.startswith("<"))[:200]  # shapes of one field


def _http(error: HTTPException) -> ApiError:
    kinds = {status: kind for kind, status in _STATUS.items()}
    kind = kinds.get(error.status_code, "internal" if error.status_code >= 500 else "invalid_request")
    detail = str(error.detail)
    if kind == "not_found" and detail == "Not Found":
        detail = "there is nothing at this path"
    refusal = ApiError(kind, detail)
    refusal.headers = error.headers  # 405's Allow
    return refusal


def in_stream(error: Exception, protocol: Protocol, request_id: str = "") -> dict[str, Any]:
    """Return what a stream sends when its answer fails after it began."""
    refusal = told(error)
    if refusal.kind == "internal":
        log.error("an answer failed in its stream", exc_info=error)
    return refusal.body(protocol, request_id)


async def answer(request: Request, error: Exception) -> Response:
    """The exception handler of the application."""
    refusal = told(error)
    if refusal.kind == "internal":
        log.error("a request failed", exc_info=error, extra={"path": request.url.path})
    request.state.refusal = refusal
    return refusal.response(Protocol.of(request.url.path), getattr(request.state, "request_id", ""))
