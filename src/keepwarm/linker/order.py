"""Whether two prompts differ only in the order of the same tools, or of their keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from keepwarm.core.identity import json_text
from keepwarm.core.tools import shown_tool, tool_name, tool_text
from keepwarm.errors import PromptError

_READ = 4  # limit for reading JSON in a text, as a multiple of its length
_DEEP = 10_000  # characters that are counted as read when JSON is nested too deeply
_SCHEMA = frozenset({"description", "function", "input_schema", "parameters"})  # a tool has one of them, a call none


@dataclass(frozen=True)
class Shown:
    """A tool in a rendered prompt."""

    tool: dict[str, Any]
    start: int
    end: int  # characters


def tools_around(text: str, start: int, end: int) -> list[Shown]:
    """Return the tools of a rendered prompt, if characters `[start, end)` lie among them. None are found if the
    template does not print tools as JSON."""
    found = list(_tools(text))
    return found if found and found[0].start < end and start < found[-1].end else []


def reordered(mine: Sequence[Shown], theirs: str) -> str:
    """Say what has another order in another prompt's text: "the tools", "the keys of the tools", or both. Empty if more
    than the order differs."""
    stored = list(islice(_tools(theirs), len(mine)))
    if sorted(tool_text(found.tool) for found in mine) != sorted(tool_text(found.tool) for found in stored):
        return ""
    before = {tool_name(found.tool): json_text(found.tool) for found in stored}
    tools = [tool_name(found.tool) for found in mine] != list(before)
    keys = any(json_text(found.tool) != before[tool_name(found.tool)] for found in mine)
    return " and ".join(["the tools"] * tools + ["the keys of the tools"] * keys)


def _tools(text: str) -> Iterator[Shown]:
    """Yield the tools that a rendered prompt contains as JSON, up to a repeated name, which is not one of them."""
    decoder, names, at = json.JSONDecoder(), set[str](), 0
    left = _READ * len(text)
    while left > 0 and (start := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, start)
            tool = shown_tool(value)
        except PromptError:
            left -= at - start
            continue
        except json.JSONDecodeError as error:
            unterminated = error.msg.startswith("Unterminated")  # if so, the whole text was read
            left -= len(text) - start if unterminated else error.pos - start
            at = start + 1
            continue
        except RecursionError:
            left -= _DEEP
            at = start + 1
            continue
        left -= at - start
        if not _SCHEMA & value.keys():
            continue
        if tool_name(tool) in names:
            return
        names.add(tool_name(tool))
        yield Shown(tool, start, at)
