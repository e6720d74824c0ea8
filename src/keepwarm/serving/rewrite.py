"""Rules that move or fix what changes in every request, so that what stands behind it is found in the cache.

A rule changes texts before they are rendered, for every protocol. Nothing is changed unless the operator's
configuration says so, and each answer tells what was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import regex  # type: ignore[import-untyped]  # its matching takes a time limit, which that of `re` does not

from keepwarm.core.deadline import go_on
from keepwarm.serving.settings import RewriteRule

log = logging.getLogger(__name__)

_SECONDS = 1.0  # that one rule may search the texts of one request
_VALUES = ("const", "default", "enum", "example", "examples")  # in a schema
_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # have names as their keys
_Change = Callable[[str, str], str]  # of a text in one kind of place

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Applied:
    """What a rule did in one kind of place of a request; `count` 0: it took too long, and did nothing there."""

    rule: str
    where: str
    count: int

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {"rule": self.rule, "where": self.where, "count": self.count}
        return told if self.count else told | {"too_slow": True}


class Rewriting:
    """The rules of a service, in their order. Threads may share it."""

    def __init__(self, rules: Sequence[RewriteRule]) -> None:
        self._rules = [(rule, regex.compile(rule.pattern)) for rule in rules]
        self._counts: Counter[tuple[str, str]] = Counter()  # by rule and place, or "too_slow"
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._rules)

    def apply(self, arguments: Arguments) -> tuple[Arguments, tuple[Applied, ...]]:
        """Return arguments of `Engine.generate` with all rules applied, and what was done. The given ones stay. Raises
        TookTooLong."""
        done: list[Applied] = []
        for rule, pattern in self._rules:
            go_on()
            arguments, found = _by_rule(rule, pattern, arguments)
            done += found
        with self._lock:
            for one in done:
                self._counts[one.rule, one.where if one.count else "too_slow"] += one.count or 1
        return arguments, tuple(done)

    def described(self) -> list[dict[str, Any]]:
        """Return the rules with what they have done since the service started."""
        with self._lock:
            counts = dict(self._counts)
        return [
            {
                "name": rule.name,
                "action": rule.action,
                "where": list(rule.where),
                "changed": {where: counts.get((rule.name, where), 0) for where in rule.where},
                "too_slow": counts.get((rule.name, "too_slow"), 0),
            }
            for rule, _ in self._rules
        ]


def _by_rule(rule: RewriteRule, pattern: Any, arguments: Arguments) -> tuple[Arguments, list[Applied]]:
    """Apply one rule as a whole, or not at all where it takes too long or has nowhere to move a text to."""
    until = time.monotonic() + _SECONDS
    moved: list[str] = []
    counts: Counter[str] = Counter()

    def take(where: str, match: Any) -> str:
        if not match.group():  # a place between two characters, as look-arounds match it
            return ""
        counts[where] += 1
        moved.append(match.group())
        return rule.text or ""

    def change(where: str, text: str) -> str:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return str(pattern.sub(partial(take, where), text, timeout=left, concurrent=True))

    try:
        changed = _changed(arguments, rule.where, change)
    except TimeoutError:
        log.warning("the rule %r took longer than %g s and is left out of a request", rule.name, _SECONDS)
        return arguments, [Applied(rule.name, where, 0) for where in rule.where[:1]]
    if not counts:
        return arguments, []
    if rule.action == "move":
        messages = _with_end(changed["messages"], moved)
        if messages is None:
            return arguments, []
        changed["messages"] = messages
    return changed, [Applied(rule.name, where, count) for where, count in counts.items()]


def _changed(arguments: Arguments, where: Sequence[str], change: _Change) -> dict[str, Any]:
    found = dict(arguments)
    if "tools" in where and arguments.get("tools"):
        found["tools"] = [_described(tool, partial(change, "tools")) for tool in arguments["tools"]]
    places = dict(_places(arguments.get("messages") or ()))
    if any(place in where for place in places.values()):
        found["messages"] = [
            _said(message, partial(change, places[number])) if places.get(number) in where else message
            for number, message in enumerate(arguments["messages"])
        ]
    return found


def _places(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the numbers of the messages that rules may change, each with what it is."""
    first = next((number for number, message in enumerate(messages) if message.get("role") == "user"), None)
    for number, message in enumerate(messages):
        if number == first:
            yield number, "first_user"
        elif message.get("role") in ("system", "developer"):
            yield number, "system"
        elif message.get("role") == "tool":
            yield number, "tool_results"


def _said(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        parts = [
            {**part, "text": change(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
        return {**message, "content": parts}
    return dict(message)


def _described(value: Any, change: Callable[[str], str], *, named: bool = False) -> Any:
    """Return a tool with its descriptions changed: names and values are what calls are checked against. `named`: the
    keys are names that the tool gives."""
    if isinstance(value, list):
        return [_described(each, change) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, each in value.items():
        if not named and name == "description" and isinstance(each, str):
            found[name] = change(each)
        elif not named and name in _VALUES:
            found[name] = each
        else:
            found[name] = _described(each, change, named=not named and name in _NAMES)
    return found


def _with_end(messages: Sequence[Mapping[str, Any]], moved: Sequence[str]) -> list[Mapping[str, Any]] | None:
    """Return the messages with texts at the end of the last user message; None if there is no such message."""
    last = next((n for n in range(len(messages) - 1, -1, -1) if messages[n].get("role") == "user"), None)
    if last is None:
        return None
    text = "\n".join(each.strip() for each in moved)
    content = messages[last].get("content")
    whole = (
        [*content, {"type": "text", "text": f"\n\n{text}"}]
        if isinstance(content, list)
        else f"{content or ''}\n\n{text}"
    )
    return [*messages[:last], {**messages[last], "content": whole}, *messages[last + 1 :]]
