"""`keepwarm slots`: keeps the prompts of a running llama-server, by its slots."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from keepwarm.cli import output
from keepwarm.cli.options import default_store
from keepwarm.cli.stored import KeyFile, StoreFolder
from keepwarm.config import parse_bytes
from keepwarm.errors import ConfigError


def slots(
    slot_path: Annotated[
        Path, typer.Option("--slot-path", help="The server's --slot-save-path. A folder in memory (/dev/shm) is quick.")
    ],
    server: Annotated[str, typer.Option("--server", help="The running llama-server.")] = "http://127.0.0.1:8080",
    store: StoreFolder = None,
    max_disk: Annotated[str, typer.Option("--max-disk", help="Byte cap of the store's folder.")] = "20GiB",
    key_file: KeyFile = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one.")] = 8081,
    salt: Annotated[str | None, typer.Option("--salt", help="A secret: what is kept is found under it only.")] = None,
    tenants: Annotated[
        bool, typer.Option("--tenants", help="Keep callers with different API keys apart, in slots and in the store.")
    ] = False,
    save_tokens: Annotated[
        int, typer.Option("--save-tokens", min=1, help="Save a slot if so many of its tokens are not stored.")
    ] = 32,
    model_file: Annotated[
        Path | None, typer.Option("--model-file", help="The GGUF file, if the server's path to it is not valid here.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="The variable that holds the server's API key.")
    ] = None,
) -> None:
    """Keep the prompts of a running llama-server: they outlive it, and requests go to the slot with their beginning.

    The server must be started with --slot-save-path, on this machine; send requests to this command's port instead. Its
    own cache is then needless: --cache-ram 0.
    """
    try:
        from keepwarm.integrations.llamaserver.keeper import Settings
        from keepwarm.integrations.llamaserver.proxy import Proxy
        from keepwarm.serving.listening import listen
    except ModuleNotFoundError as error:
        if (error.name or "keepwarm").partition(".")[0] == "keepwarm":
            raise
        raise ConfigError(f"this needs more packages ({error.name}): pip install 'keepwarm[serve]'") from None
    from keepwarm.integrations.settings import StoreSettings

    if not slot_path.expanduser().is_dir():
        raise ConfigError(f"--slot-path: there is no folder {slot_path}")
    if model_file is not None and not model_file.is_file():
        raise ConfigError(f"--model-file: there is no file {model_file}")
    if urlsplit(server).scheme not in ("http", "https") or not urlsplit(server).hostname:
        raise ConfigError(f"--server must look like http://127.0.0.1:8080, got {server!r}")
    key = _key(api_key_env)
    given = {"store": store or default_store(), "max_disk": parse_bytes(max_disk), "store_key_file": key_file}
    settings = Settings(slot_path.expanduser().resolve(), salt, save_tokens, model_file)
    with StoreSettings.of(given, "keepwarm slots").open(0) as archive:
        sockets = listen(host, port)
        asyncio.run(_run(Proxy(server.rstrip("/"), archive, settings, key=key, tenants=tenants), sockets))


def _key(variable: str | None) -> str | None:
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"--api-key-env names {variable}, which is not set")
    return None if variable is None else os.environ[variable]


async def _run(proxy: Any, sockets: list[Any]) -> None:
    """Serve until a signal."""
    import uvicorn

    output.note(await proxy.begin())
    for one in sockets:
        host, port = one.getsockname()[:2]
        output.note(f"listening at http://{f'[{host}]' if ':' in host else host}:{port}")
    config = uvicorn.Config(proxy.app, log_level="warning", lifespan="on", timeout_graceful_shutdown=30)
    served = uvicorn.Server(config)

    def end(sig: int, frame: Any) -> None:
        served.should_exit = True

    # uvicorn's own function ends the process by the same signal afterwards, before the store is closed.
    served.handle_exit = end  # type: ignore[method-assign]
    await served.serve(sockets)
