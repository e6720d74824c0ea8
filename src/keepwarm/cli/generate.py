"""`keepwarm run` and `keepwarm warm`."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepwarm.cli import fleet, output
from keepwarm.cli.explain import ended
from keepwarm.cli.options import EngineOptions, Json, MaxNewTokens, grouped, open_engine
from keepwarm.cli.request import RequestOptions, refuse_call
from keepwarm.config import Reuse

if TYPE_CHECKING:
    from keepwarm.core.results import Generation
    from keepwarm.engine import Engine


@grouped
def run(
    request: RequestOptions,
    engine: EngineOptions,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Sample from the k likeliest tokens.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="Above 1, repeat less.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the answer before this text; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Report a digest of every step's logits.")] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt, reusing what is stored, and store what was new."""
    asked = request.build()
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "seed": seed,
    }
    call = asked | sampling | {"max_new_tokens": max_new_tokens, "trace": trace}
    refuse_call(call)
    with open_engine(engine.source, engine.settings()) as loaded:
        result = _answer(loaded, call) if as_json else _stream(loaded, call)
    if as_json:
        output.print_json(result.to_dict())


def _answer(engine: Engine, call: dict[str, Any]) -> Generation:
    with output.working("answering"):
        return engine.generate(**call)


def _stream(engine: Engine, call: dict[str, Any]) -> Generation:
    pieces = engine.stream(**call)
    with output.working("reading the prompt"):
        piece = next(pieces)
    result = piece.result
    print(piece.text, end="", flush=True)
    kept = "" if engine.pipeline.config.reuse is Reuse.OFF else "the prompt's KV is kept, the answer is not"
    with output.resumable(lambda: kept), closing(pieces):  # closed before the engine is, so that the KV is stored
        for piece in pieces:
            print(piece.text, end="", flush=True)
            result = piece.result or result
    print(flush=True)
    assert result is not None, "the last piece of a stream carries the result"
    output.note(summary(result))
    output.note(ended(result.miss, result.prompt_tokens - result.cached_tokens))
    if result.logits_digest:
        output.note(f"logits {result.logits_digest}")
    return result


def summary(result: Generation) -> str:
    """One line: what was asked, what was reused, how long it took, and how exact it is."""
    return (
        f"[{result.prompt_tokens:,} prompt tokens, cached: {output.in_tiers(result.cached_by_tier)} | "
        f"first token after {output.in_ms(result.ttft_ms)} | "
        f"{len(result.token_ids):,} tokens at {result.tokens_per_sec:.1f}/s{drafted(result)}, {result.finish_reason} | "
        f"{result.exactness}]"
    )


def drafted(result: Generation) -> str:
    """How many drafted tokens were right, behind a comma; nothing if there were none."""
    return f", {result.accepted_tokens:,} of them drafted" if result.accepted_tokens else ""


@grouped
def warm(
    request: RequestOptions,
    engine: EngineOptions,
    name: Annotated[str | None, typer.Option("--name", help="A name for it, shown by `keepwarm ls`.")] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="Bring it to this remote tier, too; fails unless it arrived."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute a prompt's KV ahead of the first question, and store it.

    With --to it is compiled once for a fleet: every replica that has the same model and names that remote is hot.
    """
    asked = request.build()
    settings = engine.settings()
    if to is not None:
        settings["remote"] = [*dict.fromkeys((*settings.get("remote", ()), to))]
    with open_engine(engine.source, settings) as loaded, output.working("reading the prompt"):
        report = loaded.warm(**asked, name=name)
        loaded.flush()
        arrived = [] if to is None else fleet.arrived(loaded, asked)
    if as_json:
        output.print_json(asdict(report) | {"name": name or "", "store": settings["store"], "remotes": arrived})
        return
    print(
        f"{report.tokens:,} tokens are warm: {report.reused_tokens:,} were stored already, "
        f"{output.counted(report.new_blocks, 'block')} new, {report.seconds:.2f} s"
    )
    if report.shared_tokens < report.tokens:
        print(
            f"a longer prompt goes on from token {report.shared_tokens:,}: this model computes in steps. Given as "
            "--system or --document, all of the text is reused"
        )
    for each in arrived:
        print(f"all of them are in {each['where']}")
    sys.stdout.flush()
