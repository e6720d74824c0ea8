"""What comes from outside: paths, headers and bodies. A few lines answer in the place of llama-server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from keepwarm.integrations.llamaserver.keeper import Settings
from keepwarm.integrations.llamaserver.probe import clear, file_in
from keepwarm.integrations.llamaserver.proxy import Proxy
from keepwarm.store.archive import Archive

PROPS = {"total_slots": 1, "default_generation_settings": {"n_ctx": 512}, "build_info": "b1", "model_path": "none"}


def answering(tokenizing: Callable[[], None]) -> Starlette:
    """A server with one slot, which cannot be saved."""

    async def answer(request: Request) -> Response:
        match request.url.path:
            case "/props":
                return JSONResponse(PROPS)
            case "/slots":
                return JSONResponse([{"id": 0, "id_task": -1, "is_processing": False}])
            case "/tokenize":
                tokenizing()
                return JSONResponse({"tokens": [5, 6, 7]})
            case "/completion":
                return JSONResponse({"timings": {"cache_n": 0}})
        return JSONResponse({}, 501)

    return Starlette(routes=[Route("/{rest:path}", answer, methods=["GET", "POST"])])


def asked(folder: Path, *bodies: Any, tokenizing: Callable[[Proxy], None] = lambda proxy: None) -> list[httpx.Response]:
    """Send bodies one after another."""

    async def ask() -> list[httpx.Response]:
        with Archive.open(None, max_ram=1 << 20, max_disk=0) as archive:
            proxy = Proxy("http://server", archive, Settings(folder))
            proxy._http._transport = httpx.ASGITransport(answering(lambda: tokenizing(proxy)))
            transport = httpx.ASGITransport(proxy.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                headers = [(b"x-name", b"J\xfcrgen")]
                found = [
                    await asyncio.wait_for(client.post("/completion", content=each, headers=headers), 20)
                    for each in bodies
                ]
            await proxy.close()
            return found

    return asyncio.run(ask())


def test_a_header_that_is_not_ascii_costs_no_slot(tmp_path: Path) -> None:
    answers = asked(tmp_path, *[json.dumps({"prompt": "hello"})] * 3)
    assert [(each.status_code, each.headers["x-keepwarm-slot"]) for each in answers] == [(200, "0")] * 3


def test_each_request_has_a_connection_of_its_own(tmp_path: Path) -> None:
    """llama-server closes a connection in which it streamed, and a request that was just sent in it gets no answer."""

    async def ask() -> int:
        found = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal found
            found += 1
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]")

        with Archive.open(None, max_ram=1 << 20, max_disk=0) as archive:
            async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                proxy = Proxy(f"http://127.0.0.1:{port}", archive, Settings(tmp_path))
                for _ in range(3):
                    assert await proxy._server.slots() == []
                await proxy.close()
        return found

    assert asyncio.run(ask()) == 3


def test_a_request_that_waits_while_the_server_is_forgotten_is_answered(tmp_path: Path) -> None:
    once = [1]

    def forget(proxy: Proxy) -> None:
        if once:
            once.pop()
            proxy._forget()

    (answer,) = asked(tmp_path, json.dumps({"prompt": "hello"}), tokenizing=forget)
    assert answer.headers["x-keepwarm-slot"] == "0"


def test_a_body_that_only_the_server_could_read_is_refused(tmp_path: Path) -> None:
    digits = '{"prompt": "hello", "x": ' + "1" * 5000 + "}"
    deep = "[" * 200_000
    large = json.dumps({"prompt": [2**33]})  # no token: that is the server's to say
    assert [each.status_code for each in asked(tmp_path, digits, deep, "[1]", large)] == [400, 400, 400, 200]


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/v1/models", True),
        ("/models/a name", True),
        ("/x/../slots/0", False),
        ("//host/slots/0", False),
        ("/%73lots/0", False),
        ("/slots?x", False),
        ("/a\nb", False),
    ],
)
@pytest.mark.parametrize("base", ["http://server", "http://server/base"])
def test_a_path_is_the_one_that_was_compared(tmp_path: Path, base: str, path: str, plain: bool) -> None:
    with Archive.open(None, max_ram=1 << 20, max_disk=0) as archive:
        assert Proxy(base, archive, Settings(tmp_path))._is_plain(path) is plain


def test_old_files_of_slots_are_removed(tmp_path: Path) -> None:
    old, new, theirs = file_in(tmp_path), file_in(tmp_path), tmp_path / "keepwarm-notes.bin"
    for path in (old, new, theirs):
        path.write_bytes(b"prompt")
    for path in (old, theirs):
        os.utime(path, (0, 0))
    clear(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([new, theirs])
