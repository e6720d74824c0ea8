"""`keepwarm prove --url`: checks whether a running server gives the same answers no matter how it got its KV."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.cli import output
from keepwarm.cli.options import EngineOptions
from keepwarm.cli.phases import PROOF_FAILED
from keepwarm.cli.request import RequestOptions
from keepwarm.errors import ConfigError, KeepwarmError

if TYPE_CHECKING:
    from keepwarm.evaluation.exactness.checks import Asked, Check, Checks
    from keepwarm.evaluation.exactness.server import Server

_STARTING = 600.0  # seconds that a server may take to be ready; vLLM compiles while it starts
_PRESENT = 5.0  # seconds that a server may take that should run already


@dataclass(frozen=True)
class ServerOptions:
    """Which server `prove` asks, instead of loading a model."""

    url: Annotated[
        str | None, typer.Option("--url", help="Ask this OpenAI-compatible server instead of loading a model.")
    ] = None
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="With --url: completions or chat. [default: completions]")
    ] = None
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="With --url: the variable that holds an API key.")
    ] = None
    restart_command: Annotated[
        str | None,
        typer.Option("--restart-command", help="With --url: restarts the server; the prompts are then asked again."),
    ] = None
    save: Annotated[
        Path | None, typer.Option("--save", help="With --url: write prompts and answers to a file, for --compare.")
    ] = None
    compare: Annotated[
        Path | None, typer.Option("--compare", help="With --url: only ask the prompts of a saved file again.")
    ] = None

    def refuse_without_url(self) -> None:
        """Raise ConfigError for options that mean nothing without --url."""
        if self.url is None and (given := _given(self)):
            raise ConfigError(f"{', '.join(given)} belong to --url: without it, a model is loaded and compared here")


def prove_server(
    asked: ServerOptions, request: RequestOptions, engine: EngineOptions, new_tokens: int, as_json: bool
) -> None:
    """Run the checks against a server, print them, and end with PROOF_FAILED if one fails. Raises KeepwarmError."""
    if given := [*_given(request, "prompt"), *_given(engine, "model")]:
        raise ConfigError(f"{', '.join(given)} belong to a model that is loaded here: with --url leave them out")
    if asked.compare is not None and (asked.save is not None or asked.restart_command is not None):
        raise ConfigError("--compare asks only the saved prompts again: leave --save and --restart-command out")
    server = _server(asked, engine)
    before = None if asked.compare is None else _read(asked.compare, server)
    if asked.save is not None and not asked.save.expanduser().parent.is_dir():
        raise ConfigError(f"there is no folder for --save {asked.save}")
    checks: list[Check] = []
    with output.working(f"asking {asked.url}") as work:
        server.ready(_PRESENT if before is None else _STARTING)
        proof = _proof(server, new_tokens, request, work)
        checks += _run(proof, server, asked, before, work)
    if asked.save is not None:
        _write(asked.save, server, proof.asked)
    _report(server, checks, as_json)
    if not all(check.passed for check in checks):
        raise typer.Exit(PROOF_FAILED)


def _server(asked: ServerOptions, engine: EngineOptions) -> Server:
    from keepwarm.evaluation.exactness.server import Server

    key = ""
    if asked.api_key_env is not None:
        key = os.environ.get(asked.api_key_env, "")
        if not key:
            raise ConfigError(f"--api-key-env names {asked.api_key_env}, which is not set")
    assert asked.url is not None
    return Server(asked.url, engine.model, asked.endpoint or "completions", key)  # type: ignore[arg-type]


def _proof(server: Server, new_tokens: int, request: RequestOptions, work: output.Work) -> Checks:
    from keepwarm.evaluation.exactness.checks import TEXT, Checks

    return Checks(server, new_tokens, request.text() or TEXT, work.say)


def _run(
    proof: Checks, server: Server, asked: ServerOptions, before: Asked | None, work: output.Work
) -> Iterator[Check]:
    if before is not None:
        yield proof.again(before, "asked again later")
        return
    yield from proof.all()
    if asked.restart_command is not None:
        work.say("restarting the server")
        done = subprocess.run(asked.restart_command, shell=True, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise KeepwarmError(f"--restart-command ended with code {done.returncode}")
        server.ready(_STARTING)
        yield proof.again(proof.asked, "after a restart")


def _report(server: Server, checks: Sequence[Check], as_json: bool) -> None:
    proved = all(check.passed for check in checks)
    logprobs = "logprobs" in server.takes
    if as_json:
        output.print_json({
            "model": server.model,
            "endpoint": server.endpoint,
            "takes": sorted(server.takes),
            "equal": proved,
            "checks": [check.to_dict() for check in checks],
        })
        return
    rows = [_row(check) for check in checks]
    headers = ("check", "against", "same tokens", "equal", "largest difference", "cached", "TTFT against", "TTFT")
    output.print_table(headers, rows, right=(6, 7))
    for check in checks:
        if check.left_out:
            output.note(f"{check.name}: {output.counted(check.left_out, 'prompt')} left out: {check.why}")
    compared = "tokens and log-probabilities" if logprobs else "texts (the server reports no log-probabilities)"
    print(f"\n{'All' if proved else 'Not all'} {compared} are equal{_reused(checks)}.")


def _reused(checks: Sequence[Check]) -> str:
    """Return the text to add to a verdict if nothing shows that KV was reused."""
    cached = [check.cached for check in checks if check.cached is not None]
    if not cached:
        return "; the server does not tell whether it reused anything"
    return "" if any(tokens for tokens, _ in cached) else "; the server reused nothing"


def _row(check: Check) -> tuple[str, ...]:
    cached, ttft = check.cached, check.ttft_ms
    return (
        check.name,
        check.against,
        f"{check.same_tokens} of {len(check.pairs)}",
        f"{check.equal} of {len(check.pairs)}",
        "-" if check.difference is None else f"{check.difference or 0:.3g}",
        "not told" if cached is None else f"{cached[0]:,} of {cached[1]:,}",
        "-" if ttft is None else output.in_ms(ttft[0]),
        "-" if ttft is None else output.in_ms(ttft[1]),
    )


def _write(file: Path, server: Server, asked: Asked) -> None:
    saved = {"model": server.model, "endpoint": server.endpoint} | asked.to_dict()
    try:
        file.expanduser().write_text(json.dumps(saved, indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from None
    output.note(f"saved in {file}; after a restart: keepwarm prove --url ... --compare {file}")


def _read(file: Path, server: Server) -> Asked:
    from keepwarm.evaluation.exactness.checks import Asked

    try:
        saved = json.loads(file.expanduser().read_text(encoding="utf-8"))
        asked = Asked.from_dict(saved)
        model, endpoint = str(saved["model"]), saved["endpoint"]
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, ArithmeticError):
        raise ConfigError(f"{file} is not what `keepwarm prove --url ... --save` writes") from None
    if endpoint != server.endpoint:
        raise ConfigError(f"{file} was saved with --endpoint {endpoint}: give the same")
    server.model = server.model or model
    return asked


def _given(options: Any, *but: str) -> list[str]:
    """Return the options of a group that are given, as they are typed."""
    return [
        f"--{field.name.replace('_', '-')}"
        for field in fields(options)
        if field.name not in but and getattr(options, field.name) not in (None, False, [])
    ]
