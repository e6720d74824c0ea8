"""The web page at `/`: files of the package. The page uses only the native protocol.

The document is asked for each time. It names the other files by a digest of them all, so a browser asks for these once.
"""

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
}
_ASK_AGAIN = "no-cache"  # and mostly answered 304
_KEEP = "public, max-age=31536000, immutable"


@cache
def _assets() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and entity tag of every file of the page."""
    found = sorted(files("keepwarm.serving").joinpath("web").iterdir(), key=lambda file: file.name)
    read = {file.name: file.read_bytes() for file in found if file.name.rpartition(".")[2] in _TYPES}
    read["index.html"] = read["index.html"].replace(b'="/web/', f'="/web/{_digest(*read.values())}/'.encode())
    types = {name: _TYPES[name.rpartition(".")[2]] for name in read}
    return {name: (content, types[name], f'"{_digest(content)}"') for name, content in read.items()}


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in contents)).hexdigest()[:32]


Name = Annotated[str, Path(pattern=r"^[a-z]+\.(css|js|json|svg)$")]


@router.get("/")
async def page(request: Request) -> Response:
    return _sent(request, "index.html", _ASK_AGAIN)


@router.get("/web/{name}")
async def asset(request: Request, name: Name) -> Response:
    return _sent(request, name, _ASK_AGAIN)


@router.get("/web/{digest}/{name}")
async def kept_asset(request: Request, digest: Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")], name: Name) -> Response:
    """Send a file as the document names it. A document of an earlier version gets the files there are, not to keep."""
    current = f"/web/{digest}/".encode() in _assets()["index.html"][0]
    return _sent(request, name, _KEEP if current else _ASK_AGAIN)


def _sent(request: Request, name: str, keep: str) -> Response:
    found = _assets().get(name)
    if found is None:
        raise ApiError("not_found", f"the page has no file {name!r}")
    content, kind, tag = found
    headers = _HEADERS | {"cache-control": keep, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)
