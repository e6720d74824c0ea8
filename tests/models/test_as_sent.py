"""Tools are shown to the model as they are sent: to the character what transformers renders from the same schemas."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from tests.helpers.chats import CHATS, FILL, TOOLS, adapter
from tests.helpers.shuffling import shuffled
from tests.helpers.tokenizers import NAMES, loaded

SHOWN = [name for name in NAMES if name != "smollm2"]  # whose template has no place for tools


def theirs(name: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """What transformers makes of it."""
    variables = adapter(name).template_defaults()
    text: str = loaded(name).apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True, **variables
    )
    return text


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("chat", CHATS)
def test_to_the_character(name: str, chat: list[dict[str, Any]]) -> None:
    shown = adapter(name)
    rng = random.Random(7)
    assert shown.render(chat, TOOLS).text == theirs(name, chat, TOOLS)
    for _ in range(20):
        tools = shuffled(copy.deepcopy(TOOLS), rng)
        rng.shuffle(tools)
        assert shown.render(chat, tools).text == theirs(name, chat, tools)


@pytest.mark.parametrize("name", NAMES)
def test_two_orders_are_two_prompts_and_sorted_makes_them_one(name: str) -> None:
    shown = adapter(name)
    other = shuffled(copy.deepcopy(TOOLS), random.Random(1))
    other.reverse()
    first, second = (shown.render(CHATS[1], tools) for tools in (TOOLS, other))
    assert first.text != second.text
    assert shown.render(CHATS[1], TOOLS) == first, "nothing of the other order is remembered"
    asked = [shown.render(CHATS[1], tools, tool_order="sorted").text for tools in (TOOLS, other)]
    assert asked[0] == asked[1]
    assert asked[0] == adapter(name, tool_order="sorted").render(CHATS[1], other).text
    assert asked[0].index('"answer"') < asked[0].index('"reasoning"'), "which is why it is asked for"


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_booleans_are_told_apart(name: str) -> None:
    shown = adapter(name)
    edited = copy.deepcopy(TOOLS)
    edited[0]["function"]["parameters"]["properties"]["extra"]["properties"]["a"]["const"] = 0
    assert edited == TOOLS, "for Python"
    assert shown.render(CHATS[0], TOOLS).text != shown.render(CHATS[0], edited).text


@pytest.mark.parametrize("name", NAMES)
def test_other_shapes_keep_their_order(name: str) -> None:
    shown = adapter(name)
    openai = {"type": "function", "function": {"name": "write", "parameters": FILL, "description": "Writes."}}
    for key in ("parameters", "input_schema", "inputSchema"):
        tool = {"cache_control": None, "name": "write", key: FILL, "strict": True, "description": "Writes."}
        assert shown.render(CHATS[1], [tool]).text == shown.render(CHATS[1], [openai]).text
    cached = {**openai, "cache_control": {"type": "ephemeral"}}
    assert shown.render(CHATS[1], [cached]).text == shown.render(CHATS[1], [openai]).text


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_written_in_the_order_of_the_properties(name: str) -> None:
    shown = adapter(name)
    grammar = shown.call_grammar(TOOLS[:1], "required", lambda text: None, ())
    assert grammar.index('"reasoning"') < grammar.index('"answer"')
    grammar = shown.call_grammar(TOOLS[:1], "required", lambda text: None, (), tool_order="sorted")
    assert grammar.index('"answer"') < grammar.index('"reasoning"'), "as the prompt shows them"
    assert shown.tools_key(TOOLS) != shown.tools_key(shuffled(copy.deepcopy(TOOLS), random.Random(1)))
