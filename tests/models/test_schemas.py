"""A schema that is none is refused with the tool's name and the place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from keepwarm.core.deadline import Deadline
from keepwarm.errors import PromptError, TookTooLong
from keepwarm.models.schemas import _is_plain, check_schema, checked_tools

OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"name": name, "description": "Does it.", "input_schema": parameters}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"city": {"type": "strin"}}}, r"tool 'f': \$\.parameters\.properties\.city\.type .*'strin'"),
        ({"properties": {"x": {"type": "dict"}}}, r"\$\.parameters\.properties\.x\.type"),
        ({"properties": ["a"]}, r"\$\.parameters\.properties is no valid JSON Schema"),
        ({"required": "a"}, r"\$\.parameters\.required"),
        ({"properties": {"x": {"anyOf": [{"minimum": "1"}]}}}, r"\$\.parameters\.properties\.x\.anyOf\[0\]\.minimum"),
        ({"properties": {"x": {"enum": "ab"}}}, r"\$\.parameters\.properties\.x\.enum"),
        ({"properties": {"größe": {"type": 1}}}, r"\$\.parameters\.properties\.größe\.type"),
        ({"type": "string"}, r"\$\.parameters\.type must be 'object'"),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, r"properties\.x\.\$ref points to '#/\$defs/none'"),
    ],
)
def test_invalid_schemas(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        checked_tools([tool(OBJECT, "good"), tool({"type": "object"} | parameters)])


@pytest.mark.parametrize(
    "parameters",
    [
        OBJECT,
        {},
        {
            "type": "object",
            "properties": {"node": {"$ref": "#/$defs/node"}},
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        },
        {"type": "object", "properties": {"self": {"$ref": "#"}}},
        {"type": "object", "properties": {"a/b": {"type": "string"}, "c": {"$ref": "#/properties/a~1b"}}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"n": {"type": "number", "exclusiveMinimum": 0}},
            "definitions": {},
        },
        {"type": "object", "properties": {"x": {"default": {"$ref": "#/nothing"}, "examples": [{"$ref": "#/no"}]}}},
        {"type": "object", "properties": {"日本": {"type": "string", "enum": ["あ", "🙂"]}}},
    ],
)
def test_valid_schemas(parameters: dict[str, Any]) -> None:
    assert checked_tools([tool(parameters)])[0]["function"]["name"] == "f"


def test_a_draft_4_schema_is_checked_by_its_own_rules() -> None:
    draft = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object"}
    checked_tools([tool(draft | {"properties": {"n": {"minimum": 0, "exclusiveMinimum": True}}})])
    with pytest.raises(PromptError, match="exclusiveMinimum"):
        checked_tools([tool({"type": "object", "properties": {"n": {"minimum": 0, "exclusiveMinimum": True}}})])


def test_a_huge_schema_is_checked() -> None:
    many = {f"field_{n}": {"type": "string"} for n in range(2000)}
    checked_tools([tool({"type": "object", "properties": many})])
    with pytest.raises(PromptError, match=r"\$\.parameters\.properties\.last"):
        checked_tools([tool({"type": "object", "properties": many | {"last": {"type": "text"}}})])


def test_duplicates() -> None:
    with pytest.raises(PromptError, match="both called 'f'"):
        checked_tools([tool(OBJECT), tool(OBJECT)])


WORDS = st.sampled_from([
    "$defs",
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "default",
    "definitions",
    "deprecated",
    "description",
    "enum",
    "examples",
    "exclusiveMinimum",
    "format",
    "items",
    "maxLength",
    "maximum",
    "minItems",
    "not",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "title",
    "type",
    "uniqueItems",
    "x-more",
])
LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, "object", "string", "a"])
SCHEMAS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=12
)


@given(schema=SCHEMAS)
def test_what_is_taken_as_plain_is_valid_by_the_rules(schema: Any) -> None:
    errors = list(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema))
    assert not (_is_plain(schema) and errors)


def test_what_everybody_writes_is_plain() -> None:
    text = {"type": "string", "description": "A text.", "enum": ["a", "b"], "default": "a", "minLength": 1}
    number = {"type": ["integer", "null"], "minimum": 0, "exclusiveMaximum": 10.5}
    listed = {"type": "array", "items": text, "minItems": 1, "uniqueItems": True}
    either = {"anyOf": [text, number, {"$ref": "#/$defs/one"}]}
    properties = {"text": text, "number": number, "listed": listed, "either": either}
    schema = {"type": "object", "properties": properties, "required": ["text"], "additionalProperties": False}
    assert _is_plain(schema | {"$defs": {"one": True}})


@pytest.mark.parametrize("more", [{}, {"$id": "http://a.b/c"}, {"$schema": "http://json-schema.org/draft-07/schema#"}])
def test_a_schema_that_takes_long_is_given_up(more: dict[str, Any]) -> None:
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}} | more
    with Deadline(0.0).governing(), pytest.raises(TookTooLong):
        check_schema(wide, "it")


def test_long_names_of_many_properties_cost_no_more_than_their_text() -> None:
    """Paths were written out for each property: 200 GB of text for this."""
    many = {f"p{n}": {"type": "string"} for n in range(50_000)}
    inner = {"type": "object", "properties": many}
    (shown,) = checked_tools([tool({"type": "object", "properties": {"x" * 2_000_000: inner}})])
    assert len(json.dumps(shown)) > 3_000_000
    wrong = {"type": "object", "properties": {"a": {"items": [{"b": object()}]}}}
    with pytest.raises(PromptError, match=r"\$\.input_schema\.properties\.a\.items\[0\]\.b must be a plain JSON value"):
        checked_tools([tool(wrong)])
