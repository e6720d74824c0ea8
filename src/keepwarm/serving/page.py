"""The web page at `/`: files of the package, sent as they are. The page uses only the native protocol."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from keepwarm.serving.protocols.errors import ApiError

router = APIRouter(include_in_schema=False)

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
# Nothing from elsewhere, no script or style inside the document, and no text that becomes markup.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked again each time, and mostly answered 304
}


@cache
def _assets() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and entity tag of every file of the page."""
    found = {}
    for file in files("keepwarm.serving").joinpath("web").iterdir():
        content = file.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[file.name] = (content, _TYPES[file.name.rpartition(".")[2]], tag)
    return found


@router.get("/")
async def page(request: Request) -> Response:
    return _sent(request, "index.html")


@router.get("/web/{name}")
async def asset(request: Request, name: Annotated[str, Path(pattern=r"^[a-z]+\.(css|js|json|svg)$")]) -> Response:
    return _sent(request, name)


def _sent(request: Request, name: str) -> Response:
    found = _assets().get(name)
    if found is None:
        raise ApiError("not_found", f"the page has no file {name!r}")
    content, kind, tag = found
    headers = _HEADERS | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)
