"""Whether tools and the schemas of answers are well-formed, by JSON Schema's own rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for

from keepwarm.config import ToolOrder
from keepwarm.core.tools import shown_tools, tool_name
from keepwarm.errors import PromptError


def checked_tools(tools: Sequence[Any] | Mapping[str, Any], order: ToolOrder = "as_sent") -> list[dict[str, Any]]:
    """The tools as they are shown (`core.tools`). Raises PromptError naming the tool, the JSON path and what is wrong
    there."""
    schemas = shown_tools(tools, order)
    for schema in schemas:
        check_tool(schema)
    return schemas


def check_tool(schema: Mapping[str, Any]) -> None:
    """Check the parameters of a shown tool. Raises PromptError."""
    parameters = schema["function"].get("parameters", {})
    where = f"tool {tool_name(schema)!r}"
    kind = parameters.get("type", "object")
    if kind != "object":
        raise PromptError(f"{where}: $.parameters.type must be 'object', since arguments have names; got {kind!r}")
    check_schema(parameters, where, "$.parameters")


def check_schema(schema: Mapping[str, Any], where: str, root: str = "$") -> None:
    """Check a JSON Schema by the rules of its own draft. Raises PromptError naming `where` and the path from `root`."""
    rules = validator_for(schema, default=Draft202012Validator)
    try:
        found = best_match(rules(rules.META_SCHEMA).iter_errors(schema))
    except RecursionError:
        raise PromptError(f"{where}: the schema is nested too deeply to be checked; use $defs and $ref") from None
    if found is not None:
        place = json_path(found.absolute_path, root)
        raise PromptError(f"{where}: {place} is no valid JSON Schema: {_short(found)}")
    for path, reference in _local_references(schema, ()):
        if not _resolves(reference, schema):
            place = json_path(path, root)
            raise PromptError(f"{where}: {place} points to {reference!r}, and there is nothing at that place")


def json_path(parts: Iterable[str | int], root: str) -> str:
    return root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _short(error: SchemaError) -> str:
    text = error.message
    return text if len(text) <= 200 else f"{text[:200]}..."


def _local_references(value: Any, path: tuple[str | int, ...]) -> Iterable[tuple[tuple[str | int, ...], str]]:
    """Every `$ref` into the same schema, with its path. Parts that are documents of their own (`$id`) are left out."""
    if isinstance(value, dict):
        if path and isinstance(value.get("$id"), str):
            return
        for key, item in value.items():
            if key in ("const", "default", "enum", "example", "examples"):
                continue
            if key == "$ref" and isinstance(item, str) and (item == "#" or item.startswith("#/")):
                yield (*path, key), item
            else:
                yield from _local_references(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _local_references(item, (*path, index))


def _resolves(reference: str, root: Any) -> bool:
    value = root
    for part in reference.split("/")[1:]:
        part = part.replace("%25", "%").replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False
    return True
