"""The page of HTTP operations, from the service's OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keepwarm.serving.app import create_app, described
from keepwarm.serving.protocols.errors import Protocol
from keepwarm.serving.settings import ServeConfig

_HEAD = """# HTTP API

What `keepwarm serve` answers. A running service has the same as JSON at `/openapi.json`, answers' fields included. With
API keys, each request carries `authorization: Bearer KEY` or `x-api-key: KEY`. A field that is not listed is refused.
The pages on [OpenAI's](../serving/openai.md), [Anthropic's](../serving/anthropic.md) and the
[native protocol](../serving/native.md) show examples.
"""
_TITLES = {
    Protocol.NATIVE: "Native protocol",
    Protocol.OPENAI: "OpenAI's protocol",
    Protocol.ANTHROPIC: "Anthropic's protocol",
}


def document() -> dict[str, Any]:
    """The OpenAPI document of a service with default settings. Loads no model."""
    return described(create_app(ServeConfig.load(None, {}, {})))


def page() -> str:
    """The page in Markdown."""
    found = document()
    parts = [_HEAD]
    for protocol, title in _TITLES.items():
        parts.append(f"## {title}\n")
        for path, operations in found["paths"].items():
            if Protocol.of(path) is protocol:
                parts += [_operation(method, path, each, found) for method, each in operations.items()]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    lines = [f"### `{method.upper()} {path}`", "", " ".join((operation.get("description") or "").split()), ""]
    rows = [
        (each["name"], f"in the {each['in']}", _type(each["schema"]), each.get("description", ""))
        for each in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    shape = _resolved(body, found)
    needed = set(shape.get("required", ()))
    for name, field in shape.get("properties", {}).items():
        rows.append((name, "required" if name in needed else "", _type(field), field.get("description", "")))
    if rows:
        lines += ["| field | | type | |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {where} | {kind} | {_cell(told)} |" for name, where, kind, told in rows]
        lines.append("")
    return "\n".join(lines)


def _resolved(schema: Mapping[str, Any], found: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = found["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_type(each) for each in schema.get("anyOf") or schema["oneOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
