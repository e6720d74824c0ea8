"""Edits that would let more of a prompt be reused, each as a change of prompts that a replay can measure.

What changes on every request is replaced by a fixed mark and put at the prompt's end, so that no edit makes a prompt
shorter.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from keepwarm.core.changing import CHANGING, IDS, TIMES
from keepwarm.core.tools import canonical_schema
from keepwarm.lint.log import ANTHROPIC
from keepwarm.lint.prompt import (
    LONG_TTL,
    MESSAGE,
    SCHEMA,
    SETTINGS,
    SHORT_TTL,
    SYSTEM,
    TOOLS,
    Part,
    Prompt,
    as_sent,
    estimated_tokens,
)
from keepwarm.lint.replay import common_length

TAIL = "tail"  # what was moved to a prompt's end
_MARK = "#"  # in place of what was moved

EXACT_TIME = re.compile(r"\d{1,2}:\d{2}|\b1[5-9]\d{8}")
_NOW = re.compile(r"\b(?:today|now|current(?:ly)?|date|time)\b", re.IGNORECASE)
_SPACES = re.compile(r"[ \t\r]+(?=\n|\Z)|\s+\Z")
_LONGEST_CHANGE = 200  # characters of a header that may differ to count as one changing value
_SHARE = 0.8  # of a header's text that must stay the same around it


@dataclass(frozen=True)
class Edit:
    """One kind of edit. `apply` changes all prompts of a log at once, in their order."""

    kind: str
    advice: str
    apply: Callable[[Sequence[Prompt]], list[Prompt]]


def _masked(pattern: re.Pattern[str]) -> Callable[[Sequence[Prompt]], list[Prompt]]:
    def apply(prompts: Sequence[Prompt]) -> list[Prompt]:
        known: dict[str, tuple[str, list[str]]] = {}
        result = []
        for prompt in prompts:
            parts, moved = [], []
            for part in prompt.parts:
                if part.text not in known:
                    taken: list[str] = []
                    known[part.text] = pattern.sub(partial(_take, taken), part.text), taken
                text, found = known[part.text]
                if found and part.kind != TAIL:
                    moved += found
                    part = replace(part, text=text)
                parts.append(part)
            result.append(prompt.with_parts((*parts, *_tail(prompt, moved))))
        return result

    return apply


def _take(taken: list[str], match: re.Match[str]) -> str:
    taken.append(match.group())
    return _MARK


def _tail(prompt: Prompt, moved: Sequence[str]) -> Iterator[Part]:
    if moved:
        yield Part(TAIL, "moved to the end", f"{prompt.line} " + " ".join(moved))


def _each(change: Callable[[Prompt], Prompt]) -> Callable[[Sequence[Prompt]], list[Prompt]]:
    return lambda prompts: [change(prompt) for prompt in prompts]


def _sorted_keys(prompt: Prompt) -> Prompt:
    parts = []
    for part in prompt.parts:
        text = canonical_text(part.text, part.kind in (TOOLS, SCHEMA))
        spared = max(0, estimated_tokens(part.text) - estimated_tokens(text))  # white space is not this edit's gain
        parts.append(replace(part, text=text, opaque=part.opaque + spared))
    return prompt.with_parts(parts)


def _sorted_tools(prompt: Prompt) -> Prompt:
    tools = [part for part in prompt.parts if part.kind == TOOLS]
    rest = tuple(part for part in prompt.parts if part.kind != TOOLS)
    ttl = max((part.ttl for part in tools), default=0.0)  # a breakpoint stays at the tools' end
    ordered = [replace(part, ttl=0.0) for part in sorted(tools, key=lambda part: (part.name, part.text))]
    if ordered:
        ordered[-1] = replace(ordered[-1], ttl=ttl)
    return prompt.with_parts((*ordered, *rest))


def _without_trailing_spaces(prompt: Prompt) -> Prompt:
    return prompt.with_parts(
        tuple(part if part.kind == TOOLS else replace(part, text=_SPACES.sub("", part.text)) for part in prompt.parts)
    )


def _one_header(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give system prompts and tools that differ in only one short place the first one's text there."""
    known: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    result = []
    for prompt in prompts:
        parts, moved = [], []
        for part in prompt.parts:
            if part.kind in (SYSTEM, TOOLS):
                bases = known[prompt.vendor, prompt.model, part.kind, part.name]
                base = next((text for text in bases if text == part.text or _nearly(text, part.text)), None)
                if base is None:
                    bases.append(part.text)
                elif base != part.text:
                    moved.append(part.text[slice(*_middle(base, part.text))])
                    part = replace(part, text=base)
            parts.append(part)
        result.append(prompt.with_parts((*parts, *_tail(prompt, [text for text in moved if text.strip()]))))
    return result


def _middle(base: str, text: str) -> tuple[int, int]:
    """The range of `text` that differs from `base`."""
    start = common_length(base, text)
    end = common_length(base[start:][::-1], text[start:][::-1])
    return start, len(text) - end


def _nearly(base: str, text: str) -> bool:
    start, end = _middle(base, text)
    changed = max(end - start, len(base) - len(text) + end - start)
    return changed <= _LONGEST_CHANGE and changed <= (1 - _SHARE) * max(len(base), len(text))


def _with_breakpoints(prompt: Prompt) -> Prompt:
    """Set breakpoints after the tools, after the system prompt and at the end, where a request declares none."""
    if prompt.vendor != ANTHROPIC or any(part.ttl for part in prompt.parts) or prompt.automatic:
        return prompt
    ends = {kind: place for place, part in enumerate(prompt.parts) for kind in (part.kind,) if kind in (TOOLS, SYSTEM)}
    last = max((place for place, part in enumerate(prompt.parts) if part.kind == MESSAGE), default=None)
    points = {*ends.values(), *(() if last is None else (last,))}
    return prompt.with_parts(
        tuple(replace(part, ttl=SHORT_TTL) if place in points else part for place, part in enumerate(prompt.parts))
    )


def _longer(prompt: Prompt) -> Prompt:
    if prompt.vendor != ANTHROPIC:
        return replace(prompt, retention=24 * LONG_TTL)
    parts = tuple(replace(part, ttl=LONG_TTL) if part.ttl else part for part in prompt.parts)
    return replace(prompt.with_parts(parts), automatic=LONG_TTL if prompt.automatic else 0.0)


def _one_setting(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [prompt.with_parts(tuple(p for p in prompt.parts if p.kind != SETTINGS)) for prompt in prompts]


EDITS: tuple[Edit, ...] = (
    Edit("timestamp", "move dates and times out of the head, into the last user message", _masked(TIMES)),
    Edit("random_id", "move ids and nonces out of the head, or leave them out", _masked(IDS)),
    *(
        Edit(each.kind, f"move {each.says} out of the head, or leave it out", _masked(each.look))
        for each in CHANGING
        if each.kind not in ("timestamp", "random_id")
    ),
    Edit("key_order", "only the order of keys differs: write them in one order every time", _each(_sorted_keys)),
    Edit("tool_order", "only the order of the tools differs: send them in one order every time", _each(_sorted_tools)),
    Edit("trailing_whitespace", "strip white space at the ends of lines and texts", _each(_without_trailing_spaces)),
    Edit("changing_value", "move the value that changes in the system prompt or tools behind it", _one_header),
    Edit("changing_settings", "keep tool_choice and thinking the same within a conversation", _one_setting),
    Edit("cache_key", "use one prompt_cache_key where requests begin alike", _each(lambda p: replace(p, key=""))),
    Edit("no_breakpoint", "mark tools, system prompt and last message with cache_control", _each(_with_breakpoints)),
    Edit("ttl", 'ask for a longer life: cache_control ttl "1h", prompt_cache_retention "24h"', _each(_longer)),
)


def looks_current(text: str, match: re.Match[str]) -> bool:
    """Whether a date or time looks like the request's own: it has a time of day, or follows a word like now."""
    around = text[max(0, match.start() - 48) : match.start()]
    return bool(EXACT_TIME.search(match.group())) or bool(_NOW.search(around))


@lru_cache(maxsize=1 << 12)
def canonical_text(text: str, schemas: bool = False) -> str:
    """Return the text with the keys of every JSON object in it sorted; other text stays as it is. With `schemas` the
    objects are schemas, and arrays that are sets (`required`) are sorted, too."""
    decoder, result, at = json.JSONDecoder(), [], 0
    tried = 0
    while (begin := text.find("{", at)) >= 0 and tried < 256:  # a bound for texts full of braces
        tried += 1
        result.append(text[at:begin])
        try:
            value, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            result.append("{")
            at = begin + 1
            continue
        result.append(as_sent(canonical_schema(value) if schemas else _canonical(value)))
        at = end
    return "".join(result) + text[at:]


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(value[key]) for key in sorted(value)}
    return [_canonical(item) for item in value] if isinstance(value, list) else value
