"""What an adapter gives the compiler: the rendered prompt and the places where it may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from keepwarm.config import ToolOrder
from keepwarm.core.spans import SegmentKind
from keepwarm.core.tools import ToolCall

Message = dict[str, Any]  # as a template takes it: "role", "content" and what the family adds
Tools = Sequence[Mapping[str, Any]] | Mapping[str, Any]  # in any shape that `core.tools` reads


class Mark(NamedTuple):
    """The end of a part of the rendered prompt: a character position, or a token position where only that is stable."""

    kind: SegmentKind
    char: int | None = None
    token: int | None = None
    name: str = ""
    soft: bool = False
    content: tuple[int, int] | None = None  # characters of the part's own text, where the template adds to it


@dataclass(frozen=True)
class Rendered:
    """One prompt as text. `special` says whether the tokenizer still adds its own special tokens (raw prompts)."""

    text: str
    marks: tuple[Mark, ...]
    special: bool
    keep_tokens: int | None = None  # only this many leading tokens count (a header without its first user message)


class Adapter(Protocol):
    """A model family's prompt format, and the form of its answers."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        documents: Sequence[Any] | None = None,
        *,
        answer: bool = True,
        tool_order: ToolOrder | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the prompt for the next assistant message (`answer`) or, for warming, only what is given.

        `tool_order` overrides the adapter's own, and `template_args` override variables of its template. Raises
        ConfigError for a variable that the template does not read.
        """
        ...

    def reads(self, name: str) -> bool:
        """Return whether the template reads a variable of this name that a request may set."""
        ...

    def found_text(self, tools: Tools, tool_order: ToolOrder | None = None) -> str:
        """Return the text that shows tools in the middle of a conversation which began with others."""
        ...

    def call_parser(self, tools: Tools) -> Callable[[str], list[ToolCall]]:
        """Return `parse_tool_calls` for these tools. They are read now, not when an answer has ended."""
        ...

    def parse_tool_calls(self, text: str, tools: Tools | None = None) -> list[ToolCall]:
        """Return the calls in an answer's text, in order. With `tools`, only calls of these; all else is text."""
        ...

    def call_grammar(
        self,
        tools: Tools,
        choice: str | Mapping[str, str],
        special: Callable[[str], int | None],
        specials: Iterable[int],
        *,
        several: bool = True,
        free: bool = False,
        tool_order: ToolOrder | None = None,
    ) -> str:
        """Return the grammar of an answer with these tools under a `tool_choice`: see `models.grammar.calls_grammar`.
        With `free`, arguments may be any object."""
        ...
