"""Messages and documents as callers send them, made ready for a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from keepwarm.core.identity import canonical_json
from keepwarm.errors import PromptError
from keepwarm.models.base import Message

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_USUAL = {"role", "content"}  # keys of most messages


def plain(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], set[int]]:
    """Return messages of plain values, and the indices of those whose end the request declares a breakpoint.

    Text parts are joined. `cache_control` on a message or on its last part declares the breakpoint. Raises PromptError
    for what cannot be shown.
    """
    chat: list[Message] = []
    declared: set[int] = set()
    for index, message in enumerate(messages):
        if type(message) is dict and message.keys() == _USUAL and {*map(type, (*message, *message.values()))} == {str}:
            chat.append(dict(message))
            continue
        if not isinstance(message, Mapping) or "role" not in message:
            raise PromptError(f"messages[{index}] must be an object with 'role' and 'content', got {message!r}")
        copy = dict(message)
        if copy.pop("cache_control", None) is not None:
            declared.add(index)
        content = copy.get("content")
        if isinstance(content, list | tuple):
            copy["content"], ends = _joined(content, index)
            if ends:
                declared.add(index)
        elif content is None:
            copy["content"] = ""
        elif not isinstance(content, str):
            raise PromptError(f"messages[{index}].content must be text or a list of text parts, got {content!r}")
        chat.append(_values(copy, index))
    return chat, declared


def check_roles(chat: Sequence[Message], template: str) -> None:
    """Raise PromptError for a role that neither chat APIs nor the model's own template know: a template that accepts
    any role would show a misspelt one to the model."""
    for index, message in enumerate(chat):
        role = message["role"]
        if role in _ROLES or (isinstance(role, str) and re.search(rf"""(['"]){re.escape(role)}\1""", template)):
            continue
        raise PromptError(
            f"messages[{index}].role must be one of {', '.join(_ROLES)}, or one that the model's chat template names; "
            f"got {role!r}"
        )


def _joined(content: Sequence[Any], index: int) -> tuple[str, bool]:
    texts = []
    declared = False
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise PromptError(f"messages[{index}].content[{number}] must be a text part, got {part!r}")
        if part.get("cache_control") is not None:
            if number != len(content) - 1:
                raise PromptError(
                    f"messages[{index}].content[{number}]: cache_control is taken on a message's last part; "
                    "split the message there"
                )
            declared = True
        texts.append(str(part["text"]))
    return "".join(texts), declared


def _values(message: Message, index: int) -> Message:
    """Return a message of JSON values of Python's own types, so that a template sees no methods except theirs."""
    if all(type(key) is str and type(value) is str for key, value in message.items()):
        return message
    try:
        copy: Message = json.loads(json.dumps(message, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"messages[{index}] must hold plain JSON values: {error}") from None
    return copy


def document_pair(document: Any) -> tuple[str, str]:
    """Return (title, text) of a document given as text or as an object with `text` and optionally `title`."""
    if isinstance(document, str):
        return "", document
    if isinstance(document, Mapping) and isinstance(document.get("text"), str) and set(document) <= {"text", "title"}:
        return str(document.get("title", "")), document["text"]
    raise PromptError(f"a document is a text or an object with 'text' and at most 'title', got {document!r}")


def document_text(title: str, text: str) -> str:
    label = f" title={canonical_json(title)}" if title else ""
    return f"<document{label}>\n{text}\n</document>"
