"""Tool calls in an answer's text, in the forms that model families write.

A call is read as JSON from its beginning; its end is never searched for, so a tag inside an argument is part of that
argument. An incomplete call is text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from keepwarm.core.tools import ToolCall

# (text, names of the listed tools or None) -> calls in order; none where the form is not used
Form = Callable[[str, Collection[str] | None], list[ToolCall]]


@dataclass(frozen=True)
class Written:
    """How a family writes calls, for constrained decoding; the family's `forms` read it back."""

    open: str = ""  # before the first call
    close: str = ""  # after the last
    between: str | None = None  # between two calls; None: an answer holds one
    arguments: str = "arguments"  # the key of a call's arguments
    named: str | None = None  # text between a name and its arguments, where a call is not a JSON object
    markers: tuple[str, ...] = ()  # texts that may be special tokens; the first one begins a call

    def around(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a call of this tool."""
        if self.named is not None:
            return name + self.named, ""
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": ', "}"


_ARGUMENTS = ("arguments", "parameters")
_BEGINNING = re.compile(r"^[ \t]*(?:```\w*[ \t]*)?(?=[\[{])", re.MULTILINE)
_GAP = re.compile(r"[\s;,]*")
_MISTRAL_NAMED = re.compile(r"\s*([^\s\[\]{}\"]+)(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)")
_PYTHON = re.compile(r"\s*([\w.-]+)\.call(\(.*\))\s*", re.DOTALL)


def answered(text: str) -> str:
    """Return the answer without the reasoning it begins with; empty while that is unfinished."""
    if not text.lstrip().startswith("<think>"):
        return text  # a "</think>" further on may lie inside an argument
    return text.partition("</think>")[2]


def tagged(text: str, names: Collection[str] | None) -> list[ToolCall]:
    """Qwen's and Hermes' `<tool_call>{...}</tool_call>`."""
    return _after_tags(text, ("<tool_call>", "<tools>"))


def mistral(text: str, names: Collection[str] | None) -> list[ToolCall]:
    """`[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    Special tokens may be left out of the text: then only a listed name before an object is a call.
    """
    calls: list[ToolCall] = []
    at = text.find("[TOOL_CALLS]")
    tag = at >= 0
    at = at + len("[TOOL_CALLS]") if tag else 0
    while True:
        if named := _MISTRAL_NAMED.match(text, at):
            begin = named.end()
            found = _decode(text, begin)
            if found is None or (not tag and (names is None or named[1] not in names)):
                return calls
            value, at = found
            calls += _as_written(_calls({"name": named[1], "arguments": value}, tag=True), text, begin, at)
        else:
            begin = _GAP.match(text, at).end()  # type: ignore[union-attr]
            found = _decode(text, begin) if tag else None
            if found is not None:
                value, at = found
                calls += _as_written(_calls(value, tag=True), text, begin, at)
        following = text.find("[TOOL_CALLS]", at)
        if following >= 0:
            tag, at = True, following + len("[TOOL_CALLS]")
        elif tag or not named:
            return calls


def python_tag(text: str, names: Collection[str] | None) -> list[ToolCall]:
    """Llama's `<|python_tag|>{...}; {...}` and its built-in tools' `<|python_tag|>name.call(key="value")`."""
    before, tag, after = text.partition("<|python_tag|>")
    if called := _PYTHON.fullmatch(after if tag else before):
        arguments = _keyword_arguments(called[2])
        known = bool(tag) if names is None else called[1] in names
        return [ToolCall(called[1], arguments)] if arguments is not None and known else []
    return _sequence(after, 0, tag=True)[0] if tag else []


def bare(text: str, names: Collection[str] | None) -> list[ToolCall]:
    """JSON objects with a name and arguments (or lists of them) at the beginning of a line, fenced or not."""
    calls: list[ToolCall] = []
    at = 0
    while beginning := _BEGINNING.search(text, at):
        found, at = _sequence(text, beginning.end(), tag=False)
        calls += found
        if at == beginning.end():
            if text[at] == "{":
                break  # unfinished, or no JSON: what follows may lie inside it
            at += 1
    return calls


def _after_tags(text: str, tags: tuple[str, ...]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    at = 0
    while places := [(text.find(tag, at), tag) for tag in tags if text.find(tag, at) >= 0]:
        place, tag = min(places)
        found, at = _sequence(text, place + len(tag), tag=True)
        calls += found
    return calls


def _sequence(text: str, at: int, *, tag: bool) -> tuple[list[ToolCall], int]:
    """Read the calls of consecutive JSON values from `at` on, and where the last value ends (`at` if there is none)."""
    calls: list[ToolCall] = []
    while True:
        begin = _GAP.match(text, at).end()  # type: ignore[union-attr]
        found = _decode(text, begin)
        if found is None:
            return calls, at
        value, at = found
        calls += _as_written(_calls(value, tag=tag), text, begin, at)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse, strict=False)  # models do write line breaks inside strings
_STRICT = json.JSONDecoder(parse_constant=_refuse)  # as clients read
_LEVELS = 8  # most objects from the beginning of a call to its arguments


def _decode(text: str, at: int) -> tuple[Any, int] | None:
    """Return the object or list that begins at `at`, and where it ends; None without one."""
    if text[at : at + 1] not in ("{", "["):
        return None
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _calls(value: Any, *, tag: bool) -> list[ToolCall] | None:
    """Return the calls that a JSON value holds; None if it is anything else. Without a tag, a call needs arguments."""
    if isinstance(value, list):
        each = [_calls(item, tag=tag) if isinstance(item, dict) else None for item in value]
        return [call for calls in each for call in calls or ()] if value and None not in each else None
    if isinstance(value.get("function"), dict):  # as OpenAI's API writes calls
        value = value["function"]
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name:
        return None
    given = [key for key in _ARGUMENTS if key in value]
    if not given:
        return [ToolCall(name, {})] if tag else None
    arguments = value[given[0]]
    if isinstance(arguments, str):
        found = _decode(arguments.strip(), 0)
        arguments = found[0] if found is not None and found[1] == len(arguments.strip()) else arguments
    if arguments is None:
        arguments = {}
    return [ToolCall(name, arguments)] if isinstance(arguments, dict) else None


def _as_written(calls: list[ToolCall] | None, text: str, begin: int, end: int) -> list[ToolCall]:
    """Return calls that were read from a part of the text, each with its arguments as they stand there."""
    found = []
    for call in calls or ():
        place = _place(call.arguments, text, begin, end)
        if place is not None:
            call, begin = replace(call, written=text[slice(*place)]), place[1]
        found.append(call)
    return found


def _place(arguments: dict[str, Any], text: str, begin: int, end: int) -> tuple[int, int] | None:
    """Return where an object stands in a part of the text; None if it does not, or not in JSON as clients read it."""
    for _ in range(_LEVELS):
        begin = text.find("{", begin, end)
        if begin < 0:
            return None
        try:
            value, after = _STRICT.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return None
        if value == arguments:
            return begin, after
        begin += 1
    return None


def _keyword_arguments(source: str) -> dict[str, Any] | None:
    """Return `(a=1, b="x")` as a dictionary; None unless all are plain values by name."""
    try:
        call = ast.parse("f" + source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            return None
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
