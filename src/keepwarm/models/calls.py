"""Calls in earlier answers, made ready for a chat template: as they were sampled, where their ids tell how."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from keepwarm.core.tools import ToolCall
from keepwarm.errors import TemplateError
from keepwarm.models.base import Message
from keepwarm.models.spelling import Around, Form, call_ids, form_of, function_of, written_again
from keepwarm.models.template import WrittenObject

_PRINTS_TEXTS = re.compile(r"arguments\s+is\s+string")
_SAID, _TOLD = "Zq", "Xr"  # texts of probes
_NAMES = ("f", "g")


class SampledCalls:
    """Calls of one adapter's chats.

    `render` renders messages by the template, and `parse` finds the calls in an answer.
    """

    def __init__(
        self, render: Callable[[list[Message]], str], parse: Callable[[str], list[ToolCall]], template: str
    ) -> None:
        self._render = render
        self._parse = parse
        self._texts = bool(_PRINTS_TEXTS.search(template))  # most print objects

    def shown(self, chat: list[Message]) -> list[Message]:
        """Return the messages with what the template should print for their calls.

        That is the whole text of an answer, if the template would write it otherwise and shows such a text, and else
        its arguments: objects, or texts.
        """
        if not any("tool_calls" in message for message in chat):
            return chat
        return [self._message(message) if isinstance(message.get("tool_calls"), list) else message for message in chat]

    def _message(self, message: Message) -> Message:
        calls = message["tool_calls"]
        text = self._whole(message["content"], calls)
        if text is not None:
            return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
        return message | {"tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Any) -> Any:
        found = function_of(call)
        if found is None:
            return call
        function, value = found
        form, sent = form_of(call.get("id")), function["arguments"]
        sampled = sent if form is None else form.arguments(sent, value)
        if not self._texts:
            sampled = value if form is None else WrittenObject(value, sampled)
        return {**call, "function": {**function, "arguments": sampled}}

    def _whole(self, said: str, calls: Sequence[Any]) -> str | None:
        """Return an answer as it was sampled; None if the template writes it so, or if it is not known."""
        written: list[tuple[Form, str, str]] = []
        values: list[ToolCall] = []
        for call in calls:
            found, form = function_of(call), form_of(call.get("id")) if isinstance(call, dict) else None
            if found is None or form is None or form.around is None or not isinstance(found[0].get("name"), str):
                return None
            function, value = found
            written.append((form, function["name"], form.arguments(function["arguments"], value)))
            values.append(ToolCall(function["name"], value))
        own = self._own
        first = own["said" if said.strip() else "alone"]
        if all(form.around == (own["next"] if n else first) for n, (form, _, _) in enumerate(written)):
            return None
        text = written_again(said, written)
        return text if self._shows_texts and self._parse(text) == values else None

    @cached_property
    def _own(self) -> dict[str, Around | None]:
        """How the template writes a call: alone, behind a text, and behind another call."""
        alone, behind = self._written("", 1), self._written(_SAID, 1)
        following = self._written("", 2)
        return {
            "alone": alone[0] if alone else None,
            "said": behind[0] if behind else None,
            "next": following[1] if following else None,
        }

    def _written(self, said: str, count: int) -> list[Around] | None:
        """Return what the template writes around calls; None if it is nothing that an id can tell."""
        calls = [ToolCall(name, {"q": 1}, '{"q": 1}') for name in _NAMES[:count]]
        sent = [
            {"id": f"00000000{n}", "type": "function", "function": {"name": call.name, "arguments": call.written}}
            for n, call in enumerate(calls)
        ]
        message = {"role": "assistant", "content": said, "tool_calls": [self._call(call) for call in sent]}
        chat = [{"role": "user", "content": "Ab"}]
        try:
            without = self._render([*chat, {"role": "assistant", "content": _SAID}])
            text = self._render([*chat, message])
        except TemplateError:
            return None
        before, _, after = without.rpartition(_SAID)
        if not (text.startswith(before) and text.endswith(after)):
            return None
        ids = call_ids(text[len(before) : len(text) - len(after)], said, calls)
        forms = [form_of(one) for one in ids]
        arounds = [form.around for form in forms if form is not None and form.around is not None]
        return arounds if len(arounds) == count else None

    @cached_property
    def _shows_texts(self) -> bool:
        """Whether the template shows an answer with a call as text, and the call's result after it."""
        text = '```json\n{"name": "f", "arguments": {"q": 1}}\n```'
        chat = [
            {"role": "user", "content": "Ab"},
            {"role": "assistant", "content": text},
            {"role": "tool", "tool_call_id": "000000000", "name": "f", "content": _TOLD},
            {"role": "assistant", "content": _SAID},
            {"role": "user", "content": "Cd"},
        ]
        try:
            return _TOLD in self._render(chat).partition(text)[2] and text in self._render(chat[:3])
        except TemplateError:
            return False
