"""`keepwarm serve`, and what goes with it: API keys and the configuration."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.options import EngineOptions, Json, grouped
from keepwarm.errors import ConfigError

_SWITCH = 0.0005  # seconds until a thread must release the interpreter, so that the event loop does not wait

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")
config = typer.Typer(no_args_is_help=True, help="Look at the service's configuration.")

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with the service's settings.")]
KeysFile = Annotated[Path, typer.Option("--file", "-f", help="The keys file.")]


@dataclass(frozen=True)
class ServeOptions(EngineOptions):
    """Which models run, and over which store."""

    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A folder, a GGUF file, a hub id (owner/name, or owner/name:Q4_K_M for GGUF files), or 'demo' "
            "(SmolLM2-135M-Instruct). For several models NAME=PATH, repeated; the first one is loaded at start. "
            "[default: demo]",
        ),
    ] = None  # type: ignore[assignment]


@grouped
def serve(
    engine: ServeOptions,
    file: ConfigFile = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="0 takes a free one. [default: 8000]")] = None,
    keys_file: Annotated[Path | None, typer.Option("--keys-file", help="API keys; see `keepwarm keys`.")] = None,
    log_format: Annotated[str | None, typer.Option("--log-format", help="json or text.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="NAME=PATH: a LoRA adapter's folder. Requests choose it as model: NAME."),
    ] = None,
    warm_last: Annotated[
        int | None, typer.Option("--warm-last", help="Load or compute this many headers at start: those used last.")
    ] = None,
    model_memory: Annotated[
        str | None,
        typer.Option(
            "--model-memory",
            help="Byte cap of the weights of all loaded models, e.g. 16GiB. [default: three quarters of the memory]",
        ),
    ] = None,
) -> None:
    """Serve a model, or several, over HTTP: the native protocol, OpenAI's, Anthropic's and SGLang's. Options win over
    the environment (KEEPWARM__SECTION__NAME), that over the file."""
    overrides = {
        **_models(engine.model),
        "adapters": _adapters(adapter) if adapter else None,
        "server.model_memory": model_memory,
        "server.host": host,
        "server.port": port,
        "server.warm_last": warm_last,
        "log.format": log_format,
        "tenants.keys_file": None if keys_file is None else str(keys_file),
        **{f"engine.{name}": value for name, value in engine.given.items()},
    }
    settings = _loaded(file, overrides)
    try:
        from keepwarm.serving.app import Server
        from keepwarm.serving.observability import logs
    except ModuleNotFoundError as error:
        if (error.name or "keepwarm").partition(".")[0] == "keepwarm":
            raise
        raise ConfigError(f"the service needs more packages ({error.name}): pip install 'keepwarm[serve]'") from None
    server = Server(settings)
    logs.set_up(settings.log)
    sys.setswitchinterval(_SWITCH)
    asyncio.run(_run(server))
    if server.service.shared.failure is not None:
        raise server.service.shared.failure


def _models(given: list[str] | None) -> dict[str, Any]:
    """Return the settings that `--model` overrides. Raises ConfigError."""
    if not given:
        return {}
    named = [(name, path) for name, mark, path in (one.partition("=") for one in given) if mark and name and path]
    if len(given) == 1 and (not named or Path(given[0]).expanduser().exists()):
        return {"model": given[0]}
    if len(named) < len(given):
        plain = next(one for one in given if "=" not in one or one.startswith("=") or one.endswith("="))
        raise ConfigError(f"--model: several models have names: expected NAME=PATH for each, got {plain!r}")
    if len(dict(named)) < len(named):
        raise ConfigError(f"--model: two models have one name, of {', '.join(name for name, _ in named)}")
    return {"model": named[0][0], "models": dict(named)}


def _adapters(given: list[str]) -> dict[str, str]:
    """Return folders by name. Raises ConfigError."""
    pairs = [each.partition("=") for each in given]
    for each, (name, _, path) in zip(given, pairs, strict=True):
        if not name or not path:
            raise ConfigError(f"--adapter takes NAME=PATH, got {each!r}")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ConfigError(f"--adapter: two have one name, of {', '.join(name for name, _, _ in pairs)}")
    return {name: path for name, _, path in pairs}


async def _run(server: Any) -> None:
    """Serve until a signal. Print the address once it is known."""
    task = asyncio.ensure_future(server.serve(server.sockets))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    for listening in getattr(server, "servers", ()):
        for one in listening.sockets:
            host, port = one.getsockname()[:2]
            output.note(f"keepwarm serves http://{f'[{host}]' if ':' in host else host}:{port}")
    if server.started and not server.service.ready:
        output.note("The model is being loaded. Requests get 503 until that is done.")
    await task


def _loaded(file: Path | None, overrides: dict[str, Any] | None = None) -> Any:
    from keepwarm.serving.settings import ServeConfig

    return ServeConfig.load(file, overrides)


@config.command()
def check(file: ConfigFile = None, as_json: Json = False) -> None:
    """Check a configuration, with the environment applied, and print what is in force. Loads no model."""
    settings = _loaded(file)
    from keepwarm.config import EngineConfig
    from keepwarm.models.lora_folders import settings_of
    from keepwarm.serving.catalogue import Catalogue
    from keepwarm.serving.tenancy.keys import read_keys

    for folder in settings.adapters.values():
        settings_of(folder)
    Catalogue.read(settings.catalogue, EngineConfig.build(**settings.engine).tool_order)
    if settings.tenants.keys_file is not None:
        read_keys(settings.tenants.keys_file)
    if as_json:
        output.print_json(settings.model_dump(mode="json"))
        return
    rows = []
    for section, value in settings.model_dump(mode="json").items():
        if isinstance(value, dict):
            rows += [(f"{section}.{name}", str(item)) for name, item in value.items()]
        else:
            rows.append((section, str(value)))
    output.print_fields(rows)


@keys.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Whose key it is.")],
    file: KeysFile,
    admin: Annotated[bool, typer.Option("--admin", help="May read metrics and the whole status.")] = False,
    limit: Annotated[
        list[str] | None, typer.Option("--limit", help="NAME=NUMBER, such as tokens_per_day=100000.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an API key. It is shown this once; the file keeps its hash."""
    from keepwarm.serving.tenancy.keys import add_key

    limits = {}
    for given in limit or ():
        name, _, number = given.partition("=")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"a limit looks like tokens_per_day=100000, got {given!r}")
        limits[name] = int(number)
    key, text = add_key(file, tenant, admin=admin, limits=limits)
    if as_json:
        output.print_json({"id": key.id, "tenant": key.tenant, "admin": key.admin, "limits": key.limits, "key": text})
        return
    print(text)
    output.note(f"key {key.id} of {key.tenant}; this is the only time it is shown")


@keys.command(name="list")
def list_keys(file: KeysFile, as_json: Json = False) -> None:
    """Show the keys' ids, tenants and limits."""
    from keepwarm.serving.tenancy.keys import read_keys

    found = read_keys(file).keys
    if as_json:
        output.print_json([
            {"id": k.id, "tenant": k.tenant, "admin": k.admin, "created": k.created, "limits": k.limits} for k in found
        ])
        return
    rows = [
        (
            k.id,
            k.tenant,
            "yes" if k.admin else "",
            output.in_time(k.created),
            " ".join(f"{n}={v}" for n, v in k.limits.items()),
        )
        for k in found
    ]
    output.print_table(("id", "tenant", "admin", "created", "limits"), rows)


@keys.command()
def revoke(number: Annotated[str, typer.Argument(metavar="ID", help="The key's id.")], file: KeysFile) -> None:
    """Forget a key. A running service refuses it within a second; what its tenant stored stays."""
    from keepwarm.serving.tenancy.keys import revoke_key

    key = revoke_key(file, number)
    output.note(f"key {key.id} of {key.tenant} is revoked")
