"""Tools with `defer_loading`: each is shown where the conversation first names it, and not before.

So what stands before that place stays as it was, and is found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from keepwarm.models.base import Adapter
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.schemas import anthropic as shapes


class DeferredTools:
    """The tools of one request. Its messages are read in order, and `found` grows with them."""

    def __init__(self, tools: Sequence[shapes.Tool], adapter: Adapter) -> None:
        """Raises ApiError where Anthropic's service does, and PromptError for what is no tool."""
        self._adapter = adapter
        self._later = {tool.name: tool.sent for tool in tools if tool.defer_loading}
        self.shown = [tool.sent for tool in tools if not tool.defer_loading]  # from the beginning
        self.found: list[dict[str, Any]] = []
        self._known = {tool.name for tool in tools if not tool.defer_loading}
        if not self._later:
            return
        if not self.shown:
            raise ApiError("invalid_request", "all tools have defer_loading: one must be shown", param="tools")
        if any(tool.defer_loading and tool.cache_control for tool in tools):
            raise ApiError(
                "invalid_request",
                "a tool with defer_loading has no cache_control, since it is not in the prefix",
                param="tools",
            )
        adapter.found_text([tool.sent for tool in tools])  # a fault is told now, and not when it is named

    def text(self, parts: Sequence[Any]) -> str:
        """Return a result as text: references that follow each other become one list of tools."""
        pieces = []
        for named, group in groupby(parts, key=lambda part: part.type == "tool_reference"):
            if named:
                pieces.append(self._told([part.tool_name for part in group]))
            else:
                pieces.append("".join(part.text for part in group))
        return "\n".join(pieces)

    def _told(self, names: Sequence[str]) -> str:
        again = [name for name in names if name in self._known]
        new = []
        for name in names:
            if name in self._known:
                continue
            if name not in self._later:
                raise ApiError(
                    "invalid_request", f"tool reference {name!r} has no corresponding tool definition", param="messages"
                )
            self._known.add(name)
            new.append(self._later[name])
        self.found += new
        lines = [self._adapter.found_text(new)] if new else []
        lines += [f"You may call {', '.join(again)}, as shown above."] if again else []
        return "\n".join(lines)
