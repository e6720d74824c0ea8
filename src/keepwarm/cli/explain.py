"""`keepwarm explain`: what a prompt would reuse, and why not more. It runs nothing and stores nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepwarm.cli import output
from keepwarm.cli.diff import print_side_by_side
from keepwarm.cli.options import EngineOptions, Json, grouped, open_engine
from keepwarm.cli.request import RequestOptions

if TYPE_CHECKING:
    from keepwarm.core.results import Difference, Explanation


@grouped
def explain(request: RequestOptions, engine: EngineOptions, as_json: Json = False) -> None:
    """Show a prompt's segments and cuts, what of it would be reused, and the first difference from what is stored."""
    asked = request.build()
    with open_engine(engine.model, engine.settings()) as loaded:
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
        ("cuts", " ".join(f"{cut:,}" for cut in explanation.cuts)),
        (
            "would reuse",
            f"{explanation.cached_tokens:,} of {explanation.prompt_tokens:,} tokens "
            f"({output.in_tiers(explanation.cached_by_tier)}), {explanation.exactness}",
        ),
        ("with prefix", f"{explanation.cached_prefix_tokens:,} tokens under --reuse prefix"),
    ]
    difference = explanation.difference
    if difference is None:
        fields.append(("difference", "none: everything reusable would be reused"))
    else:
        fields.append(("difference", f"{_where(difference)}: {difference.reason}"))
        if difference.changed:
            fields.append(("changed", difference.changed))
        fields.append(("", difference.detail))
        if difference.lost_blocks:
            fields.append(("lost", _lost(difference)))
    output.print_fields(fields)
    if difference is not None and (difference.wanted or difference.stored):
        print_side_by_side(("stored", difference.stored), ("asked", difference.wanted))


def _where(difference: Difference) -> str:
    segment = f"{difference.segment} {difference.name}".rstrip()
    if difference.character is None:
        return f"at token {difference.position:,}, in {segment}"
    return (
        f"at token {difference.position:,}, character {difference.character:,} of the prompt, "
        f"{difference.in_segment:,} of {segment}"
    )


def _lost(difference: Difference) -> str:
    took = "" if difference.lost_ms is None else f", about {output.in_ms(difference.lost_ms)} to compute"
    blocks = output.counted(difference.lost_blocks, "block")
    return f"{blocks} of {difference.lost_tokens:,} tokens ({output.in_bytes(difference.lost_bytes)} of KV){took}"
