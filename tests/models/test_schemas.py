"""A schema that is none is refused with the tool's name and the place."""

from __future__ import annotations

from typing import Any

import pytest

from keepwarm.errors import PromptError
from keepwarm.models.schemas import checked_tools

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
        {"type": "object", "properties": {"node": {"$ref": "#/$defs/node"}},
         "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}},
        {"type": "object", "properties": {"self": {"$ref": "#"}}},
        {"type": "object", "properties": {"a/b": {"type": "string"}, "c": {"$ref": "#/properties/a~1b"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
         "properties": {"n": {"type": "number", "exclusiveMinimum": 0}}, "definitions": {}},
        {"type": "object", "properties": {"x": {"default": {"$ref": "#/nothing"}, "examples": [{"$ref": "#/no"}]}}},
        {"type": "object", "properties": {"日本": {"type": "string", "enum": ["あ", "🙂"]}}},
    ],
)  # fmt: skip
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
