"""Mistral: `[AVAILABLE_TOOLS]` before the last user message, the system prompt inside `[INST]`, `[TOOL_CALLS]`."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from keepwarm.models import toolcalls
from keepwarm.models.base import Message
from keepwarm.models.generic import GenericAdapter

_ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralAdapter(GenericAdapter):
    """Call ids of other clients are renamed to the nine letters and digits that its templates take."""

    forms = (toolcalls.mistral, toolcalls.bare)
    ends = ("</s>",)

    @property
    def written(self) -> toolcalls.Written:
        """Templates of 2025 and later put each call's name before its arguments, older ones write one list."""
        marker = "[TOOL_CALLS]"
        if "[ARGS]" in self._template:
            return toolcalls.Written(open=marker, between=marker, named="[ARGS]", markers=(marker, "[ARGS]"))
        return toolcalls.Written(open=marker + "[", close="]", between=", ", markers=(marker,))

    def history(self, chat: list[Message]) -> list[Message]:
        return [self._renamed(message, index) for index, message in enumerate(super().history(chat))]

    def _renamed(self, message: Message, index: int) -> Message:
        if isinstance(message.get("tool_calls"), list):
            calls = [
                {**call, "id": call_id(call.get("id") or f"{index} {number}")} if isinstance(call, dict) else call
                for number, call in enumerate(message["tool_calls"])
            ]
            return {**message, "tool_calls": calls}
        if isinstance(given := message.get("tool_call_id"), str):
            return {**message, "tool_call_id": call_id(given)}
        return message


def call_id(given: Any) -> str:
    """Return nine letters and digits for a call id of any form; an id of that form stays."""
    text = str(given)
    return text if _ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]
