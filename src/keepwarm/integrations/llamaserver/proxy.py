"""The HTTP application in front of a llama-server: requests go to the slot that has their beginning.

Completions and chats are kept. Everything else is passed on as it is, but for the slots' own API, which is this
program's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from keepwarm.integrations.llamaserver.keeper import Keeper, Lease, Settings
from keepwarm.integrations.llamaserver.server import CHATS, COMPLETIONS, LlamaServer, Refused
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]
_OWN = frozenset(("host", "content-length", "connection", "transfer-encoding", "keep-alive"))  # of one connection
_KEYS = ("authorization", "x-api-key")
# With tenants, nothing else is passed on: the server would compute it in a slot of its own choice, or tell of others.
_SHARED = frozenset((
    "/health",
    "/v1/health",
    "/models",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/embedding",
    "/embeddings",
    "/v1/embeddings",
    "/rerank",
    "/reranking",
    "/v1/rerank",
    "/v1/reranking",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/input_tokens",
))
_UNSUITED = ("lora", "n_cmpl", "n_discard")  # fields of requests whose KV is not that of their tokens alone
_LAST = 4096  # bytes of an answer in which its times are looked for
_PREDICTED = re.compile(rb'"predicted_n":\s*(\d+)')
_LEFT = 499  # as nginx has it: the client is gone
_CLOSING = 60.0  # seconds for what is still to be saved


class Proxy:
    """What the application does. `key` is the server's, for requests of this program itself."""

    def __init__(
        self, url: str, archive: Archive, settings: Settings, *, key: str | None = None, tenants: bool = False
    ) -> None:
        # A connection of its own for each request: llama-server closes one in which an answer was streamed, and what is
        # asked in it just before fails.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None, connect=5.0), limits=limits)
        self._server = LlamaServer(self._http, key)
        self._archive = archive
        self._settings = settings
        self._tenants = tenants
        self._router = False
        self._keepers: dict[str, Keeper] = {}
        self._work: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    @property
    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def life(app: Starlette) -> AsyncIterator[None]:
            try:
                yield
            finally:
                await self.close()

        routes = [
            Route("/keepwarm/stats", self._stats, methods=["GET"]),
            Route("/slots", self._refuse, methods=_METHODS),
            Route("/slots/{rest:path}", self._refuse, methods=_METHODS),
            Route("/{rest:path}", self._answer, methods=_METHODS),
        ]
        return Starlette(routes=routes, lifespan=life)

    async def begin(self) -> str:
        """Look at the server. Return what is said of it; nothing fails if it does not run yet."""
        try:
            self._router = (await self._server.props()).get("role") == "router"
            if self._router:
                return "a router: each model is asked when it is first used"
            keeper = self._keeper("")
            await keeper.attach()
            return keeper.said
        except Refused as error:
            return f"the server does not answer yet ({error})"

    async def close(self) -> None:
        """Wait until all that was answered is stored."""
        if self._work:
            await asyncio.wait(self._work, timeout=_CLOSING)
        await self._http.aclose()

    def _keeper(self, model: str) -> Keeper:
        name = model if self._router else ""
        if name not in self._keepers:
            server = self._server.of(name) if self._router else self._server
            self._keepers[name] = Keeper(server, self._archive, self._settings, self.counts)
        return self._keepers[name]

    # ---- requests ----

    async def _stats(self, request: Request) -> Response:
        said = {name or "model": keeper.said for name, keeper in self._keepers.items()}
        return JSONResponse({"counts": dict(self.counts), "models": said, "unfinished": len(self._work)})

    async def _refuse(self, request: Request) -> Response:
        return _error(403, "the slots belong to keepwarm slots: ask llama-server itself")

    async def _answer(self, request: Request) -> Response:
        path, raw = request.scope["path"], await request.body()
        if not self._is_plain(path):
            return _error(400, f"{path!r} would be another path for llama-server")
        if self._tenants and path not in CHATS | COMPLETIONS | _SHARED:
            return _error(403, f"{path} is not served with --tenants: llama-server does not keep callers apart there")
        lease = None
        if request.method == "POST" and path in CHATS | COMPLETIONS:
            body = _body(raw)
            if body is None:
                # llama-server reads more than this program does, and would choose the slot of such a request itself.
                return _error(400, "the body is no JSON object that can be read here")
            caller = {name: request.headers[name] for name in _KEYS if name in request.headers}
            lease, raw = await self._lent(path, body, caller)
        if request.method != "POST" or path != "/lora-adapters":
            return await self._passed_on(request, raw, lease)
        self._forget()
        try:
            return await self._passed_on(request, raw, lease)
        finally:
            self._forget()  # a request in between may have asked for the old adapters

    def _forget(self) -> None:
        for keeper in self._keepers.values():
            keeper.forget()

    def _is_plain(self, path: str) -> bool:
        """Whether the server gets a path as it was compared here: without dots, doubled slashes or a second encoding,
        which would lead to the slots or adapters under another name."""
        try:
            sent = self._http.build_request("GET", path).url.path
        except httpx.InvalidURL:
            return False
        return sent == self._http.base_url.path.rstrip("/") + path

    async def _lent(
        self, path: str, body: dict[str, Any], caller: Mapping[str, str]
    ) -> tuple[tuple[Keeper, Lease] | None, bytes]:
        """Return the slot of a request, and the request with its number."""
        self.counts["requests"] += 1
        keys = caller.values() if self._tenants else ()
        tenant = "\n".join(each for each in (*keys, str(body.pop("cache_salt", None) or "")) if each)
        keeper = self._keeper(str(body.get("model", "")))
        lease = await keeper.lend(path, body, tenant or None, caller) if _is_suited(body) else None
        if lease is None:
            self.counts["unkept"] += 1
            if self._tenants or tenant:
                body["cache_prompt"] = False
            return None, json.dumps(body).encode()
        # What was moved from other places of a prompt is not the KV of these tokens.
        body |= {"id_slot": lease.slot.number, "cache_prompt": True, "n_cache_reuse": 0}
        return (keeper, lease), json.dumps(body).encode()

    async def _passed_on(self, request: Request, raw: bytes, lent: tuple[Keeper, Lease] | None) -> Response:
        headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in _OWN]
        try:
            asked = self._http.build_request(
                request.method, request.scope["path"], params=request.query_params, headers=headers, content=raw
            )
            answer = await self._sent(asked, request)
        except httpx.HTTPError as error:
            self._finish(lent, None)
            self.counts["server_failures"] += 1
            return _error(502, f"llama-server does not answer: {error or type(error).__name__}")
        except BaseException:
            self._finish(lent, None)
            raise
        if answer is None:
            self._finish(lent, None)
            return Response(status_code=_LEFT)
        told = {name: value for name, value in answer.headers.items() if name not in _OWN}
        if lent is not None:
            told |= {"x-keepwarm-slot": str(lent[1].slot.number), "x-keepwarm-restored": str(lent[1].restored)}
        try:
            return _Relayed(self._parts(answer, lent), answer.status_code, told, partial(self._finish, lent, answer))
        except BaseException:
            self._finish(lent, answer)
            raise

    async def _sent(self, asked: httpx.Request, request: Request) -> httpx.Response | None:
        """Send a request. Return None if its client left before the server answered, which was told to stop then."""
        sending = asyncio.ensure_future(self._http.send(asked, stream=True))
        leaving = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            return sending.result() if sending.done() else None
        finally:
            leaving.cancel()
            sending.cancel()

    async def _parts(self, answer: httpx.Response, lent: tuple[Keeper, Lease] | None) -> AsyncIterator[bytes]:
        last = b""
        try:
            async for part in answer.aiter_raw():
                last = (last + part)[-_LAST:]
                yield part
        except httpx.HTTPError as error:
            log.warning("llama-server ended an answer: %s", error or type(error).__name__)
            self.counts["server_failures"] += 1
            raise
        if lent is not None and (found := _PREDICTED.findall(last)):  # only a whole answer tells its number of tokens
            lent[1].predicted = int(found[-1])

    def _finish(self, lent: tuple[Keeper, Lease] | None, answer: httpx.Response | None) -> None:
        """Do what follows an answer, in the background."""

        async def finish() -> None:
            try:
                if answer is not None:
                    await answer.aclose()
            finally:
                if lent is not None:
                    await lent[0].done(lent[1])

        task = asyncio.get_running_loop().create_task(finish())
        self._work.add(task)
        task.add_done_callback(self._work.discard)


class _Relayed(StreamingResponse):
    """An answer of the server. `ended` is called once, also if its client left before the first part was asked for."""

    def __init__(
        self, parts: AsyncIterator[bytes], status: int, headers: Mapping[str, str], ended: Callable[[], None]
    ) -> None:
        super().__init__(parts, status, headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def _body(raw: bytes) -> dict[str, Any] | None:
    """Return a request's JSON object; None if it is none."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _is_suited(body: Mapping[str, Any]) -> bool:
    """Whether a request is for one answer to one prompt, whose KV belongs to its tokens."""
    return (
        not any(body.get(name) for name in _UNSUITED)
        and body.get("n", 1) in (1, None)
        and body.get("cache_prompt", True) is not False
    )


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": {"code": status, "message": text, "type": "keepwarm"}}, status)
