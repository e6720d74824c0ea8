"""`keepwarm launch`: a coding agent on a warm server, which is started for it if none runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from types import FrameType
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

import typer

from keepwarm.cli import output
from keepwarm.cli.agents import AGENTS, Agent, Endpoint, Start, agent_of
from keepwarm.cli.options import EngineOptions, grouped, refuse
from keepwarm.errors import ConfigError, KeepwarmError
from keepwarm.models.places import model_id

_LOOKING = 0.2  # seconds between two looks at a server that starts
_ASKING = 10.0  # seconds for a short question to a server
_STOPPING = 30.0  # seconds until a server that does not end is killed
_TOLD = 15  # lines of the log that are shown if the server does not start
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # signals that ask this process to end
_LOCAL = ("127.0.0.1", "localhost", "::1")


@grouped
def launch(
    engine: EngineOptions,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help=f"One of {', '.join(AGENTS)}.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGUMENTS]...", help="Arguments of the agent: all that follows its name."),
    ] = None,
    url: Annotated[
        str, typer.Option("--url", help="The server. If none runs there, one is started, and stopped at the end.")
    ] = "http://127.0.0.1:8000",
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="The variable that holds the server's API key.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print what would run, without the key, and run nothing.")
    ] = False,
) -> None:
    """Run a coding agent on a Keepwarm server. Options come before AGENT; everything after it goes to the agent.

    If no server runs at --url, one is started with the model and settings given here, and stopped when the agent ends.
    The command ends with the agent's exit code.
    """
    chosen, address, key = agent_of(agent), _address(url), _key(api_key_env)
    served = _served(address, key, engine.model)
    if served is not None:
        _refuse_unused(engine, address, served)
    else:
        refuse(engine.source, engine.settings())
        _refuse_elsewhere(address)
    passed = tuple(arguments or ())
    if show:
        shown = "none" if api_key_env is None else f"<{api_key_env}>"
        model = model_id(engine.source) if served is None else served.model
        _print(chosen, Endpoint(address, model, shown), passed, _serve(engine, address, served))
        return
    program = shutil.which(chosen.program)
    if program is None:
        raise ConfigError(f"{chosen.program} is not installed: {chosen.install}")
    with _terminable(), _running(engine, address, key, served) as server:
        code = _run(program, chosen.start(server), passed)
    if code:
        raise typer.Exit(code)


# ---- what is asked for ----


def _address(url: str) -> str:
    """Return a server's address without `/v1`. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"--url must look like http://127.0.0.1:8000, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")


def _key(variable: str | None) -> str:
    if variable is None:
        return "none"
    if not os.environ.get(variable):
        raise ConfigError(f"--api-key-env names {variable}, which is not set")
    return os.environ[variable]


def _refuse_unused(engine: EngineOptions, address: str, served: Endpoint) -> None:
    """Raise ConfigError for options that would have no effect, because a server runs already."""
    unused = [f"--{name.replace('_', '-')}" for name in engine.given]
    if unused:
        raise ConfigError(
            f"a server runs at {address} already: {', '.join(unused)} apply only to a server that is started here"
        )
    if engine.model is not None and model_id(engine.model) != served.model:
        raise ConfigError(
            f"a server runs at {address} already, with the model {served.model!r}, not {model_id(engine.model)!r}: "
            "leave --model out, or name another --url"
        )


def _refuse_elsewhere(address: str) -> None:
    parts = urlsplit(address)
    if parts.hostname not in _LOCAL or parts.scheme != "http" or parts.path.strip("/"):
        raise ConfigError(f"no server answers at {address}, and one can be started only at http://127.0.0.1:PORT")


# ---- the server ----


class _Stays(HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Follow no redirect, because the key is meant for this address only."""


def _opener(address: str) -> OpenerDirector:
    """Return an opener for requests to a server. It uses no proxy for a server on this machine."""
    direct = [ProxyHandler({})] if urlsplit(address).hostname in _LOCAL else []
    return build_opener(_Stays, *direct)


def _get(address: str, path: str, key: str) -> Any:
    request = Request(f"{address}{path}", headers={"authorization": f"Bearer {key}"})
    with _opener(address).open(request, timeout=_ASKING) as response:
        return json.load(response)


def _served(address: str, key: str, wanted: str | None = None) -> Endpoint | None:
    """Return what a server offers: the model that is `wanted` if it serves that, else its first one. Return None if no
    server answers. Raises KeepwarmError for an unexpected answer."""
    try:
        names = [str(each["id"]) for each in _get(address, "/v1/models", key)["data"]]
        model = model_id(wanted) if wanted is not None and model_id(wanted) in names else names[0]
    except HTTPError as error:
        cure = "name its key with --api-key-env" if error.code in (401, 403) else "is it a model server?"
        raise KeepwarmError(f"the server at {address} answered {error.code}: {cure}") from None
    except (OSError, HTTPException):
        return None
    except (ValueError, KeyError, IndexError, TypeError):
        raise KeepwarmError(f"the program at {address} is no model server: name another --url") from None
    return Endpoint(address, model, key)


def _with_window(server: Endpoint) -> Endpoint:
    """Return the server with the number of tokens that a request may have, if it tells that (Keepwarm's does)."""
    try:
        window = _get(server.url, "/status", server.key).get("max_request_tokens")
    except (OSError, HTTPException, ValueError, AttributeError):
        window = None
    return Endpoint(server.url, server.model, server.key, window) if isinstance(window, int) else server


def _serve(engine: EngineOptions, address: str, served: Endpoint | None) -> list[str]:
    """Return the command that starts the server, or an empty one if a server runs."""
    if served is not None:
        return []
    parts = urlsplit(address)
    # -P: the current folder may be a stranger's checkout, and nothing may be imported from it
    command = [sys.executable, "-P", "-m", "keepwarm.cli", "serve", "--model", engine.source]
    command += ["--host", parts.hostname or "", "--port", str(parts.port or 80)]
    for name, value in engine.given.items():
        for each in value if isinstance(value, list) else [value]:
            command += [f"--{name.replace('_', '-')}", str(each)]
    return command


@contextmanager
def _running(engine: EngineOptions, address: str, key: str, served: Endpoint | None) -> Iterator[Endpoint]:
    """Yield a server. If none runs, start one, and stop it at the end. Raises KeepwarmError."""
    if served is not None:
        yield _with_window(served)
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        # The server gets its own session, so that Ctrl-C in the terminal reaches only the agent.
        child = subprocess.Popen(
            _serve(engine, address, served), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with output.working(f"starting a server with {engine.source}") as work:
                _await(child, address, log, work)
            found = _served(address, key)
            if found is None:
                raise KeepwarmError(f"the server at {address} stopped")
            yield _with_window(found)
        finally:
            _stop(child)


def _await(child: subprocess.Popen[bytes], address: str, log: Any, work: output.Work) -> None:
    """Wait until the server answers requests. Raises KeepwarmError, with the end of its log, if it ends before that."""
    while child.poll() is None:
        try:
            health = _get(address, "/health", "none")
        except (OSError, HTTPException, ValueError):
            health = {}
        if health.get("status") == "ready":
            return
        if progress := health.get("progress"):
            work.draw(f"starting a server: {progress}")
        time.sleep(_LOOKING)
    log.seek(0)
    told = "".join(log.readlines()[-_TOLD:]).strip()
    raise KeepwarmError(f"the server ended with code {child.returncode} before it was ready:\n{told}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    for number in _ENDING:  # a second signal must not leave the server running
        signal.signal(number, signal.SIG_IGN)
    child.terminate()
    try:
        child.wait(_STOPPING)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# ---- the agent ----


def _run(program: str, start: Start, passed: Sequence[str]) -> int:
    """Run the agent in this terminal, and return its exit code. The agent alone gets interrupts."""
    kept = {name: value for name, value in os.environ.items() if name not in start.removed}
    child = subprocess.Popen([program, *start.arguments, *passed], env={**kept, **start.environment})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        if child.poll() is None:  # this process was told to end
            _stop(child)
    return code if code >= 0 else 128 - code


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn requests to end (SIGTERM, a closed terminal) into SystemExit in the block, so that children are stopped."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(agent: Agent, server: Endpoint, passed: Sequence[str], serve: Sequence[str]) -> None:
    """Print the commands, as they could be typed."""
    if serve:
        print(f"{shlex.join(serve)} &")
    start = agent.start(server)
    for name in start.removed:
        print(f"unset {name}")
    for name, value in start.environment.items():
        print(f"export {name}={shlex.quote(value)}")
    print(shlex.join([agent.program, *start.arguments, *passed]))
