"""What an adapter gives the compiler: the rendered prompt and the places where it may be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from keepwarm.core.spans import SegmentKind

Message = dict[str, Any]  # as a template takes it: "role", "content" and what the family adds


@dataclass(frozen=True)
class Mark:
    """The end of a part of the rendered prompt: a character position, or a token position where only that is stable."""

    kind: SegmentKind
    char: int | None = None
    token: int | None = None
    name: str = ""
    soft: bool = False


@dataclass(frozen=True)
class Rendered:
    """One prompt as text. `special` says whether the tokenizer still adds its own special tokens (raw prompts)."""

    text: str
    marks: tuple[Mark, ...]
    special: bool
    keep_tokens: int | None = None  # only this many leading tokens are meant (a header without its first user message)


class Adapter(Protocol):
    """A model family's prompt format."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[Any] | None = None,
        *,
        answer: bool = True,
    ) -> Rendered:
        """The prompt for the next assistant message (`answer`), or, for warming, only what is given."""
        ...
