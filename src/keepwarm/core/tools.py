"""Tool schemas in one canonical form, so that a set of tools has one rendering and one key.

Object keys and set-like arrays (`required`) are sorted; arrays whose order means something (`enum`, `oneOf`) are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepwarm.errors import PromptError

_SETS = frozenset({"required"})


def canonical(value: Any) -> Any:
    """The canonical form of a JSON Schema or a part of it."""
    if isinstance(value, Mapping):
        return {key: _set_like(key, canonical(value[key])) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    return value


def _set_like(key: str, value: Any) -> Any:
    if key in _SETS and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(set(value))
    return value


def canonical_tools(tools: Sequence[Mapping[str, Any]], *, by_name: bool = True) -> list[dict[str, Any]]:
    """Canonical schemas, sorted by name unless `by_name` is off. Raises PromptError for an entry that is no object."""
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise PromptError(f"tools[{index}] must be an object (a tool schema), got {type(tool).__name__}")
    schemas = [canonical(tool) for tool in tools]
    return sorted(schemas, key=_name) if by_name else schemas


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    holder = function if isinstance(function, Mapping) else tool
    return str(holder.get("name", ""))
