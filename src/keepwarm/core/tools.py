"""Tool schemas in two forms: one to show to a model, and one to compare and hash.

A shown tool has OpenAI's shape, which chat templates read (`{"type": "function", "function": {"name", "description",
"parameters"}}`), whatever shape it was sent in. Its keys and arrays stay in the order in which they were sent: the
order of `properties` decides what a model writes first. Fields for clients or servers (`cache_control`, `strict`, MCP's
`annotations`, `outputSchema`, ...) are left out, and so are fields that are null.

In canonical form, object keys and set-like arrays (`required`) are sorted, and arrays with a meaningful order (`enum`,
`oneOf`) are kept. So two tools with the same meaning have the same canonical text, and a set of tools has one hash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from keepwarm.config import ToolOrder
from keepwarm.core.identity import canonical_json, json_digest
from keepwarm.errors import PromptError

MAX_DEPTH = 100  # levels of a schema; Python's JSON writer gives up at about 1,000

_SCHEMA_KEYS = ("parameters", "input_schema", "inputSchema")  # OpenAI's, Anthropic's, MCP's
_FOR_CLIENTS = frozenset({
    "_meta",
    "allowed_callers",
    "annotations",
    "cache_control",
    "defer_loading",
    "eager_input_streaming",
    "execution",
    "icons",
    "outputSchema",
    "strict",
    "title",
})

# The kind of value under a keyword of a schema. Any other keyword has a schema, or a list of schemas in a fixed order.
_UNDER = {
    **dict.fromkeys(("const", "default", "enum", "example", "examples"), "data"),  # nothing in it is a set
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"), "schemas by name"),
    **dict.fromkeys(("dependencies", "dependentRequired"), "sets by name"),  # in old drafts also schemas by name
    **dict.fromkeys(("required", "type"), "set"),
}


_Path = str | tuple[Any, str | int]  # of a place in a value: the path of its container, and the step from there


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as requested by a model."""

    name: str
    arguments: dict[str, Any]
    written: str = field(default="", compare=False)  # the arguments as they were sampled; empty if that is no JSON


def tool_list(tools: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    """Return the entries of a list of tools, or of an MCP `tools/list` result. Raises PromptError."""
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


def shown_tool(tool: Any, where: str = "the tool") -> dict[str, Any]:
    """Return one tool in OpenAI's shape, in the order in which it was sent. Raises PromptError, which names `where`,
    the tool and the path in it."""
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
    for key in schemas:
        if not isinstance(inner[key], Mapping):
            raise PromptError(f"{where}: {key} must be a JSON Schema object, got {type(inner[key]).__name__}")
    if not isinstance(inner.get("description", ""), str | None):
        raise PromptError(f"{where}: description must be a text, got {inner['description']!r}")
    root = f"{where}: $"
    given = {k: v for k, v in inner.items() if v is not None and k not in _FOR_CLIENTS and (wrapped or k != "type")}
    function = {
        "parameters" if key in _SCHEMA_KEYS else key: _plain(value, (root, key), 2)
        for key, value in _named(given, root)
    }
    if not wrapped:
        return {"type": "function", "function": function}
    around = {k: v for k, v in tool.items() if k not in _FOR_CLIENTS and k not in ("type", "function")}
    shown = {key: _plain(value, (root, key), 2) for key, value in _named(around, root)}
    shown |= {"type": "function", "function": function}
    return {key: shown[key] for key in (tool if "type" in tool else ("type", *tool)) if key in shown}


def canonical_tool(tool: Any, where: str = "the tool") -> dict[str, Any]:
    """Return one tool in canonical form. Raises PromptError as `shown_tool`."""
    return _canonical_form(shown_tool(tool, where))


def shown_tools(tools: Sequence[Any] | Mapping[str, Any], order: ToolOrder = "as_sent") -> list[dict[str, Any]]:
    """Return the tools for a template: as they were sent, or `"sorted"`: in canonical form and by name.

    Raises PromptError, also for two tools of one name.
    """
    schemas = [shown_tool(tool, f"tools[{index}]") for index, tool in enumerate(tool_list(tools))]
    first: dict[str, int] = {}
    for index, schema in enumerate(schemas):
        earlier = first.setdefault(tool_name(schema), index)
        if earlier != index:
            raise PromptError(
                f"tools[{earlier}] and tools[{index}] are both called {tool_name(schema)!r}: a call could not say "
                "which is meant; give each tool a name of its own"
            )
    return schemas if order == "as_sent" else sorted(map(_canonical_form, schemas), key=tool_name)


def tool_name(schema: Mapping[str, Any]) -> str:
    """Name of a shown tool."""
    name: str = schema["function"]["name"]
    return name


def tool_text(schema: Mapping[str, Any]) -> str:
    """Return a shown tool as one text, which is the same for any order of its keys and set-like arrays.

    Tools are compared by this text, since Python's own `==` does not tell `0` from `false`.
    """
    return canonical_json(_canonical_form(schema))


def canonical_schema(schema: Any) -> Any:
    """Return a JSON Schema, or a tool in any shape, with object keys and set-like arrays sorted."""
    return _canonical(schema, "schema")


def tools_hash(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Hex digest of a set of shown tools, independent of their order and the order inside them."""
    return json_digest("keepwarm tool set 1", sorted(map(_canonical_form, schemas), key=tool_name))


def in_order_of(schema: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shown tool with its keys and set-like arrays in the order of an earlier one; new ones come last."""
    ordered: dict[str, Any] = _in_order_of(schema, before, "tool")
    return ordered


def declared_ends(tools: Sequence[Any] | Mapping[str, Any]) -> frozenset[str]:
    """Names of the tools after which the request asks for a cut (`cache_control`)."""
    names = set()
    for tool in tool_list(tools):
        inner = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        if tool.get("cache_control") is not None or inner.get("cache_control") is not None:
            names.add(inner["name"])
    return frozenset(names)


def _plain(value: Any, path: _Path, depth: int) -> Any:
    """Copy a JSON value, in its order. Raises PromptError for anything else."""
    if depth > MAX_DEPTH:
        raise PromptError(
            f"{_told(path)} lies deeper than {MAX_DEPTH} levels: use $defs and $ref for a recursive schema"
        )
    if isinstance(value, Mapping):
        return {key: _plain(item, (path, key), depth + 1) for key, item in _named(value, path)}
    if isinstance(value, list | tuple):
        return [_plain(item, (path, index), depth + 1) for index, item in enumerate(value)]
    if isinstance(value, str):
        _check_text(value, path)
    elif not (value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise PromptError(f"{_told(path)} must be a plain JSON value, got {value!r}")
    return value


def _named(value: Mapping[Any, Any], path: _Path) -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if not isinstance(key, str):
            raise PromptError(f"{_told(path)}: the keys of an object must be texts, got {key!r}")
        _check_text(key, path)
        yield key, item


def _check_text(text: str, path: _Path) -> None:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise PromptError(f"{_told(path)} holds half a surrogate pair, which is no Unicode text")


def _told(path: _Path) -> str:
    """Return a path as a text. Call it only for an error, since names may be megabytes long."""
    steps: list[str] = []
    while isinstance(path, tuple):
        path, step = path
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    return path + "".join(reversed(steps))


def _canonical_form(shown: Mapping[str, Any]) -> dict[str, Any]:
    form: dict[str, Any] = _canonical(shown, "tool")
    return form


def _canonical(value: Any, kind: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _canonical(value[key], _kind_under(kind, key)) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return sorted(set(value)) if _is_set(value, kind) else [_canonical(item, _inside(kind)) for item in value]
    return value


def _in_order_of(value: Any, before: Any, kind: str) -> Any:
    if isinstance(value, Mapping) and isinstance(before, Mapping):
        keys = [*(key for key in before if key in value), *(key for key in value if key not in before)]
        return {key: _in_order_of(value[key], before.get(key), _kind_under(kind, key)) for key in keys}
    if isinstance(value, list | tuple) and isinstance(before, list | tuple):
        if _is_set(value, kind):
            return [*(item for item in before if item in value), *(item for item in value if item not in before)]
        pairs = zip_longest(value, before[: len(value)])
        return [_in_order_of(item, earlier, _inside(kind)) for item, earlier in pairs]
    return value


def _is_set(value: Sequence[Any], kind: str) -> bool:
    return kind == "set" and all(isinstance(item, str) for item in value)


def _inside(kind: str) -> str:
    return "data" if kind == "data" else "schema"


def _kind_under(kind: str, key: str) -> str:
    match kind:
        case "tool":
            return "function" if key == "function" else "data"
        case "function":
            return "schema" if key == "parameters" else "data"
        case "data":
            return "data"
        case "schemas by name":
            return "schema"
        case "sets by name":
            return "set"
        case _:
            return _UNDER.get(key, "schema")
