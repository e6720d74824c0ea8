"""A service in this process, for tests that look into it: real sockets, and a thread for its event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
from tests.helpers.processes import DEADLINE

from keepwarm.serving.app import Server
from keepwarm.serving.settings import ServeConfig


@contextmanager
def serving(store: Path, **settings: Any) -> Iterator[tuple[str, Server]]:
    """Serve while the block runs; `settings` are by dotted name, with `__` for the dot. Yields the address."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    server = Server(ServeConfig.load(None, {"engine.store": str(store), "server.port": 0} | given, {}))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(server.sockets)))
    thread.start()
    try:
        host, port = server.sockets[0].getsockname()[:2]
        url = f"http://{host}:{port}"
        until = time.monotonic() + DEADLINE
        while not server.service.ready:
            assert thread.is_alive(), server.service.shared.failure
            assert time.monotonic() < until
            time.sleep(0.01)
        yield url, server
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        assert not thread.is_alive()
        gc.unfreeze()


def status(url: str, model: str | None = None) -> dict[str, Any]:
    """What the service says of itself."""
    found = httpx.get(f"{url}/status", params={"model": model} if model else None, timeout=DEADLINE)
    return dict(found.raise_for_status().json())


def states(url: str) -> dict[str, str]:
    """Which models are loaded."""
    return {one["name"]: one["state"] for one in status(url)["models"]}
