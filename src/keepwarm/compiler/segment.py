"""From a request to tokens, segments and breakpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.identity import salt_key
from keepwarm.core.lora import Lora
from keepwarm.core.request import Request
from keepwarm.core.schedule import Breakpoint
from keepwarm.core.spans import Segment, SegmentKind
from keepwarm.core.texts import NO_MATCH, StoredText, TextMatch
from keepwarm.errors import ConfigError, EmptyPrompt, PromptError
from keepwarm.models.base import Adapter, Mark, Rendered
from keepwarm.models.tokenizer import Encoded


class Encoder(Protocol):
    """Turns a whole prompt's text into ids: a tokenizer, or the text policy over one."""

    def compile(self, text: str, *, special: bool) -> Encoded: ...


_HEADER = (SegmentKind.SYSTEM, SegmentKind.TOOLS, SegmentKind.DOCUMENT)


@dataclass(frozen=True)
class CompiledPrompt:
    """Tokens of the whole prompt, its segments (covering all tokens) and declared breakpoints."""

    tokens: TokenIds
    segments: tuple[Segment, ...]
    breakpoints: tuple[Breakpoint, ...]
    extra_keys: dict[int, bytes] = field(default_factory=dict)
    text: str = ""  # rendered; empty for a prompt of token ids
    offsets: npt.NDArray[np.int64] | None = None  # characters `[n, 2]` of each token, if they are known
    templated: bool = False  # rendered with the chat template
    match: TextMatch = NO_MATCH  # how the text relates to one that was seen before
    contents: dict[int, tuple[int, int]] = field(default_factory=dict)  # characters of segments' text, by token end
    lora: Lora | None = None  # the adapter with which it is computed
    keep: int | None = None  # nothing after this position is worth storing; None: everything is

    @property
    def source(self) -> StoredText | None:
        """The text with its character-to-token map; None for ids, or if the characters are not known."""
        return StoredText(self.text, self.tokens, self.offsets) if self.offsets is not None and self.text else None


def segment(request: Request, encoder: Encoder, adapter: Adapter) -> CompiledPrompt:
    """Compile a request. Raises ConfigError, PromptError, EmptyPrompt, TemplateError."""
    compiled = _segmented(request, encoder, adapter)
    keep = request.cacheable_prefix
    if keep is None or keep >= len(compiled.tokens):
        return compiled
    points = {point.position: point for point in compiled.breakpoints}
    points[keep] = Breakpoint(keep, label="cacheable_prefix")
    return replace(compiled, breakpoints=tuple(points[at] for at in sorted(points) if at), keep=keep)


def _segmented(request: Request, encoder: Encoder, adapter: Adapter) -> CompiledPrompt:
    extra = {0: salt_key(request.salt)} if request.salt is not None else {}
    if request.prompt is not None and not isinstance(request.prompt, str):
        _only(request, "prompt")
        ids = _checked_ids(request.prompt)
        return CompiledPrompt(ids, (Segment(SegmentKind.PROMPT, 0, len(ids)),), (), extra)
    rendered = render(request, adapter)
    try:
        rendered.text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt holds half a surrogate pair, which is no Unicode text: {error}") from None
    encoded = encoder.compile(rendered.text, special=rendered.special)
    if rendered.keep_tokens is not None:
        kept = rendered.keep_tokens
        encoded = Encoded(encoded.ids[:kept], encoded.offsets[:kept])
    tokens = encoded.ids
    if not len(tokens):
        raise EmptyPrompt("the prompt has no tokens; pass some text or messages")
    ends = _ends(rendered.marks, encoded)
    points = _breakpoints(ends)
    contents = {at: found for at, mark in ends if (found := mark.content or (mark.char and (0, mark.char)))}
    if extra and request.public_header:
        extra = {_header_end(ends, points, len(tokens)): salt_key(str(request.salt))}
    return CompiledPrompt(
        tokens,
        _segments(ends, len(tokens)),
        points,
        extra,
        rendered.text,
        encoded.offsets if len(encoded.offsets) else None,
        request.prompt is None and request.segments is None,
        encoded.match,
        contents,
    )


def render(request: Request, adapter: Adapter) -> Rendered:
    """Render a request's text. Raises what `segment` raises."""
    if request.prompt is not None:
        _only(request, "prompt")
        assert isinstance(request.prompt, str)
        return Rendered(request.prompt, (), special=True)
    if request.segments is not None:
        _only(request, "segments")
        text, marks = "", []
        for number, part in enumerate(request.segments):
            if not isinstance(part, str):
                raise PromptError(f"segments[{number}] must be a text, got {part!r}")
            text += part
            marks.append(Mark(SegmentKind.SEGMENT, char=len(text), name=str(number)))
        return Rendered(text, tuple(marks), special=True)
    if request.messages is None and (request.answer or not (request.tools or request.documents)):
        raise ConfigError("pass prompt=, messages= or segments=; nothing was given to run")
    messages = list(request.messages or ())
    if not messages and request.answer:
        raise EmptyPrompt("messages is empty; pass at least one message")
    return adapter.render(
        messages,
        request.tools,
        request.documents,
        answer=request.answer,
        tool_order=request.tool_order,
        template_args=request.template_args,
    )


def _only(request: Request, name: str) -> None:
    names = ("prompt", "messages", "tools", "found_tools", "documents", "segments", "template_args")
    if others := [other for other in names if other != name and getattr(request, other) is not None]:
        raise ConfigError(f"{name}= is a whole prompt: leave out {', '.join(others)}")


def _checked_ids(ids: Sequence[int]) -> TokenIds:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        first: object = ids[0] if len(ids) else None
        hint = "; give messages as messages=" if isinstance(first, dict) else ""
        raise PromptError(f"prompt must be a text or a flat list of token ids, got {type(ids).__name__}{hint}")
    if not array.size:
        raise EmptyPrompt("the prompt has no tokens; pass some text or token ids")
    if array.min() < 0:
        raise PromptError(f"token ids cannot be negative, got {int(array.min())}")
    if array.max() > np.iinfo(np.uint32).max:
        raise PromptError(f"token id {int(array.max())} is in no vocabulary")
    return token_ids(array)


def _ends(marks: Sequence[Mark], encoded: Encoded) -> list[tuple[int, Mark]]:
    """Return marks as token positions, in order. Without known characters, marks by character are left out."""
    cuts = encoded.cuts_at([mark.char or 0 for mark in marks])
    known = bool(len(encoded.offsets))
    ends = [
        (cut if mark.token is None else mark.token, mark)
        for mark, cut in zip(marks, cuts, strict=True)
        if mark.token is not None or (mark.char is not None and known)
    ]
    ends.sort(key=lambda item: item[0])
    return [(at, mark) for at, mark in ends if 0 < at <= len(encoded.ids)]


def _header_end(ends: Sequence[tuple[int, Mark]], points: Sequence[Breakpoint], length: int) -> int:
    """Return where tools, system prompt and documents end, if there is certainly a cut; else 0: all is private."""
    header = max((at for at, mark in ends if mark.kind in _HEADER), default=0)
    first = min((at for at, mark in ends if mark.kind not in _HEADER), default=length)
    cut = any(point.position == header and not point.soft for point in points)
    return header if cut and header <= first and header < length else 0


def _segments(ends: list[tuple[int, Mark]], length: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    start = 0
    for at, mark in ends:
        if at > start:
            segments.append(Segment(mark.kind, start, at, mark.name))
            start = at
    if start < length:
        kind = SegmentKind.TAIL if segments else SegmentKind.PROMPT
        segments.append(Segment(kind, start, length))
    return tuple(segments)


def _breakpoints(ends: list[tuple[int, Mark]]) -> tuple[Breakpoint, ...]:
    """Return one breakpoint per position; hard ones take precedence over soft ones."""
    points: dict[int, Breakpoint] = {}
    for at, mark in ends:
        if at not in points or (points[at].soft and not mark.soft):
            points[at] = Breakpoint(at, mark.soft, mark.name or mark.kind.value)
    return tuple(points[at] for at in sorted(points))
