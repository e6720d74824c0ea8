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
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

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
_UNSUITED = ("lora", "n_cmpl")  # fields of requests whose KV is not that of their tokens alone
_LAST = 4096  # bytes of an answer in which its times are looked for
_PREDICTED = re.compile(rb'"predicted_n":\s*(\d+)')
_LEFT = 499  # as nginx has it: the client is gone
_CLOSING = 60.0  # seconds for what is still to be saved


class Proxy:
    """What the application does. `key` is the server's, for requests of this program itself."""

    def __init__(
        self, url: str, archive: Archive, settings: Settings, *, key: str | None = None, tenants: bool = False
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None)
        )
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
        path, raw = request.url.path, await request.body()
        if self._tenants and path not in CHATS | COMPLETIONS | _SHARED:
            return _error(403, f"{path} is not served with --tenants: llama-server does not keep callers apart there")
        lease = None
        if request.method == "POST" and path in CHATS | COMPLETIONS:
            caller = {name: request.headers[name] for name in _KEYS if name in request.headers}
            lease, raw = await self._lent(path, raw, caller)
        if request.method == "POST" and path == "/lora-adapters":
            for keeper in self._keepers.values():
                keeper.forget()
        return await self._passed_on(request, raw, lease)

    async def _lent(
        self, path: str, raw: bytes, caller: Mapping[str, str]
    ) -> tuple[tuple[Keeper, Lease] | None, bytes]:
        """Return the slot of a request, and the request with its number."""
        self.counts["requests"] += 1
        try:
            body = json.loads(raw)
        except ValueError:
            return None, raw
        if not isinstance(body, dict):
            return None, raw
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
        headers = [(name, value) for name, value in request.headers.items() if name not in _OWN]
        asked = self._http.build_request(
            request.method, request.url.path, params=request.query_params, headers=headers, content=raw
        )
        try:
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
        return StreamingResponse(self._relayed(answer, lent), answer.status_code, told)

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

    async def _relayed(self, answer: httpx.Response, lent: tuple[Keeper, Lease] | None) -> AsyncIterator[bytes]:
        last = b""
        try:
            async for part in answer.aiter_raw():
                last = (last + part)[-_LAST:]
                yield part
        except httpx.HTTPError as error:
            log.warning("llama-server ended an answer: %s", error or type(error).__name__)
            self.counts["server_failures"] += 1
            raise
        finally:
            if lent is not None and (found := _PREDICTED.findall(last)):
                lent[1].predicted = int(found[-1])
            self._finish(lent, answer)

    def _finish(self, lent: tuple[Keeper, Lease] | None, answer: httpx.Response | None) -> None:
        """Do what follows an answer, in the background."""

        async def finish() -> None:
            if answer is not None:
                await answer.aclose()
            if lent is not None:
                await lent[0].done(lent[1])

        task = asyncio.get_running_loop().create_task(finish())
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def _is_suited(body: Mapping[str, Any]) -> bool:
    """Whether a request is for one answer to one prompt, whose KV belongs to its tokens."""
    return (
        not any(body.get(name) for name in _UNSUITED)
        and body.get("n", 1) in (1, None)
        and body.get("cache_prompt", True) is not False
    )


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": {"code": status, "message": text, "type": "keepwarm"}}, status)
