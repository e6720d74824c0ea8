"""Streaming answers that may call tools: what may begin a call is held back until it is known to be text."""

from __future__ import annotations

import re

_BEGINNING = re.compile(r"(?:^|\n)[ \t]*(?:```\w*\s*)?[\[{]|<\||<tool|\[TOOL_CALLS\]|```")
_TAGS = ("<|", "<tool", "[TOOL_CALLS]", "```")
_LONGEST = max(map(len, _TAGS))
_LINE = re.compile(r"(?:^|\n)[ \t]*(?:```\w*\s*)?$")


class ToolGate:
    """Takes text, gives out what is certainly not a call. Once a call may have begun, the rest waits for the end."""

    def __init__(self) -> None:
        self.said = ""  # given out
        self._held = ""
        self._call = False

    def push(self, text: str) -> str:
        """Add text; returns what can be given out."""
        self._held += text
        if self._call:
            return ""
        found = _BEGINNING.search(("" if not self.said or self.said.endswith("\n") else "\0") + self._held)
        if found:
            self._call = True
            shift = 0 if not self.said or self.said.endswith("\n") else 1
            return self._give(max(0, found.start() - shift))
        return self._give(len(self._held) - self._waiting())

    def rest(self) -> str:
        """Return the held text, when it was not a call."""
        return self._give(len(self._held))

    def _waiting(self) -> int:
        """Count the characters at the end that may be the first of a call."""
        if line := _LINE.search(self._held):
            at_start = line.start() > 0 or not self.said or self.said.endswith("\n") or self._held[:1] == "\n"
            if at_start:
                return len(self._held) - line.start()
        sizes = range(min(len(self._held), _LONGEST), 0, -1)
        return next((n for n in sizes if any(tag.startswith(self._held[-n:]) for tag in _TAGS)), 0)

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.said += text
        return text
