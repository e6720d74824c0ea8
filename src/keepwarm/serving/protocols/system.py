"""What an operator says in Anthropic's protocol: the system prompt, and messages of the role `system`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from typing import Any

from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.schemas import anthropic as shapes

BILLING = "x-anthropic-billing-header"


def system_blocks(system: str | Sequence[shapes.TextBlock] | None) -> tuple[list[shapes.TextBlock], bool]:
    """Return the system prompt without Claude Code's billing header, and whether there was one.

    The header is not meant for the model. It differs with every request, so nothing after it would be found again.
    """
    if isinstance(system, str):
        system = [shapes.TextBlock(type="text", text=system)] if system else None
    kept, found = [], False
    for block in system or ():
        if not block.text.startswith(BILLING):
            kept.append(block)
            continue
        found = True
        if rest := block.text.partition("\n")[2].lstrip("\r\n"):
            kept.append(block.model_copy(update={"text": rest}))
    return kept, found


def check_places(messages: Sequence[Any]) -> None:
    """Raise ApiError for a system message behind others.

    Claude Code knows an error by these words. It then says its environment before the question, where it is reused.
    """
    if any(message.role == "system" for message in dropwhile(lambda message: message.role == "system", messages)):
        raise ApiError(
            "invalid_request",
            "role 'system' behind other messages is not supported here: say it in the system prompt or in a user "
            "message, or have the operator set server.mid_chat_system",
            param="messages",
        )
