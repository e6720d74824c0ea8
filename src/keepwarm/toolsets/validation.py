"""Whether tools are well-formed: JSON Schema's own rules, checked when a set is registered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for

from keepwarm.core.tools import canonical_tools, tool_name
from keepwarm.errors import PromptError


def checked_tools(tools: Sequence[Any] | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Canonical schemas sorted by name. Raises PromptError naming the tool, the JSON path and what is wrong there."""
    schemas = canonical_tools(tools)
    for schema in schemas:
        _check(tool_name(schema), schema["function"].get("parameters", {}))
    return schemas


def _check(name: str, parameters: dict[str, Any]) -> None:
    where = f"tool {name!r}"
    kind = parameters.get("type", "object")
    if kind != "object":
        raise PromptError(f"{where}: $.parameters.type must be 'object', since arguments have names; got {kind!r}")
    rules = validator_for(parameters, default=Draft202012Validator)
    try:
        found = best_match(rules(rules.META_SCHEMA).iter_errors(parameters))
    except RecursionError:
        raise PromptError(f"{where}: the schema is nested too deeply to be checked; use $defs and $ref") from None
    if found is not None:
        raise PromptError(f"{where}: {_path(found.absolute_path)} is no valid JSON Schema: {_short(found)}")
    for path, reference in _local_references(parameters, ()):
        if not _resolves(reference, parameters):
            raise PromptError(f"{where}: {_path(path)} points to {reference!r}, and there is nothing at that place")


def _path(parts: Iterable[str | int]) -> str:
    return "$.parameters" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


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
