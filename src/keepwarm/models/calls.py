"""Calls in earlier answers, made ready for a chat template: as they were sampled, where their ids tell how."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from keepwarm.core.recent import Recent
from keepwarm.core.tools import ToolCall
from keepwarm.errors import TemplateError
from keepwarm.models.base import Message
from keepwarm.models.spelling import Around, Form, call_ids, form_of, function_of, written_again
from keepwarm.models.template import WrittenObject

_PRINTS_TEXTS = re.compile(r"arguments\s+is\s+string")
_SAID, _TOLD = "Zq", "Xr"  # texts of probes
_NAMES = ("f", "g")
_KEPT = 1 << 20  # bytes of what is remembered of answers


class SampledCalls:
    """Calls of one adapter's chats.

    Each of `renders` renders messages by a template that requests may get: some tokenizers have another one for
    requests with tools. `parse` finds the calls in an answer.
    """

    def __init__(
        self, renders: Sequence[Callable[[list[Message]], str]], parse: Callable[[str], list[ToolCall]], template: str
    ) -> None:
        self._renders = renders
        self._known: Recent[bytes, bool] = Recent(_KEPT)
        self._parse = parse
        self._texts = bool(_PRINTS_TEXTS.search(template))  # most print objects

    def forget(self) -> None:
        self._known.clear()

    def shown(self, chat: list[Message]) -> list[Message]:
        """Return the messages with what the template should print for their calls.

        That is the whole text of an answer, if the template would write it otherwise and shows such a text, and else
        its arguments: objects, or texts.
        """
        if not any("tool_calls" in message for message in chat):
            return chat
        return [self._message(message) if isinstance(message.get("tool_calls"), list) else message for message in chat]

    def _message(self, message: Message) -> Message:
        calls, said = message["tool_calls"], message["content"].strip()
        # clients of streams add the white space that follows a text
        own = {"content": said} if calls and all(map(_around, calls)) else {}
        text = self._whole(said, calls)
        if text is not None:
            return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
        return message | own | {"tool_calls": [self._call(call) for call in calls]}

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
        """Return an answer as it was sampled; None if the template writes it so, or in other tags, or if it is not
        known."""
        written: list[tuple[Form, str, str]] = []
        values: list[ToolCall] = []
        for call in calls:
            found, form = function_of(call), _form(call)
            if found is None or form is None or form.around is None or not isinstance(found[0].get("name"), str):
                return None
            function, value = found
            written.append((form, function["name"], form.arguments(function["arguments"], value)))
            values.append(ToolCall(function["name"], value))
        own = [self._own["next" if number else "said" if said else "alone"] for number in range(len(written))]
        pairs = [(form.around, theirs) for (form, _, _), theirs in zip(written, own, strict=True)]
        if all(ours == theirs for ours, theirs in pairs):
            return None
        if any(theirs is not None and ours is not None and ours.tag != theirs.tag for ours, theirs in pairs):
            return None  # a small model that sees its calls without the tags of its family goes on calling
        text = written_again(said, written)
        return text if self._parse(text) == values and self._shows(text, len(said)) else None

    @cached_property
    def _own(self) -> dict[str, Around | None]:
        """How the template writes a call: alone, behind a text, and behind another call."""
        probes = {"alone": ("", 1), "said": (_SAID, 1), "next": ("", 2)}
        found = {name: {self._written(render, *probe) for render in self._renders} for name, probe in probes.items()}
        return {name: each.pop() if len(each) == 1 else None for name, each in found.items()}

    def _written(self, render: Callable[[list[Message]], str], said: str, count: int) -> Around | None:
        """Return what the template writes around the last of some calls; None if it is nothing that an id can tell."""
        calls = [ToolCall(name, {"q": 1}, '{"q": 1}') for name in _NAMES[:count]]
        sent = [
            {"id": f"00000000{n}", "type": "function", "function": {"name": call.name, "arguments": call.written}}
            for n, call in enumerate(calls)
        ]
        message = {"role": "assistant", "content": said, "tool_calls": [self._call(call) for call in sent]}
        chat = [{"role": "user", "content": "Ab"}]
        try:
            without = render([*chat, {"role": "assistant", "content": _SAID}])
            text = render([*chat, message])
        except TemplateError:
            return None
        before, _, after = without.rpartition(_SAID)
        if not (text.startswith(before) and text.endswith(after)):
            return None
        ids = call_ids(text[len(before) : len(text) - len(after)], said, calls)
        return form.around if (form := form_of(ids[-1])) is not None else None

    def _shows(self, answer: str, said: int) -> bool:
        """Whether all templates show what follows the first `said` characters of an answer, and a result after it.

        Some show no results without calls, or take what stands before a "</think>" for reasoning.
        """
        key = hashlib.sha256(f"{said} {answer}".encode("utf-8", "surrogatepass")).digest()
        shows = self._known.get(key)
        if shows is None:
            shows = self._tried(answer, answer[said:].strip())
            self._known.put(key, shows, len(key))
        return shows

    def _tried(self, answer: str, calls: str) -> bool:
        chat = [
            {"role": "user", "content": "Ab"},
            {"role": "assistant", "content": answer},
            {"role": "tool", "tool_call_id": "000000000", "name": "f", "content": _TOLD},
            {"role": "assistant", "content": _SAID},
            {"role": "user", "content": "Cd"},
        ]
        try:
            texts = [render(part) for render in self._renders for part in (chat[:3], chat)]
        except TemplateError:
            return False
        return all(_TOLD in text.partition(calls)[2] for text in texts)


def _form(call: Any) -> Form | None:
    return form_of(call.get("id")) if isinstance(call, dict) else None


def _around(call: Any) -> Around | None:
    return form.around if (form := _form(call)) is not None else None
