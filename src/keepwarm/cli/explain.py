"""`keepwarm explain`: what a prompt would reuse, and why not more. It runs nothing and stores nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from keepwarm.cli import output
from keepwarm.cli.diff import print_side_by_side
from keepwarm.cli.options import EngineOptions, Json, grouped, open_engine
from keepwarm.cli.request import RequestOptions
from keepwarm.core.changing import mend, place_of

_TEXTS = ("system", "tools", "message", "document")  # what a text that changes may stand in

if TYPE_CHECKING:
    from keepwarm.core.results import Explanation, Miss


@grouped
def explain(
    request: RequestOptions,
    engine: EngineOptions,
    session: Annotated[
        str | None,
        typer.Option("--session", "-s", help="Explain a turn of this session: PROMPT is what the user says next."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a prompt's segments, the part of it that would be reused, and the first difference from what is stored.

    For models that run through transformers, a cut is shown if reuse ends there.
    """
    asked = request.build() if session is None else request.turn(session)
    with open_engine(engine.source, engine.settings()) as loaded:
        if session is not None:
            loaded.sessions.show(session, request.salt)  # raises for an unknown name, and lists the known ones
        explanation = loaded.explain(**asked)
    if as_json:
        output.print_json(explanation.to_dict())
    else:
        print_explanation(explanation)


def print_explanation(explanation: Explanation) -> None:
    rows = [
        (str(part.kind), part.name or "-", f"{part.start:,}", f"{part.end:,}", f"{part.end - part.start:,}")
        for part in explanation.segments
    ]
    output.print_table(("segment", "name", "start", "end", "tokens"), rows, right=(2, 3, 4))
    print()
    fields = [
        *([("cuts", " ".join(f"{cut:,}" for cut in explanation.cuts))] if explanation.cuts else []),
        (
            "would reuse",
            f"{explanation.cached_tokens:,} of {explanation.prompt_tokens:,} tokens "
            f"({output.in_tiers(explanation.cached_by_tier)}), {explanation.exactness}",
        ),
        ("with prefix", f"{explanation.cached_prefix_tokens:,} tokens under --reuse prefix"),
    ]
    miss = explanation.miss
    if miss is None:
        fields.append(("miss", f"none: {_rest(explanation.prompt_tokens - explanation.cached_tokens)}"))
    else:
        fields.append(("miss", f"{_where(miss)}: {miss.reason}"))
        if miss.changed:
            fields.append(("changed", miss.changed))
        fields.append(("", miss.detail))
        if miss.lost_tokens:
            fields.append(("lost", _lost(miss)))
    found = None if miss is None or miss.changed not in _TEXTS else mend(miss.wanted, miss.stored)
    if found is not None:
        fields.append(("changes", f"{found.says}, as it looks: {found.text!r}"))
    output.print_fields(fields)
    if miss is not None and (miss.wanted or miss.stored):
        print_side_by_side(("stored", miss.stored), ("asked", miss.wanted))
    if miss is not None and found is not None and (place := place_of(miss.segment, miss.name)) is not None:
        print(f"\nA rule for `keepwarm serve` that would mend it:\n\n{found.rule(place)}")


def ended(miss: Miss | None, computed: int) -> str:
    """Say in one line where reuse of a prompt ended, and why. `computed` of its tokens were not reused."""
    return _rest(computed) if miss is None else f"reuse ended {_where(miss)}: {miss.reason}, {miss.detail}"


def _rest(computed: int) -> str:
    last = "token is" if computed == 1 else f"{computed:,} tokens are"
    return f"everything reusable is reused; the last {last} always computed"


def _where(miss: Miss) -> str:
    segment = f"{miss.segment} {miss.name}".rstrip()
    if miss.character is None:
        return f"at token {miss.position:,}, in {segment}"
    return f"at token {miss.position:,}, character {miss.character:,} of the prompt, {miss.in_segment:,} of {segment}"


def _lost(miss: Miss) -> str:
    took = "" if miss.lost_ms is None else f", about {output.in_ms(miss.lost_ms)} to compute"
    return f"{output.counted(miss.lost_tokens, 'token')} ({output.in_bytes(miss.lost_bytes)} of KV){took}"
