"""Prompts that part only in the order of their tools, with the families' real templates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.helpers.chats import CHATS, TOOLS, adapter
from tests.helpers.tokenizers import NAMES

from keepwarm.core.recent import common_length
from keepwarm.linker.order import reordered, tools_around

KEYS = [tool | {"function": dict(reversed(tool["function"].items()))} for tool in TOOLS]
CHANGES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "tools": (TOOLS[::-1], "the tools"),
    "keys": (KEYS, "the keys of the tools"),
    "both": (KEYS[::-1], "the tools and the keys of the tools"),
    "another": ([*TOOLS[::-1][:2], {"name": "fourth", "parameters": {}}], ""),
    "fewer": (TOOLS[:0:-1], ""),
}


def told(name: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], said: str = "Hello") -> str:
    shown = adapter(name)
    chat = [*CHATS[1][:1], {"role": "user", "content": said}]
    mine, stored = (shown.render(each, tools).text for each, tools in ((CHATS[1], ours), (chat, theirs)))
    at = common_length(mine, stored)
    return reordered(tools, stored) if (tools := tools_around(mine, at, at + 1)) else ""


@pytest.mark.parametrize("name", [*NAMES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[2:])])
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_in_order_alone(name: str, change: str) -> None:
    tools, wanted = CHANGES[change]
    assert told(name, TOOLS, tools) == wanted
    assert told(name, TOOLS, tools, 'Another question, with {"name": "write", "parameters": {}} in it') == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_more_than_an_order(name: str) -> None:
    edited = copy.deepcopy(TOOLS[::-1])
    edited[-1]["function"]["parameters"]["properties"]["extra"]["properties"]["a"]["const"] = 0
    assert edited == TOOLS[::-1], "for Python"
    assert told(name, TOOLS, edited) == ""
    assert told(name, TOOLS, TOOLS, "Another question") == "", "the tools are the same"
    assert told(name, [], TOOLS) == told(name, TOOLS, []) == ""
    for text in ("{" * 100_000, '{"a":' * 100_000, '{"a":' * 900 + '"' + "x" * 1_000_000):  # is read in linear time
        assert tools_around(text, 3, 4) == []
