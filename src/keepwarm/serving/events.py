"""Server-sent events: a response that notices when its client is gone, and does not wait for one that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEARTBEAT = 10.0  # seconds of silence after which a stream says that it is alive


def event(data: Any, name: str | None = None) -> bytes:
    """Return one event with JSON data."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


class EventStream(Response):
    """Sends what a generator yields. The generator is closed when the client leaves, at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(None, headers={"cache-control": "no-store", "x-accel-buffering": "no"} | dict(headers or {}))
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            failure = (await asyncio.gather(sending, leaving, return_exceptions=True))[0]
            await self._events.aclose()
        if isinstance(failure, Exception) and not isinstance(failure, OSError):
            raise failure

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone. Call this once the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
