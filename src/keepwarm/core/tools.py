"""Tool schemas in one canonical form, whoever's shape they came in, so that a set of tools has one key.

The canonical form of a tool is OpenAI's, which chat templates read: `{"function": {"description", "name",
"parameters"}, "type": "function"}`, with object keys and set-like arrays (`required`) sorted and arrays whose order
means something (`enum`, `oneOf`) kept. What says how a client or a server handles the tool (`cache_control`, `strict`,
MCP's `annotations`, `outputSchema`, ...) is not part of it: the model is not shown it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepwarm.core.identity import json_digest
from keepwarm.errors import PromptError

MAX_DEPTH = 100  # levels of a schema; Python's JSON writer gives up at about 1,000

_SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema")  # OpenAI's, Anthropic's, MCP's
_FOR_CLIENTS = frozenset({
    "_meta", "allowed_callers", "annotations", "cache_control", "defer_loading", "eager_input_streaming", "execution",
    "icons", "outputSchema", "strict", "title",
})  # fmt: skip

# what stands under a keyword of a schema; under any other: a schema, or a list of schemas in a fixed order
_UNDER = {
    **dict.fromkeys(("const", "default", "enum", "example", "examples"), "data"),  # nothing in it is a set
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"), "schemas by name"),
    **dict.fromkeys(("dependencies", "dependentRequired"), "sets by name"),  # in old drafts also schemas by name
    **dict.fromkeys(("required", "type"), "set"),
}


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as a model asks for it."""

    name: str
    arguments: dict[str, Any]


def tool_list(tools: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    """The entries of a list of tools, or of an MCP `tools/list` result. Raises PromptError."""
    given: Any = tools
    if isinstance(tools, Mapping):
        if not isinstance(tools.get("tools"), list | tuple):
            raise PromptError("tools must be a list of tool schemas, or an object with such a list under 'tools'")
        if tools.get("nextCursor"):
            raise PromptError(
                "tools has a nextCursor: this is one page of a tools/list; fetch the others and join them"
            )
        given = tools["tools"]
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise PromptError(f"tools must be a list of tool schemas, got {type(given).__name__}")
    return list(given)


def canonical_tool(tool: Any, where: str = "the tool") -> dict[str, Any]:
    """One tool in canonical form. Raises PromptError naming `where`, the tool and the path in it."""
    if not isinstance(tool, Mapping):
        raise PromptError(f"{where} must be an object (a tool schema), got {type(tool).__name__}")
    wrapped = isinstance(tool.get("function"), Mapping)
    inner: Mapping[str, Any] = tool["function"] if wrapped else tool
    name = inner.get("name")
    if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable():
        raise PromptError(f"{where} must have a name, a text that can be printed, got {name!r}")
    where = f"{where} ({name!r})"
    kind = tool.get("type", "function")
    if kind not in ("function", "custom") or (kind == "custom" and "input_schema" not in inner):
        raise PromptError(
            f"{where}: only tools that the caller runs can be shown, with a JSON Schema; got type {kind!r}"
        )
    schemas = [key for key in _SCHEMA_KEYS if inner.get(key) is not None]
    if len(schemas) > 1:
        raise PromptError(f"{where}: give one of {', '.join(schemas)}")
    function = {k: v for k, v in inner.items() if v is not None and k not in _FOR_CLIENTS and k not in _SCHEMA_KEYS}
    if not wrapped:
        function.pop("type", None)
    if not isinstance(function.get("description", ""), str):
        raise PromptError(f"{where}: description must be a text, got {function['description']!r}")
    shown = _canonical(function, "data", f"{where}: $")
    for key in schemas:
        if not isinstance(inner[key], Mapping):
            raise PromptError(f"{where}: {key} must be a JSON Schema object, got {type(inner[key]).__name__}")
        shown["parameters"] = _canonical(inner[key], "schema", f"{where}: $.{key}")
    around = {k: v for k, v in tool.items() if wrapped and k not in _FOR_CLIENTS and k != "function"}
    whole = _canonical(around, "data", f"{where}: $") | {"type": "function", "function": dict(sorted(shown.items()))}
    return dict(sorted(whole.items()))


def canonical_tools(tools: Sequence[Any] | Mapping[str, Any], *, by_name: bool = True) -> list[dict[str, Any]]:
    """Canonical schemas, sorted by name unless `by_name` is off. Raises PromptError, for two of one name too."""
    schemas = [canonical_tool(tool, f"tools[{index}]") for index, tool in enumerate(tool_list(tools))]
    first: dict[str, int] = {}
    for index, schema in enumerate(schemas):
        earlier = first.setdefault(tool_name(schema), index)
        if earlier != index:
            raise PromptError(
                f"tools[{earlier}] and tools[{index}] are both called {tool_name(schema)!r}: a call could not say "
                "which is meant; give each tool a name of its own"
            )
    return sorted(schemas, key=tool_name) if by_name else schemas


def tool_name(schema: Mapping[str, Any]) -> str:
    """Name of a tool in canonical form."""
    name: str = schema["function"]["name"]
    return name


def tools_hash(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Hex digest of a set of canonical tools, whatever their order."""
    return json_digest("keepwarm tool set 1", sorted(schemas, key=tool_name))


def declared_ends(tools: Sequence[Any] | Mapping[str, Any]) -> frozenset[str]:
    """Names of the tools at whose end the request asks for a cut (`cache_control`)."""
    names = set()
    for tool in tool_list(tools):
        inner = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        if tool.get("cache_control") is not None or inner.get("cache_control") is not None:
            names.add(inner["name"])
    return frozenset(names)


def _canonical(value: Any, kind: str, path: str, depth: int = 1) -> Any:
    if depth > MAX_DEPTH:
        raise PromptError(f"{path} lies deeper than {MAX_DEPTH} levels: use $defs and $ref for a recursive schema")
    if isinstance(value, Mapping):
        return {
            key: _canonical(value[key], _kind_under(kind, key), f"{path}.{key}", depth + 1)
            for key in _sorted_keys(value, path)
        }
    if isinstance(value, list | tuple):
        inside = "data" if kind == "data" else "schema"
        items = [_canonical(item, inside, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        return sorted(set(items)) if kind == "set" and all(isinstance(item, str) for item in items) else items
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise PromptError(f"{path} holds half a surrogate pair, which is no Unicode text")
    elif not (value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise PromptError(f"{path} must be a plain JSON value, got {value!r}")
    return value


def _kind_under(kind: str, key: str) -> str:
    match kind:
        case "data":
            return "data"
        case "schemas by name":
            return "schema"
        case "sets by name":
            return "set"
        case _:
            return _UNDER.get(key, "schema")


def _sorted_keys(value: Mapping[Any, Any], path: str) -> list[str]:
    for key in value:
        if not isinstance(key, str):
            raise PromptError(f"{path}: the keys of an object must be texts, got {key!r}")
    return sorted(value)
