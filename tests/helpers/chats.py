"""Chats and tools as clients send them."""

from __future__ import annotations

from typing import Any

from tests.helpers.tokenizers import wrapped

from keepwarm.models.choose import choose_adapter
from keepwarm.models.generic import GenericAdapter

FILL = {  # reasoning before the answer, as the sender wants it written
    "type": "object",
    "properties": {
        "reasoning": {"type": "string", "description": "Why."},
        "answer": {"type": ["string", "null"], "enum": ["yes", "no", None], "default": None},
        "extra": {"type": "object", "properties": {"z": {"minimum": 0}, "a": {"const": False}}, "required": ["z", "a"]},
    },
    "required": ["reasoning", "answer"],
    "additionalProperties": False,
}


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "write", "description": "Größe, 高さ <b>.", "parameters": FILL}},
    {"type": "function", "function": {"parameters": {"properties": {}, "type": "object"}, "name": "ask"}},
    {"function": {"description": "Last.", "name": "again", "parameters": FILL}, "type": "function"},
]


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hello"}],
]


def adapter(name: str, **settings: Any) -> GenericAdapter:
    return choose_adapter({}, wrapped(name), **settings)
