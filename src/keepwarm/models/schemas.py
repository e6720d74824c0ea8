"""Check tools and the schemas of answers by JSON Schema's own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import extend, validator_for

from keepwarm.config import ToolOrder
from keepwarm.core.deadline import go_on
from keepwarm.core.tools import shown_tools, tool_name
from keepwarm.errors import PromptError

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_TEXTS = frozenset({"$comment", "$ref", "description", "format", "pattern", "title"})
_COUNTS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})
_NUMBERS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
_SCHEMAS = frozenset({"additionalProperties", "contains", "items", "not", "propertyNames"})
_NAMED = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_EVERY = 256  # parts of a schema between two checks of the deadline


def checked_tools(tools: Sequence[Any] | Mapping[str, Any], order: ToolOrder = "as_sent") -> list[dict[str, Any]]:
    """Return the tools as they are shown (`core.tools`). Raises PromptError naming the tool, the JSON path and what is
    wrong there."""
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
        plain = rules is Draft202012Validator and _is_plain(schema)
        found = None if plain else best_match(_patient(rules)(rules.META_SCHEMA).iter_errors(schema))
    except RecursionError:
        raise PromptError(f"{where}: the schema is nested too deeply to be checked; use $defs and $ref") from None
    if found is not None:
        place = json_path(found.absolute_path, root)
        raise PromptError(f"{where}: {place} is no valid JSON Schema: {_short(found)}")
    for path, reference in _local_references(schema, ()):
        if not _resolves(reference, schema):
            place = json_path(path, root)
            raise PromptError(f"{where}: {place} points to {reference!r}, and there is nothing at that place")


def _is_plain(schema: Any) -> bool:
    """Whether a schema is certainly valid under draft 2020-12: common words with values of the right types.

    This takes a thousandth of the work of the rules themselves, which check all other schemas.
    """
    waiting = [schema]
    for count, part in enumerate(_drained(waiting)):
        if not count % _EVERY:
            go_on()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            return False
        for word, value in part.items():
            inner = _inner(word, value)
            if inner is None:
                return False
            waiting += inner
    return True


def _drained(waiting: list[Any]) -> Iterator[Any]:
    while waiting:
        yield waiting.pop()


def _inner(word: str, value: Any) -> Iterable[Any] | None:
    """Return the schemas under a word; None if the word is unknown here or its value is not allowed."""
    if word in _NAMED:
        return value.values() if isinstance(value, dict) else None
    if word in _SCHEMAS:
        return (value,)
    if word in _LISTED:
        return value if isinstance(value, list) and value else None
    if word in ("const", "default"):
        return ()
    if word in _TEXTS:
        good = isinstance(value, str)
    elif word == "type":
        good = (isinstance(value, str) and value in _TYPES) or _are_different(value, _TYPES)
    elif word == "required":
        good = value == [] or _are_different(value)
    elif word in ("enum", "examples"):
        good = isinstance(value, list)
    elif word in _COUNTS:
        good = type(value) is int and value >= 0
    elif word in _NUMBERS:
        good = type(value) in (int, float)
    else:
        good = word in ("deprecated", "readOnly", "uniqueItems", "writeOnly") and isinstance(value, bool)
    return () if good else None


def _are_different(value: Any, of: frozenset[str] | None = None) -> bool:
    """Whether `value` is a list of different strings, at least one."""
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        return False
    return len(set(value)) == len(value) and (of is None or of.issuperset(value))


@cache
def _patient(rules: Any) -> Any:
    """Return the rules with a check of the deadline at each word."""

    def asking(rule: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*given: Any) -> Any:
            go_on()
            return rule(*given)

        return checked

    return extend(rules, {word: asking(rule) for word, rule in rules.VALIDATORS.items()})


def json_path(parts: Iterable[str | int], root: str) -> str:
    return root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _short(error: SchemaError) -> str:
    text = error.message
    return text if len(text) <= 200 else f"{text[:200]}..."


def _local_references(value: Any, path: tuple[str | int, ...]) -> Iterable[tuple[tuple[str | int, ...], str]]:
    """Yield every `$ref` into the same schema, with its path, except in parts that are separate documents (`$id`)."""
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
