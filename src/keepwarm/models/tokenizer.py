"""A Hugging Face tokenizer behind the `Tokenizer` port."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from keepwarm.errors import TemplateError

Offsets = list[tuple[int, int]]

_REMEMBERED = 8  # texts
_WORTH = 2048  # characters; shorter texts tokenize faster than they are looked up


class HFTokenizer:
    """Ids with the characters each token covers, decoding, and the chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # texts that split a prompt before anything else is tokenized: what stands before them cannot merge with them
        added = getattr(tokenizer, "added_tokens_decoder", {})
        inside_others = "\n".join(token.content[1:] for token in added.values())
        splitters = {
            number: token.content
            for number, token in added.items()
            if token.special
            and not token.lstrip
            and not token.normalized
            and not token.single_word
            and token.content not in inside_others
        }
        self.splitters = tuple(splitters.values())
        self.special_ids = frozenset(splitters)
        self._fast = bool(getattr(tokenizer, "is_fast", False))
        self._memo = PrefixMemo(self._whole, self.special_ids) if self._splits() else None

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], Offsets]:
        """Token ids of the whole text, and the character range of each (none if the tokenizer cannot tell them).

        A rendered chat (`add_special_tokens` off) that begins like an earlier one takes the ids of that beginning from
        there: see `PrefixMemo`.
        """
        if self._memo is not None and not add_special_tokens:
            return self._memo.encode(text)
        return self._whole(text, add_special_tokens)

    def _whole(self, text: str, add_special_tokens: bool = False) -> tuple[list[int], Offsets]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=self._fast)
        ids: list[int] = encoded["input_ids"]
        return ids, list(encoded["offset_mapping"]) if self._fast else []

    def _splits(self) -> bool:
        """Whether cutting before a special token leaves the ids of both sides as they are; tried, not assumed."""
        if not self._fast or not self.splitters:
            return False
        for splitter in (self.splitters[0], self.splitters[-1]):
            for before in ("word", "word ", "a\n\n", "  ", "\u4e2d"):
                for after in ("word", " word", "\n\nb", "  ", "\u4e2d"):
                    ids, offsets = self._whole(before + splitter + after)
                    head, tail = self._whole(before), self._whole(splitter + after)
                    moved = [(a + len(before), b + len(before)) for a, b in tail[1]]
                    if ids != head[0] + tail[0] or offsets != head[1] + moved:
                        return False
        return True

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def template(self, *, tools: bool = False) -> str | None:
        """Source of the chat template; None when the tokenizer has none. Some have one of their own for tools."""
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = (template.get("tool_use") if tools else None) or template.get("default")
        return template if isinstance(template, str) else None

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The chat template's text. Raises TemplateError with the template's own words."""
        import jinja2

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, chat_template=self.template(tools=bool(kwargs.get("tools"))), **kwargs
            )
        except (jinja2.TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise TemplateError(f"the model's chat template refused the messages: {error}") from error
        return text


def cut_at(offsets: Offsets, char: int) -> int:
    """Number of leading tokens that end at or before character `char`: a token across it belongs to what follows."""
    return bisect_right(offsets, char, key=itemgetter(1))


@dataclass(frozen=True, eq=False)
class _Known:
    """An encoded text, and which of its tokens are special (never the first)."""

    text: str
    ids: list[int]
    offsets: Offsets
    places: list[int]


class PrefixMemo:
    """Tokenizes a text as a whole, taking from an earlier text what cannot have changed.

    Tokenizers split a text at special tokens before normalizing and merging, so the ids left of a special token do not
    depend on what follows it. Where two texts agree up to such a place, so do their ids.
    """

    def __init__(self, whole: Callable[[str], tuple[list[int], Offsets]], special: frozenset[int]) -> None:
        self._whole = whole
        self._special = special
        self._known: deque[_Known] = deque(maxlen=_REMEMBERED)

    def encode(self, text: str) -> tuple[list[int], Offsets]:
        """Exactly what tokenizing the whole text gives."""
        count, known = max(
            ((self._shared(text, k), k) for k in tuple(self._known)), key=itemgetter(0), default=(0, None)
        )
        start = known.offsets[count][0] if known is not None else 0
        ids, offsets = self._whole(text[start:])
        if known is not None and count:
            ids = known.ids[:count] + ids
            offsets = known.offsets[:count] + [(a + start, b + start) for a, b in offsets]
        if len(text) - start >= _WORTH:
            places = [place for place, token in enumerate(ids) if place and token in self._special]
            self._known.append(_Known(text, ids, offsets, places))
        return ids, offsets

    @staticmethod
    def _shared(text: str, known: _Known) -> int:
        """Number of tokens left of the last special token up to whose end both texts agree."""

        def differs(place: int) -> bool:
            end = known.offsets[place][1]
            return text[:end] != known.text[:end]

        agreeing = bisect_left(known.places, True, key=differs)
        return known.places[agreeing - 1] if agreeing else 0
