"""Find where the messages of a rendered prompt end: places that nothing after them can move.

The rendering itself shows most ends (`models.watched`). For templates that look ahead, the prompt of the messages so
far is rendered by itself and compared. That is done for the first few hundred messages and then ever more rarely, so
that the work stays in proportion to the prompt. Which messages are rendered depends only on what stands before them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from keepwarm.core.recent import Recent, common_length
from keepwarm.core.spans import SegmentKind
from keepwarm.errors import TemplateError
from keepwarm.models.base import Mark, Message
from keepwarm.models.template import Drawn, message_bytes
from keepwarm.models.tokenizer import HFTokenizer

# user texts with first characters of different classes: what is the same before all of them is the template's own
PROBES = ("Ab", "\n1", " -", "\u4e2d", '{"', "")
_KEPT = 8 << 20  # bytes of what is remembered of beginnings
_MESSAGE = 4096  # characters that take as long to render as a message does
_FREE = 256 * 256 // 2  # messages that are rendered again in any case, over all beginnings
_PER_MESSAGE = 16  # and this many more for each message of the prompt
_DECLARED = 8  # ends declared by the request that are looked for beyond that

_Render = Callable[[], str]


class Beginnings:
    """Finds the ends of messages, remembering the beginnings of earlier conversations by their digests."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: Recent[bytes, tuple[int, bytes]] = Recent(_KEPT)  # length and digest of a rendered beginning

    def forget(self) -> None:
        self._known.clear()

    def marks(
        self,
        drawn: Drawn,
        chat: Sequence[Message],
        first: int,
        kwargs: Mapping[str, Any],
        key: bytes,
        hard: set[int],
        in_place: bool,
    ) -> list[Mark]:
        """Return the ends of the messages from `first` on; `key` names what stands before them.

        Some templates show system prompt and tools with the last user message only (`in_place` is off). The messages
        before it are then looked for without them.
        """
        text = _Text(drawn.text)
        bare = {name: value for name, value in kwargs.items() if name not in ("tools", "documents")}
        work = _Work()
        named = first  # `key` names the messages before this one
        marks = []
        for index in range(first, len(chat)):
            last = index == len(chat) - 1
            end = drawn.said if last and drawn.said is not None else drawn.ends[index] if drawn.ends else None
            if end is None:
                for message in chat[named : index + 1]:  # most templates do not look ahead: then nothing is named
                    sent = message_bytes(message)
                    key = hashlib.sha256(key + sent).digest()
                    work.passed(len(sent))
                named = index + 1
            if end is None and work.affords(declared=index in hard):
                tries = self._tries(chat, index, first, kwargs, bare, key, in_place)
                end = next((found for name, render in tries if (found := self._found(text, name, render, work))), None)
            if end:
                marks.append(Mark(SegmentKind.MESSAGE, char=end, name=chat[index]["role"], soft=index not in hard))
        return marks

    def _tries(
        self,
        chat: Sequence[Message],
        index: int,
        first: int,
        kwargs: Mapping[str, Any],
        bare: Mapping[str, Any],
        key: bytes,
        in_place: bool,
    ) -> Iterator[tuple[bytes, _Render]]:
        """Yield renderings that may be the prompt's beginning up to a message's end, each with its name."""
        so_far = list(chat[: index + 1])
        yield key, lambda: self._text(so_far, kwargs)
        if not in_place:
            yield key + b"bare", lambda: self._text(so_far[first:], bare)
        if chat[index]["role"] == "assistant":
            yield key + b"followed", lambda: self.followed(so_far, kwargs)

    def _found(self, text: _Text, name: bytes, render: _Render, work: _Work) -> int | None:
        """Return the length of a rendering if the text begins with it; None if it does not, or if the template refuses
        (some want complete turns)."""
        work.done()
        known = self._known.get(name)
        if known is None:
            try:
                said = render()
            except TemplateError:
                said = ""
            known = len(said), _Text(said).digest(len(said))
            self._known.put(name, known, len(name))
        length, digest = known
        return length if length and text.digest(length) == digest else None

    def _text(self, chat: list[Message], kwargs: Mapping[str, Any]) -> str:
        return self._tokenizer.render(chat, **kwargs)

    def followed(self, chat: list[Message], kwargs: Mapping[str, Any]) -> str:
        """Return the beginning of every prompt in which a user's message follows these; empty without a special token
        in it. Some templates (Qwen 3's) show an answer differently once it is not the last message.
        """
        try:
            texts = [self._text([*chat, {"role": "user", "content": probe}], kwargs) for probe in PROBES[:2]]
        except TemplateError:
            return ""
        shared = texts[0][: common_length(*texts)]
        at = max((shared.rfind(splitter) for splitter in self._tokenizer.splitters), default=0)
        return shared[: max(at, 0)]


class _Work:
    """How much may be rendered again. It depends on what stands before a message, never on what is remembered."""

    def __init__(self) -> None:
        self._messages = self._characters = self._declared = 0
        self._spent = 0.0

    def passed(self, size: int) -> None:
        self._messages += 1
        self._characters += size

    def affords(self, *, declared: bool) -> bool:
        """Whether the beginning that ends here may be rendered."""
        if declared and self._declared < _DECLARED:
            self._declared += 1
            return True
        return self._spent + self._cost <= _FREE + _PER_MESSAGE * self._cost

    def done(self) -> None:
        """Count that beginning as rendered."""
        self._spent += self._cost

    @property
    def _cost(self) -> float:
        return self._messages + self._characters / _MESSAGE


class _Text:
    """Digests of a text's beginnings. When their lengths rise, all together take the time of one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._hash = hashlib.sha256()

    def digest(self, length: int) -> bytes:
        """Return the digest of the first `length` characters; empty when the text is shorter."""
        if length > len(self._text):
            return b""
        if length < self._at:
            self._at, self._hash = 0, hashlib.sha256()
        self._hash.update(self._text[self._at : length].encode("utf-8", "surrogatepass"))
        self._at = length
        return self._hash.digest()
