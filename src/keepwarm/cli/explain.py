"""`keepwarm explain`: what a prompt would reuse, and why not more. It runs nothing and stores nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepwarm.cli import output
from keepwarm.cli.options import EngineOptions, Json, grouped, open_engine
from keepwarm.cli.request import RequestOptions

if TYPE_CHECKING:
    from keepwarm.core.results import Explanation


@grouped
def explain(request: RequestOptions, engine: EngineOptions, as_json: Json = False) -> None:
    """Show a prompt's segments and cuts, what of it would be reused, and the first difference from what is stored."""
    asked = request.build()
    with open_engine(engine.model, engine.settings()) as loaded:
        explanation = loaded.explain(**asked)
    if as_json:
        output.print_json(explanation.to_dict())
    else:
        _print(explanation)


def _print(explanation: Explanation) -> None:
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
        fields.append(("difference", f"at token {difference.position:,}, in {difference.segment}: {difference.reason}"))
        fields.append(("", difference.detail))
        if difference.wanted or difference.stored:
            fields.append(("asked", repr(difference.wanted)))
            fields.append(("stored", repr(difference.stored)))
    output.print_fields(fields)
