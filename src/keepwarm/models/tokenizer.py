"""A Hugging Face tokenizer behind the `Tokenizer` port."""

from __future__ import annotations

import copy
import logging
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.recent import common_length
from keepwarm.core.texts import NO_MATCH, StoredText, TextIndex, TextMatch
from keepwarm.errors import PromptTooLong
from keepwarm.models.shortest import Shortest, plain_steps
from keepwarm.models.template import ChatTemplate, Drawn

log = logging.getLogger(__name__)

Offsets = list[tuple[int, int]]

_CHARACTERS = 2 << 20  # of all remembered texts; each takes about 11 bytes of memory
_NEAR = 512  # characters; tokenizing this few is faster than finding a better beginning
_WINDOWS = (256, 4096)  # characters before a difference that are searched for a place to split
_RESYNC = 4  # at least this many tokens before that place are tokenized again, and must come out as before
_BETWEEN_WORDS = re.compile("[A-Za-z](?= [A-Za-z])")
_PROBES = ("word", "word ", "a\n\n", "  ", "\u4e2d", "e\u0301 \u0301x", '{"a b": "c d"}', "don't 123 4567")

# No part of these expressions matches a letter and a space after it, and none looks behind. So a match always ends
# between a word and a space before another word, and what follows is split as if it stood alone.
_SPLIT_BETWEEN_WORDS = frozenset({
    # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Qwen 2 and later
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Mistral's Tekken
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
})


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids `[n]` of a text and the characters `[n, 2]` each covers (`[0, 2]` if the tokenizer cannot tell).

    `match` tells what was taken from an earlier text.
    """

    ids: TokenIds
    offsets: npt.NDArray[np.int64]
    match: TextMatch = NO_MATCH

    def cuts_at(self, chars: Sequence[int]) -> list[int]:
        """Return for each of `chars` how many leading tokens end at or before that character. A token across it belongs
        to the rest."""
        found: list[int] = self.offsets[:, 1].searchsorted(chars, side="right").tolist()
        return found


class HFTokenizer:
    """Ids with the characters each token covers, decoding, and the chat template."""

    def __init__(self, tokenizer: Any, window: int | None = None) -> None:
        """Texts of more than `window` tokens are refused."""
        self._tokenizer = tokenizer
        self._window = window
        self.chat = ChatTemplate(tokenizer)
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
        backend = getattr(tokenizer, "backend_tokenizer", None) if self._fast else None
        self._backend: Any = None  # set once it is seen to give the same results
        if backend is not None and self._agrees(backend):
            self._backend = backend
        self._shortest = Shortest.of(self._backend) if self._backend is not None else None
        words = self._backend is not None and _splits_between_words(self._backend)
        words = words and not any(_BETWEEN_WORDS.search(token.content) for token in added.values())
        specials = self.splitters if self._splits(self.splitters) else ()
        words = words and self._splits((" word",), before=("word", "a b", "\u4e2d d", "d  d"))
        self._memo = (
            PrefixMemo(self._whole, splitters if specials else {}, words)
            if (self._fast and (specials or words))
            else None
        )
        self._added = self._added_before() if self._memo is not None else None

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], Offsets]:
        """Return the text's token ids, and the character range of each (none if the tokenizer cannot tell them)."""
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=self._fast)
        ids: list[int] = encoded["input_ids"]
        return ids, list(encoded["offset_mapping"]) if self._fast else []

    def compile(self, text: str, *, special: bool) -> Encoded:
        """Return what `encode` does as arrays, faster. `special` is its `add_special_tokens`.

        A text that begins like an earlier one takes the ids of that beginning from there: see `PrefixMemo`.
        Raises PromptTooLong, without tokenizing where the text's length shows it.
        """
        if self._window is not None and self._shortest is not None and len(text) > self._window:
            self._check_fits(self._shortest.count(text))
        if self._memo is None or (special and self._added is None):
            return self._whole(text, special)
        encoded = self._memo.encode(text)
        if special and self._added is not None and len(self._added.ids):
            added = self._added
            return Encoded(
                np.concatenate([added.ids, encoded.ids]),
                np.concatenate([added.offsets, encoded.offsets]),
                replace(encoded.match, kept=encoded.match.kept + len(added.ids) if encoded.match.kept else 0),
            )
        return encoded

    def count(self, text: str, *, special: bool) -> int:
        """Return how many tokens a text has, even if they do not fit the window."""
        if not self._as_told:
            return len(self.encode(text, special)[0])
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        return len(found)

    def _check_fits(self, count: int) -> None:
        if self._window is not None and count > self._window:
            raise PromptTooLong(
                f"the prompt is too long: {count} tokens > {self._window} maximum (it has so many or more, and the "
                f"context window is {self._window}): shorten it",
                count,
            )

    def place_before(self, stored: StoredText, char: int) -> tuple[int, int]:
        """Find the last place at or before character `char` where a stored text's ids can be cut. Return how many
        tokens lie before it, and its character. (0, 0) when there is none, or none is known for this tokenizer."""
        return (0, 0) if self._memo is None else self._memo.place_before(stored, char)

    def follows(self, text: str) -> Encoded | None:
        """Tokenize a text by itself, to stand after ids that were run; None if its ids do not decode to that text."""
        encoded = self._whole(text)
        normalizer = getattr(self._backend, "normalizer", None)
        said = normalizer.normalize_str(text) if normalizer is not None else text
        return encoded if self._fast and self.decode(encoded.ids.tolist()) == said else None

    def _whole(self, text: str, special: bool = False) -> Encoded:
        backend = self._backend
        if self._as_told:
            if len(text) <= _NEAR:
                found = backend.encode(text, add_special_tokens=special)
            else:  # `encode` holds the interpreter's lock all the time; a batch of one releases it
                (found,) = backend.encode_batch([text], add_special_tokens=special)
                self._check_fits(len(found))  # the next line makes objects of all of them, holding that lock
            ids, offsets = found.ids, found.offsets
        else:
            ids, offsets = self.encode(text, special)
        return Encoded(token_ids(ids), np.array(offsets, dtype=np.int64).reshape(-1, 2))

    @property
    def _as_told(self) -> bool:
        """Whether the backend now does what the tokenizer's own call would: other users may have changed settings."""
        backend = self._backend
        return (
            backend is not None
            and backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == bool(getattr(self._tokenizer, "split_special_tokens", False))
        )

    def _agrees(self, backend: Any) -> bool:
        """Whether the tokenizer's own call adds nothing to its backend's work; tried, not assumed."""
        for text in (*_PROBES, *(f"{p}{s}{p}" for p in _PROBES for s in self.splitters[:2])):
            for special in (False, True):
                (found,) = backend.encode_batch([text], add_special_tokens=special)
                if self.encode(text, special) != (found.ids, found.offsets):
                    return False
                if any(self.decode(found.ids, skip) != backend.decode(found.ids, skip) for skip in (False, True)):
                    return False
        return True

    def _splits(self, splitters: Sequence[str], before: Sequence[str] = _PROBES) -> bool:
        """Whether cutting before these texts leaves the ids of both sides as they are; tried, not assumed."""
        if not self._fast or not splitters:
            return False
        for splitter in {splitters[0], splitters[-1]}:
            for head in before:
                for tail in _PROBES:
                    ids, offsets = self.encode(head + splitter + tail, False)
                    left, right = self.encode(head, False), self.encode(splitter + tail, False)
                    moved = [(a + len(head), b + len(head)) for a, b in right[1]]
                    if ids != left[0] + right[0] or offsets != left[1] + moved:
                        return False
        return True

    def _added_before(self) -> Encoded | None:
        """Return the tokens that are put before every text (a BOS); None if they vary, or if more is added."""
        added = self._whole("", True)
        for text in (*_PROBES, *(f"{p}{s}{p}" for p in _PROBES[:3] for s in self.splitters[:2])):
            alone, whole = self._whole(text), self._whole(text, True)
            if whole.ids.tolist() != [*added.ids.tolist(), *alone.ids.tolist()] or whole.offsets.tolist() != [
                *added.offsets.tolist(),
                *alone.offsets.tolist(),
            ]:
                return None
        return added

    def forget(self) -> None:
        """Forget the texts of earlier prompts."""
        if self._memo is not None:
            self._memo.clear()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str
        if self._backend is not None:
            text = self._backend.decode(list(ids), skip_special_tokens)
            return text
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_id(self, text: str) -> int | None:
        """Return the id of the added token with exactly this text, if there is one."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return next((number for number, token in added.items() if token.content == text), None)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of all tokens that were added to the vocabulary, special or not."""
        return frozenset(getattr(self._tokenizer, "added_tokens_decoder", {}))

    def description(self) -> str | None:
        """Return the tokenizer as a `tokenizer.json` describes it; None if it is not a fast tokenizer."""
        if not self._fast:
            return None
        backend = copy.copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        text: str = backend.to_str()
        return text

    def template(self, *, tools: bool = False) -> str | None:
        """Source of the chat template; None when the tokenizer has none. Some have a separate one for tools."""
        return self.chat.source(tools=tools)

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """Return the text that the chat template renders. Raises TemplateError with the template's own words."""
        return self.chat.render(messages, **kwargs)

    def draw(self, messages: list[dict[str, Any]], **kwargs: Any) -> Drawn:
        """Render messages as `render` does. Return the text with what is known of its parts."""
        return self.chat.draw(messages, **kwargs)


def _splits_between_words(backend: Any) -> bool:
    """Whether text is always cut between a word and a space before another word, before anything merges."""
    steps = plain_steps(backend)
    if steps is None or backend.model.dropout:
        return False
    if any(step["type"] not in ("Split", "Digits", "ByteLevel") or step.get("add_prefix_space") for step in steps):
        return False
    return any(
        step.get("use_regex")  # GPT-2's expression, which is built in
        or (step.get("pattern", {}).get("Regex") in _SPLIT_BETWEEN_WORDS and step["behavior"] == "Isolated")
        for step in steps
    )


@dataclass(frozen=True, eq=False)
class _Known:
    """An encoded text, and the tokens before which it was split (never the first)."""

    text: str
    encoded: Encoded | StoredText
    places: list[int]
    place_ends: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, encoded: Encoded | StoredText, text: str, splitters: Mapping[int, str]) -> _Known:
        ids = np.fromiter(splitters, dtype=np.uint32)
        found = (np.flatnonzero(np.isin(encoded.ids[1:], ids)) + 1).tolist()
        # A character that the vocabulary lacks gets the id of `<unk>`, without a split: check the text for a splitter.
        places = [at for at in found if text.startswith(splitters[int(encoded.ids[at])], int(encoded.offsets[at, 0]))]
        return cls(text, encoded, places, encoded.offsets[places, 1].tolist())

    def tokens_to(self, char: int) -> int:
        return int(self.encoded.offsets[:, 1].searchsorted(char, side="right"))


class PrefixMemo:
    """Gives the tokens of a whole text, taking from an earlier text what cannot have changed.

    Tokenizers split a text at special tokens before normalizing and merging, so the ids left of a special token do not
    depend on what follows it. Where two texts agree up to such a place, so do their ids. With `words` the same holds
    between a word and a space that another word follows. The new text is tokenized from some tokens before that place,
    and these must come out as they were. If they do not, the tokenizer splits differently and is given whole texts.
    """

    def __init__(self, whole: Callable[[str], Encoded], splitters: Mapping[int, str], words: bool = False) -> None:
        """`splitters` are the special tokens that a text is split at, with their texts."""
        self._whole = whole
        self._splitters = splitters
        self._words = words
        self._known: TextIndex[_Known] = TextIndex(_CHARACTERS)
        self.resyncs = self.failed = 0  # times that ids were compared at a seam, and times that they differed

    def encode(self, text: str) -> Encoded:
        """Return exactly what tokenizing the whole text gives."""
        known = None if self.failed else self._known.find(text)
        if known is None:
            encoded = self._whole(text)
            self._remember(text, encoded, 0, None)
            return encoded
        agreed = common_length(known.text, text)
        count, start = self._place(known, agreed)
        encoded = self._continued(text, known, count, start)
        match = TextMatch.of(known.text, text, agreed, 0 if self.failed else count)
        self._remember(text, encoded, start, known)
        return Encoded(encoded.ids, encoded.offsets, match)

    def place_before(self, stored: StoredText, char: int) -> tuple[int, int]:
        """See `HFTokenizer.place_before`."""
        return self._place(_Known.of(stored, stored.text, self._splitters), char)

    def clear(self) -> None:
        self._known.clear()

    def _continued(self, text: str, known: _Known, count: int, start: int) -> Encoded:
        """Join the ids of `known` up to a place with the text's own from there on, if both agree at the seam."""
        back, earlier = (
            self._place(known, int(known.encoded.offsets[count - _RESYNC, 0])) if (count > _RESYNC) else (0, 0)
        )
        if start - earlier > _WINDOWS[-1]:  # too far to be tokenized again: the place is safe by itself
            back, earlier = count, start
        rest = self._whole(text[earlier:])
        if back < count:
            self.resyncs += 1
            if rest.ids[: count - back].tobytes() != known.encoded.ids[back:count].tobytes():
                self.failed += 1
                log.warning("the tokenizer does not split texts as it seemed to: whole texts are tokenized from now on")
                return self._whole(text)
        return Encoded(
            np.concatenate([known.encoded.ids[:back], rest.ids]),
            np.concatenate([known.encoded.offsets[:back], rest.offsets + earlier]),
        )

    def _remember(self, text: str, encoded: Encoded, start: int, best: _Known | None) -> None:
        """Keep the text if more than a little of it was new; note that `best` was useful."""
        if best is not None:
            self._known.put(best.text, best)
        if len(text) - start >= _NEAR:
            self._known.put(text, _Known.of(encoded, text, self._splitters))

    def _place(self, known: _Known, agreed: int) -> tuple[int, int]:
        """Find the last safe place up to whose end both texts agree: the tokens before it, and its first character."""
        count, start = 0, 0
        number = bisect_right(known.place_ends, agreed)
        if number:
            count = known.places[number - 1]
            start = int(known.encoded.offsets[count, 0])
        for window in _WINDOWS if self._words and agreed - start > _NEAR else ():
            begin = max(start, agreed - window)
            words = deque(_BETWEEN_WORDS.finditer(known.text, begin, agreed), maxlen=1)  # looks ahead to `agreed` only
            if words:
                end = words[0].end()
                tokens = known.tokens_to(end)
                if tokens and known.encoded.offsets[tokens - 1, 1] == end:
                    count, start = tokens, end
                break
        return count, start
