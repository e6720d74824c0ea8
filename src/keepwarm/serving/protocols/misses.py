"""Say why no more of an answer's prompt was reused: in full, in numbers, in the vendors' words.

All of it comes from the one record that was made with the answer's plan (`Generation.miss`).
"""

from __future__ import annotations

from typing import Any

from keepwarm.core.changing import mend, place_of
from keepwarm.core.results import Generation, Miss
from keepwarm.core.sides import Parts, sides
from keepwarm.core.spans import MissReason


def shown(miss: Miss | None) -> dict[str, Any] | None:
    """Return the whole record, with both texts in pieces that show what differs."""
    if miss is None:
        return None
    stored, wanted = sides(miss.stored, miss.wanted)
    return miss.to_dict() | {"stored_parts": _closed(stored, wanted), "wanted_parts": _closed(wanted, stored)}


def mended(miss: Miss | None) -> dict[str, Any] | None:
    """Return what changes where reuse ended, if its look is known, with the rule that would mend it."""
    found = None if miss is None or miss.reason != MissReason.TOKENS else mend(miss.wanted, miss.stored)
    if miss is None or found is None or (place := place_of(miss.segment, miss.name)) is None:
        return None
    told = {"kind": found.kind, "says": found.says, "text": found.text, "tokens": miss.lost_tokens}
    return told | {"rule": found.rule(place)}


def _closed(parts: Parts, other: Parts) -> Parts:
    """Unmark what only one text has at its end: both have equally many tokens, so it may follow in the other one."""
    earlier = any(differs for _, differs in (*parts[:-1], *other))
    if earlier and parts and parts[-1][1] and other and not other[-1][1]:
        return [*parts[:-1], (parts[-1][0], False)]
    return parts


def reason(result: Generation) -> str:
    """One word: a `MissReason`."""
    return MissReason.NONE.value if result.miss is None else result.miss.reason


def numbers(result: Generation) -> dict[str, Any]:
    """An answer in numbers and names, without any text of a prompt: for logs and charts."""
    miss = result.miss
    return {
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "cached_by_tier": result.cached_by_tier,
        "completion_tokens": len(result.token_ids),
        "ttft_ms": round(result.ttft_ms, 3),
        "total_ms": round(result.total_ms, 3),
        "timings": {name: round(value, 3) for name, value in result.timings.items()},
        "exactness": result.exactness,
        "miss_reason": reason(result),
        "miss_position": None if miss is None else miss.position,
        "miss_segment": None if miss is None else miss.segment,
        "missed_tokens": missed_tokens(result),
    }


def missed_tokens(result: Generation) -> int:
    """Return how many tokens were computed again, or would be shared except for what differs."""
    return 0 if result.miss is None else result.miss.lost_tokens


def openai(result: Generation) -> dict[str, Any]:
    """Return OpenAI's `prompt_cache_diagnostics`. Where OpenAI has no word for a reason, it is ours."""
    miss = result.miss
    if miss is None or (miss.reason == MissReason.NEW and result.cached_tokens):
        return {"type": "cache_hit"}
    words = {MissReason.MODEL: "model_changed", MissReason.TOKENS: "input_changed"}
    told = words.get(MissReason(miss.reason), miss.reason)
    if miss.changed == "tools":
        told = "tools_changed"
    return {"type": "cache_miss", "reason": told, "cache_missed_tokens": miss.lost_tokens}
