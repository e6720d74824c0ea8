"""`keepwarm simulate`: what a cache would have found of a request trace, by capacity, policy and fleet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from keepwarm.checks import need
from keepwarm.cli import output
from keepwarm.cli.options import Json
from keepwarm.errors import ConfigError

_Name = TypeVar("_Name", bound=str)
_MATCHED = {
    "tokens": "matched up to the first token that differs, as the engine does where it computes by its own kernels",
    "blocks": "in whole blocks of the trace",
}


def simulate(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Mooncake's .jsonl, or coding-agent sessions (.json).")
    ],
    capacity: Annotated[
        str, typer.Option("--capacity", help="Sizes of the whole fleet's caches, in percent of the distinct blocks.")
    ] = "1,3,10,30,100",
    policy: Annotated[str, typer.Option("--policy", help="Of lru, lfu, s3fifo.")] = "lru,lfu,s3fifo",
    replicas: Annotated[str, typer.Option("--replicas", help="Numbers of replicas, up to a thousand.")] = "1",
    cache: Annotated[
        str, typer.Option("--cache", help="Of local (own caches, requests in turn), routed (by prefix), shared (one).")
    ] = "local,routed,shared",
    match: Annotated[
        str,
        typer.Option(
            "--match",
            help="tokens: up to the first token that differs, as the engine does; blocks: the trace's, whole.",
        ),
    ] = "tokens",
    copies: Annotated[
        int, typer.Option("--copies", min=1, help="Play the trace so many times at once, as crowds that share nothing.")
    ] = 1,
    together: Annotated[bool, typer.Option("--together", help="Merge all files into one trace, by time.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes that simulate.")] = 1,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the hit rates into this file (.png, .svg).")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Add a JSON line per replay to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Replay request traces through the real policies and index, with payloads that have only a size.

    The share of prompt tokens found is set beside Belady's optimum, which knows the future.
    """
    from keepwarm.evaluation.rates import plot as draw
    from keepwarm.evaluation.simulate import POLICIES, Fleet, Match, Outcome
    from keepwarm.evaluation.simulate import simulate as run
    from keepwarm.evaluation.traces import Trace

    if plot is not None:
        need("matplotlib", "plot", "a plot")
    shares = [_number(each, 100.0, "--capacity") / 100 for each in capacity.split(",")]
    counts = [int(_number(each, 1000.0, "--replicas")) for each in replicas.split(",")]
    policies = _chosen(policy, POLICIES, "--policy")
    fleets = _chosen(cache, get_args(Fleet), "--cache")
    if len(matches := _chosen(match, get_args(Match), "--match")) > 1:
        raise ConfigError("--match takes one of tokens, blocks")
    groups = [traces] if together else [[file] for file in traces]
    outcomes: list[Outcome] = []
    with output.working("reading the traces") as work:
        for group in groups:
            trace = Trace.read(*group, copies=copies)
            for done in run(
                trace, shares=shares, policies=policies, fleets=fleets, replicas=counts, match=matches[0], jobs=jobs
            ):
                outcomes.append(done)
                work.draw(f"{trace.name}: {len(outcomes)} replays done")
    if plot is not None:
        draw(outcomes, plot)
    if out is not None:
        with out.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(each.to_dict()) + "\n" for each in outcomes)
    if as_json:
        output.print_json({"outcomes": [each.to_dict() for each in outcomes]})
        return
    _print(outcomes)
    if plot is not None:
        output.note(f"drawn: {plot}")


def _print(outcomes: Sequence[object]) -> None:
    from keepwarm.evaluation.rates import label
    from keepwarm.evaluation.simulate import Outcome

    found = [each for each in outcomes if isinstance(each, Outcome)]
    shares = sorted({each.share for each in found})
    rates = {(each.trace, label(each), each.share): each.hit_rate for each in found}
    rows = [
        (trace, name, *(f"{100 * rates[trace, name, share]:.1f} %" for share in shares))
        for trace, name in dict.fromkeys((each.trace, label(each)) for each in found)
    ]
    headers = ("trace", "policy", *(f"{100 * share:g} %" for share in shares))
    output.print_table(headers, rows, right=tuple(range(2, 2 + len(shares))))
    requests = sum(each.requests for each in found)
    seconds = sum(each.seconds for each in found)
    output.note(
        f"share of prompt tokens found, {_MATCHED[found[0].match]}, by capacity in percent of the distinct blocks; "
        f"{requests:,} requests replayed, {requests / max(seconds, 1e-9):,.0f} per second and process"
    )


def _number(text: str, most: float, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise ConfigError(f"{option} takes numbers above 0 and up to {most:g}, with commas between, got {text!r}")
    return value


def _chosen(text: str, known: Sequence[_Name], option: str) -> list[_Name]:
    chosen = [each for name in text.split(",") for each in known if each == name.strip()]
    if len(chosen) != len(text.split(",")):
        raise ConfigError(f"{option} takes some of {', '.join(known)}, with commas between, got {text!r}")
    return chosen
