"""One canonical form for a tool, whatever shape and order it came in."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.shuffling import shuffled

from keepwarm.core.identity import canonical_json, json_text
from keepwarm.core.tools import (
    MAX_DEPTH,
    canonical_tool,
    declared_ends,
    in_order_of,
    shown_tool,
    shown_tools,
    tool_name,
    tool_text,
    tools_hash,
)
from keepwarm.errors import PromptError

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "unit": {"type": ["string", "null"], "enum": ["c", "f"], "default": "c"},
        "required": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    },
    "required": ["city", "unit"],
}
OPENAI = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": PARAMETERS}}
SHAPES = {
    "openai": OPENAI,
    "openai, strict": {**OPENAI, "function": {**OPENAI["function"], "strict": True}},  # type: ignore[dict-item]
    "bare": {"name": "weather", "description": "Tells.", "parameters": PARAMETERS},
    "responses": {"type": "function", "name": "weather", "description": "Tells.", "parameters": PARAMETERS},
    "anthropic": {"name": "weather", "description": "Tells.", "input_schema": PARAMETERS},
    "anthropic, cached": {
        "type": "custom",
        "name": "weather",
        "description": "Tells.",
        "input_schema": PARAMETERS,
        "cache_control": {"type": "ephemeral"},
    },
    "mcp": {
        "name": "weather",
        "title": "Weather",
        "description": "Tells.",
        "inputSchema": PARAMETERS,
        "annotations": {"readOnlyHint": True},
        "outputSchema": {"type": "object"},
        "_meta": {},
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_one_form_and_hash(shape: str) -> None:
    form = canonical_tool(SHAPES[shape])
    assert canonical_json(form) == canonical_json(canonical_tool(OPENAI))
    assert list(form) == ["function", "type"]
    assert list(form["function"]) == ["description", "name", "parameters"]
    assert tools_hash([form]) == tools_hash([canonical_tool(OPENAI)])
    assert canonical_tool(form) == form, "the canonical form is a shape itself"


def test_an_mcp_result_is_a_list() -> None:
    assert shown_tools({"tools": [SHAPES["mcp"]]}) == shown_tools([OPENAI])
    with pytest.raises(PromptError, match="nextCursor"):
        shown_tools({"tools": [SHAPES["mcp"]], "nextCursor": "2"})


@given(seed=st.integers(0, 10**6), count=st.integers(1, 6))
def test_order_of_tools_keys_and_required_is_not_part_of_the_hash(seed: int, count: int) -> None:
    tools = [{**copy.deepcopy(OPENAI["function"]), "name": f"t{n}"} for n in range(count)]  # type: ignore[dict-item]
    rng = random.Random(seed)
    other = shuffled(tools, rng)
    rng.shuffle(other)
    assert tools_hash(shown_tools(other)) == tools_hash(shown_tools(tools))
    assert canonical_json(shown_tools(other, "sorted")) == canonical_json(shown_tools(tools, "sorted"))


def edited(path: str, value: Any) -> dict[str, Any]:
    tool: dict[str, Any] = copy.deepcopy(OPENAI)
    *parents, last = path.split(".")
    place: Any = tool["function"]
    for part in parents:
        place = place[part]
    place[last] = value
    return tool


@pytest.mark.parametrize(
    "changed",
    [
        edited("parameters.properties.unit.enum", ["f", "c"]),
        edited("parameters.properties.required.oneOf", [{"type": "integer"}, {"type": "string"}]),
        edited("description", "Tells!"),
        edited("name", "Weather"),
        edited("parameters.required", ["city"]),
        edited("parameters.properties.unit.default", "f"),
        edited("parameters.properties.city.description", "Wo?"),
    ],
)
def test_any_other_change_is_another_hash(changed: dict[str, Any]) -> None:
    assert tools_hash([canonical_tool(changed)]) != tools_hash([canonical_tool(OPENAI)])


def test_values_are_not_schemas() -> None:
    """`required` in a default value is a list like any other; a property of that name is a schema."""
    schema = {"properties": {"default": {"required": ["b", "a"]}, "x": {"default": {"required": ["b", "a"]}}}}
    form = canonical_tool({"name": "f", "parameters": schema})["function"]["parameters"]["properties"]
    assert form["default"]["required"] == ["a", "b"]
    assert form["x"]["default"]["required"] == ["b", "a"]
    given_sets = {"dependentRequired": {"a": ["z", "y"]}, "type": ["string", "null"], "prefixItems": [{}, True]}
    sets = canonical_tool({"name": "f", "parameters": given_sets})["function"]["parameters"]
    assert sets == {"dependentRequired": {"a": ["y", "z"]}, "type": ["null", "string"], "prefixItems": [{}, True]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"inner": schema}}
    return schema


LOOP: dict[str, Any] = {"properties": {}}
LOOP["properties"]["again"] = LOOP


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("weather", "list of tool schemas"),
        ({"name": "weather"}, "under 'tools'"),
        (["weather"], r"tools\[0\] must be an object"),
        ([{"parameters": {}}], r"tools\[0\] must have a name"),
        ([{"name": " padded"}], "must have a name"),
        ([{"name": "two\nlines"}], "must have a name"),
        ([{"type": "web_search_20250305", "name": "web_search"}], "'web_search'.*got type"),
        ([{"name": "f", "parameters": {}, "input_schema": {}}], "give one of parameters, input_schema"),
        ([{"name": "f", "parameters": True}], r"tools\[0\] \('f'\): parameters must be a JSON Schema object"),
        ([{"name": "f", "description": 1}], "description must be a text"),
        ([{"name": "f", "parameters": {"default": float("nan")}}], r"\('f'\): \$\.parameters\.default must be a plain"),
        ([{"name": "f", "inputSchema": {"default": {1: 2}}}], r"\$\.inputSchema\.default: the keys"),
        ([{"name": "f", "parameters": {"enum": ["\ud800"]}}], r"\$\.parameters\.enum\[0\] holds half"),
        ([{"name": "f", "parameters": {"properties": {"\ud800": {}}}}], r"\$\.parameters\.properties holds half"),
        ([{"name": "f", "parameters": nested(MAX_DEPTH)}], "deeper than"),
        ([{"name": "f", "parameters": LOOP}], "deeper than"),
        ([{"name": "f"}, {"name": "g"}, {"name": "f"}], r"tools\[0\] and tools\[2\] are both called 'f'"),
    ],
)
def test_what_cannot_be_used_is_named(tools: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        shown_tools(tools)


def test_recursive_references_unicode_and_huge_schemas() -> None:
    node = {"properties": {"next": {"$ref": "#/$defs/node"}}}
    tree = {"name": "grüße_中文", "description": "🙂", "parameters": {"$defs": {"node": node}, "$ref": "#/$defs/node"}}
    assert tool_name(canonical_tool(tree)) == "grüße_中文"
    huge = {f"field_{n:05}": {"type": "string", "description": "x" * 50} for n in range(10_000)}
    form = canonical_tool({"name": "huge", "parameters": {"type": "object", "properties": huge}})
    assert len(form["function"]["parameters"]["properties"]) == 10_000


def test_declared_ends() -> None:
    inside = {"type": "function", "function": {"name": "g", "cache_control": {"type": "ephemeral"}}}
    assert declared_ends([OPENAI, SHAPES["anthropic, cached"], inside]) == {"weather", "g"}


def test_what_is_left_out_of_a_shown_tool_and_what_stays() -> None:
    given = {
        "b": 1,
        "function": {"z": {"k": None}, "strict": True, "name": "f", "description": None},
        "type": "function",
    }
    assert list(shown_tool(given)) == ["b", "function", "type"]
    assert shown_tool(given)["function"] == {"z": {"k": None}, "name": "f"}
    assert list(shown_tool({"function": {"name": "f"}})) == ["type", "function"]
    assert list(shown_tool(SHAPES["mcp"])["function"]) == ["name", "description", "parameters"]


@given(seed=st.integers(0, 10**6))
def test_an_order_of_before_is_kept(seed: int) -> None:
    before = shown_tool(OPENAI)
    other = shuffled(copy.deepcopy(before), random.Random(seed))
    assert json_text(in_order_of(other, before)) == json_text(before)
    other["function"]["parameters"]["properties"]["new"] = {"const": False}
    other["function"]["parameters"]["required"].insert(0, "new")
    kept = in_order_of(other, before)
    assert tool_text(kept) == tool_text(other), "it says the same"
    assert list(kept["function"]["parameters"]["properties"]) == ["city", "unit", "required", "new"]
    assert kept["function"]["parameters"]["required"] == ["city", "unit", "new"]
