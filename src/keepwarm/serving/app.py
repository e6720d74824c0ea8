"""The application: routers over one service, errors in each protocol's shape, and the process that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from keepwarm.errors import KeepwarmError
from keepwarm.serving import page
from keepwarm.serving.connections import Connections
from keepwarm.serving.listening import BACKLOG, listen
from keepwarm.serving.middleware import Guard
from keepwarm.serving.models import Models, check_served
from keepwarm.serving.protocols import anthropic, caching, completions, native, openai, responses, sglang
from keepwarm.serving.protocols.errors import ApiError, answer
from keepwarm.serving.settings import ServeConfig

log = logging.getLogger(__name__)

_LEAVING = 0.5  # seconds that connections have to end once their answers were cancelled
_LOOK_EVERY = 1.0  # seconds between looks at connections that say nothing

DESCRIPTION = (
    "A language model with a cache of its KV state: the native protocol, OpenAI's, Anthropic's and SGLang's. "
    "A parameter that is not supported is an error, never ignored."
)


def create_app(config: ServeConfig) -> FastAPI:
    """Make the application. Its model loads in the background once it starts. Raises ConfigError."""
    models = Models(config)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        saving = asyncio.create_task(models.keep_usage())
        loading = asyncio.create_task(_loading(app, models))
        try:
            yield
        finally:
            saving.cancel()
            models.shared.ending.set()
            await asyncio.gather(loading, saving, return_exceptions=True)
            await models.stop()

    app = FastAPI(
        title="Keepwarm",
        version=version("keepwarm"),
        description=DESCRIPTION,
        lifespan=life,
        docs_url=None,
        openapi_url=None,
        redoc_url=None,
    )
    app.state.models, app.state.service = models, models.first
    app.state.on_failure = None
    for part in (native, openai, completions, responses, anthropic, sglang, caching, page):
        app.include_router(part.router)
    for kind in (ApiError, KeepwarmError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    if config.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # SDKs send headers of their own (x-stainless-*, anthropic-beta, ...)
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> JSONResponse:
        if app.openapi_schema is None:  # it takes a while: not in the event loop
            app.openapi_schema = await asyncio.to_thread(described, app)
        return JSONResponse(app.openapi_schema)

    return app


def guarded(app: FastAPI) -> ASGIApp:
    """Return the application behind its guard: this is what is served."""
    return Guard(app, app.state.service)


def described(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document. FastAPI lists 422 for every body; here a bad one is 400, in the protocol's shape."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    shapes = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        shapes.pop(name, None)
    for shape in shapes.values():
        if shape.get("additionalProperties") is False and "model" in shape.get("properties", {}):
            model = shape["properties"]["model"]
            model.pop("default", None)  # the name that is taken for none is none of those served
            (model["anyOf"][0] if "anyOf" in model else model)["enum"] = app.state.models.names
    return schema


async def _loading(app: FastAPI, models: Models) -> None:
    try:
        await models.start()
    except Exception as error:
        if app.state.on_failure is None:
            log.error("the service cannot start: %s", error)
        else:  # the server stops, and its command reports the error
            app.state.on_failure()


class Server(uvicorn.Server):
    """uvicorn, with an orderly end of streams. It closes connections that never send anything."""

    def __init__(self, config: ServeConfig) -> None:
        """Check what can be checked without the model, and take the address. Raises ConfigError, ModelNotFound and
        StoreError."""
        check_served(config)
        app = create_app(config)
        self.sockets = listen(config.server.host, config.server.port)
        self.models: Models = app.state.models
        self.service = self.models.first
        app.state.on_failure = self._stop
        self._limits = config.limits
        self._open = Connections(config.limits)
        super().__init__(
            uvicorn.Config(
                guarded(app),
                host=config.server.host,
                port=config.server.port,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,
                http="h11",
                ws="none",
                lifespan="on",
                timeout_graceful_shutdown=math.ceil(config.limits.shutdown_grace + _LEAVING),
                backlog=BACKLOG,
            )
        )

    def _stop(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in an orderly way on a signal, which is not a failure. A second interrupt does not wait for that.

        If something blocks the end, a thread that does not need the interpreter ends the process in time.
        """
        if not self.should_exit:
            seconds = self._limits.shutdown_grace + self._limits.shutdown_timeout
            faulthandler.dump_traceback_later(seconds, exit=True)
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sweeping = asyncio.create_task(self._sweep())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._sweeping.cancel()
        if self.service.health.status != "failed":
            self.service.shared.stopping()
        await super().shutdown(sockets)

    async def _sweep(self) -> None:
        """Close useless connections: see `Connections`."""
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            self._open.look(list(self.server_state.connections), time.monotonic())
