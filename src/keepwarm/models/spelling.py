"""How a model wrote a call, told by the call's id.

Clients take a call apart and write its arguments anew, in their own style, and chat templates write what stands around
them. A prompt with that text differs from what was sampled, and all that follows is computed again. Clients send a
call's id as they got it, so the id tells how the call was written. From it and what the client sends, the same text is
made again, and the prompt depends on nothing but the request.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepwarm.core.tools import ToolCall

# Places here and in `_AROUNDS` are numbers in ids: never move one, add at the end. An id that is read otherwise by
# another version only costs the reuse of its call.
_STYLES: tuple[Callable[[Any], str] | None, ...] = (
    lambda value: json.dumps(value, ensure_ascii=False),  # as chat templates write
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    json.dumps,
    lambda value: json.dumps(value, separators=(",", ":")),
    lambda value: json.dumps(value, ensure_ascii=False, indent=2),
    lambda value: json.dumps(value, ensure_ascii=False, indent=4),
    lambda value: json.dumps(value, ensure_ascii=False, indent=2).replace("\n", "\n  "),  # inside an indented object
    lambda value: json.dumps(value, ensure_ascii=False, indent=4).replace("\n", "\n    "),
    None,  # none of these: shown as the client sends it
)
_KEYS = ("arguments", "parameters")
_LAYOUTS = (  # before the name, before the key, before the arguments, after them
    ('{"name": ', ', "', '": ', "}"),
    ('{"name":', ',"', '":', "}"),
    ('{\n  "name": ', ',\n  "', '": ', "\n}"),
    ('{\n    "name": ', ',\n    "', '": ', "\n}"),
)
_FENCES = (  # the longer ones first: the last one fits everywhere
    ("<tool_call>\n", "\n</tool_call>"),
    ("<tool_call>", "</tool_call>"),
    ("```json\n", "\n```"),
    ("```\n", "\n```"),
    ("", ""),
)
_GAPS = ("", "\n", "\n\n", " ")
_MOST_STYLES = 12  # there is room for a few more
_DIGITS = string.digits + string.ascii_letters
_MARK = "kw"
_PLACES = 8  # of equal arguments in a text that are looked at


@dataclass(frozen=True)
class Around:
    """What stands around the arguments of a call, as places in the tuples above."""

    layout: int
    fence: int
    key: int
    gap: int  # white space before the call

    def texts(self, name: str) -> tuple[str, str]:
        """Return the texts before and after the arguments of a call of this tool, without the gap."""
        before, key, arguments, end = _LAYOUTS[self.layout]
        opening, closing = _FENCES[self.fence]
        return f"{opening}{before}{plain_text(name)}{key}{_KEYS[self.key]}{arguments}", end + closing

    @property
    def tag(self) -> str:
        """What tells that a call begins; empty where nothing does."""
        return _FENCES[self.fence][0].strip()

    @property
    def gap_text(self) -> str:
        return _GAPS[self.gap]


@dataclass(frozen=True)
class Form:
    """How a call was written: the style of its arguments, and what stood around them, if that is known."""

    style: int
    around: Around | None = None

    def arguments(self, sent: str, value: Any) -> str:
        """Return the arguments as they were sampled, from the client's text and the value in it. If they were in a
        style of their own and the client wrote them anew, they are written as templates do."""
        if (text := _text(self.style, value)) is not None:
            return text
        return plain_text(value) if any(_text(style, value) == sent for style in range(len(_STYLES))) else sent


_AROUNDS = [
    Around(layout, fence, key, gap)
    for layout in range(len(_LAYOUTS))
    for fence in range(len(_FENCES))
    for key in range(len(_KEYS))
    for gap in range(len(_GAPS))
]
_NUMBERS: dict[Around | None, int] = {around: number for number, around in enumerate(_AROUNDS, 1)}


def plain_text(value: Any) -> str:
    """Return a value as JSON, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def arguments_text(call: ToolCall) -> str:
    """Return a call's arguments as JSON: as they were sampled, where that is JSON."""
    return call.written or plain_text(call.arguments)


def call_ids(text: str, said: str, calls: Sequence[ToolCall], *, whole: bool = True) -> list[str]:
    """Make the ids of an answer's calls: nine letters and digits each, as Mistral's templates want them.

    `said` is what clients are given as the answer's text beside the calls. Without `whole`, special tokens are missing
    in `text`, so that nothing is known of what stands around the arguments.
    """
    arounds = _arounds(text, said.strip(), calls) if whole else None
    return [_id(Form(_style(call), arounds[number] if arounds else None)) for number, call in enumerate(calls)]


def form_of(call_id: Any) -> Form | None:
    """Return how the call with this id was written; None for an id of another service."""
    if not isinstance(call_id, str) or len(call_id) != 9 or not call_id.startswith(_MARK):
        return None
    digits = [_DIGITS.find(letter) for letter in call_id[2:]]
    around, style = divmod(digits[0] * len(_DIGITS) + digits[1], _MOST_STYLES)
    if min(digits) < 0 or around > len(_AROUNDS) or style >= len(_STYLES):
        return None
    return Form(style, _AROUNDS[around - 1] if around else None)


def written_again(said: str, calls: Sequence[tuple[Form, str, str]]) -> str:
    """Return an answer as it was sampled, from its text beside the calls and each call's form, name and arguments."""
    text = said.strip()
    for form, name, arguments in calls:
        assert form.around is not None
        before, after = form.around.texts(name)
        text += form.around.gap_text + before + arguments + after
    return text


def function_of(call: Any) -> tuple[Mapping[str, Any], dict[str, Any]] | None:
    """Return the function of a call in OpenAI's shape, and its arguments as an object; None where they are none.

    Clients that put a stream together send an empty text where there are no arguments: it becomes an empty object.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return None
    function = {**function, "arguments": function["arguments"] or "{}"}
    try:
        value = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return None
    return (function, value) if isinstance(value, dict) else None


def _id(form: Form) -> str:
    number = _NUMBERS.get(form.around, 0) * _MOST_STYLES + form.style
    code = "".join(_DIGITS[digit] for digit in divmod(number, len(_DIGITS)))
    return _MARK + code + "".join(secrets.choice(_DIGITS) for _ in range(5))


def _style(call: ToolCall) -> int:
    text = arguments_text(call)
    return next(n for n in range(len(_STYLES)) if _text(n, call.arguments) in (text, None))


def _text(style: int, value: Any) -> str | None:
    """Return a value in a style; None if that is not known."""
    write = _STYLES[style]
    try:
        return None if write is None else write(value)
    except RecursionError:
        return None


def _arounds(text: str, said: str, calls: Sequence[ToolCall]) -> list[Around] | None:
    """Return what stands around each call; None unless they and what was said make the whole text."""
    found: list[Around] = []
    at = len(said) if text.startswith(said) else -1
    for call in calls:
        place = _place(text, at, call) if at >= 0 and call.written else None
        if place is None:
            return None
        at = place[1]
        found.append(place[0])
    return None if text[at:].strip() else found


def _place(text: str, at: int, call: ToolCall) -> tuple[Around, int] | None:
    """Return what stands around the next call from `at` on, and where it ends."""
    place = at
    for _ in range(_PLACES):
        place = text.find(call.written, place + 1)
        if place < 0:
            return None
        for around in _AROUNDS:
            before, after = around.texts(call.name)
            opening, end = around.gap_text + before, place + len(call.written)
            if text.startswith(opening, at) and at + len(opening) == place and text.startswith(after, end):
                return around, end + len(after)
    return None
