"""A Hugging Face tokenizer behind the `Tokenizer` port."""

from __future__ import annotations

import copy
import json
import re
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.models.template import ChatTemplate

Offsets = list[tuple[int, int]]

_REMEMBERED = 32  # texts
_CHARACTERS = 8 << 20  # of all of them
_NEAR = 512  # characters; so few tokenize faster than a better beginning is found for them
_WINDOWS = (256, 4096)  # characters before a difference in which a place to split is looked for
_BETWEEN_WORDS = re.compile("[A-Za-z](?= [A-Za-z])")
_PROBES = ("word", "word ", "a\n\n", "  ", "\u4e2d", "e\u0301 \u0301x", '{"a b": "c d"}', "don't 123 4567")

# In these expressions nothing matches a letter followed by a space, and nothing looks behind: a match always ends
# between a word and a space with another word, and what follows is split as if it stood alone.
_SPLIT_BETWEEN_WORDS = frozenset({
    # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Qwen 2 and later
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Mistral's Tekken
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids `[n]` of a text and the characters `[n, 2]` each covers (`[0, 2]` if the tokenizer cannot tell)."""

    ids: TokenIds
    offsets: npt.NDArray[np.int64]

    def cut_at(self, char: int) -> int:
        """Number of leading tokens that end at or before character `char`: one across it belongs to what follows."""
        return int(np.searchsorted(self.offsets[:, 1], char, side="right"))


class HFTokenizer:
    """Ids with the characters each token covers, decoding, and the chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
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
        self._backend = getattr(tokenizer, "backend_tokenizer", None) if self._fast else None
        if self._backend is not None and not self._agrees(self._backend):
            self._backend = None
        words = self._backend is not None and _splits_between_words(self._backend)
        words = words and not any(_BETWEEN_WORDS.search(token.content) for token in added.values())
        specials = self.splitters if self._splits(self.splitters) else ()
        words = words and self._splits((" word",), before=("word", "a b", "\u4e2d d", "d  d"))
        self._memo = PrefixMemo(self._whole, self.special_ids if specials else frozenset(), words) if (
            self._fast and (specials or words)
        ) else None  # fmt: skip

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], Offsets]:
        """Token ids of the whole text, and the character range of each (none if the tokenizer cannot tell them)."""
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=self._fast)
        ids: list[int] = encoded["input_ids"]
        return ids, list(encoded["offset_mapping"]) if self._fast else []

    def compile(self, text: str, *, special: bool) -> Encoded:
        """The same as arrays, quickly; `special` as `add_special_tokens` of `encode`.

        A rendered chat (not `special`) that begins like an earlier one takes the ids of that beginning from there: see
        `PrefixMemo`.
        """
        if self._memo is not None and not special:
            return self._memo.encode(text)
        return self._whole(text, special)

    def _whole(self, text: str, special: bool = False) -> Encoded:
        backend = self._backend
        if (
            backend is not None
            and backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == bool(getattr(self._tokenizer, "split_special_tokens", False))
        ):
            found = backend.encode(text, add_special_tokens=special)
            ids, offsets = found.ids, found.offsets
        else:
            ids, offsets = self.encode(text, special)
        return Encoded(token_ids(ids), np.array(offsets, dtype=np.int64).reshape(-1, 2))

    def _agrees(self, backend: Any) -> bool:
        """Whether the tokenizer's own call adds nothing to its backend's work; tried, not assumed."""
        for text in (*_PROBES, *(f"{p}{s}{p}" for p in _PROBES for s in self.splitters[:2])):
            for special in (False, True):
                found = backend.encode(text, add_special_tokens=special)
                if self.encode(text, special) != (found.ids, found.offsets):
                    return False
        return True

    def _splits(self, splitters: Sequence[str], before: Sequence[str] = _PROBES) -> bool:
        """Whether cutting before such a text leaves the ids of both sides as they are; tried, not assumed."""
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

    def forget(self) -> None:
        """Forget the texts of earlier prompts."""
        if self._memo is not None:
            self._memo.clear()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_id(self, text: str) -> int | None:
        """Id of the added token with this very text, if there is one."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return next((number for number, token in added.items() if token.content == text), None)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of all tokens that were added to the vocabulary, special or not."""
        return frozenset(getattr(self._tokenizer, "added_tokens_decoder", {}))

    def description(self) -> str | None:
        """The tokenizer as a `tokenizer.json` describes it; None for one that is not of the fast kind."""
        if not self._fast:
            return None
        backend = copy.copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        text: str = backend.to_str()
        return text

    def template(self, *, tools: bool = False) -> str | None:
        """Source of the chat template; None when the tokenizer has none. Some have one of their own for tools."""
        return self.chat.source(tools=tools)

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The chat template's text. Raises TemplateError with the template's own words."""
        return self.chat.render(messages, **kwargs)

    def render_to_end(self, messages: list[dict[str, Any]], **kwargs: Any) -> tuple[str, int | None]:
        """The same, and how much of it there is without the beginning of an answer (None: not known)."""
        return self.chat.render_to_end(messages, **kwargs)


def _splits_between_words(backend: Any) -> bool:
    """Whether text is cut between a word and a space with another word before anything merges, whatever is around."""
    model, normalizer, pre = backend.model, backend.normalizer, backend.pre_tokenizer
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if pre is None or (normalizer is not None and json.loads(normalizer.__getstate__()).get("type") != "NFC"):
        return False
    described = json.loads(pre.__getstate__())
    steps = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    if any(step["type"] not in ("Split", "Digits", "ByteLevel") or step.get("add_prefix_space") for step in steps):
        return False
    return any(
        step.get("use_regex")  # GPT-2's expression, which is built in
        or (step.get("pattern", {}).get("Regex") in _SPLIT_BETWEEN_WORDS and step["behavior"] == "Isolated")
        for step in steps
    )


@dataclass(frozen=True, eq=False)
class _Known:
    """An encoded text, its characters as numbers, and which of its tokens are special (never the first)."""

    text: str
    chars: npt.NDArray[np.uint32]
    encoded: Encoded
    places: list[int]
    place_ends: list[int] = field(default_factory=list)


class PrefixMemo:
    """Tokenizes a text as a whole, taking from an earlier text what cannot have changed.

    Tokenizers split a text at special tokens before normalizing and merging, so the ids left of a special token do not
    depend on what follows it. Where two texts agree up to such a place, so do their ids. With `words` the same holds
    between a word and a space that another word follows.
    """

    def __init__(self, whole: Callable[[str], Encoded], special: frozenset[int], words: bool = False) -> None:
        self._whole = whole
        self._special = np.array(sorted(special), dtype=np.uint32)
        self._words = words
        self._lock = threading.Lock()
        self._known: list[_Known] = []  # the last one used is the last

    def encode(self, text: str) -> Encoded:
        """Exactly what tokenizing the whole text gives."""
        chars = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        count, start, best = 0, 0, None
        with self._lock:
            remembered = self._known[::-1]
        for known in remembered:
            if text.startswith(known.text[: start + 1]):  # else it shares less than the best
                tokens, at = self._shared(chars, known)
                if tokens > count:
                    count, start, best = tokens, at, known
                if len(text) - start < _NEAR:
                    break
        encoded = self._whole(text[start:])
        if best is not None:
            encoded = Encoded(
                np.concatenate([best.encoded.ids[:count], encoded.ids]),
                np.concatenate([best.encoded.offsets[:count], encoded.offsets + start]),
            )
        self._remember(text, chars, encoded, start, best)
        return encoded

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def _remember(
        self, text: str, chars: npt.NDArray[np.uint32], encoded: Encoded, start: int, best: _Known | None
    ) -> None:
        """Keep the text if more than a little of it was new; note that `best` was of use."""
        new = None
        if len(text) - start >= _NEAR:
            places = np.flatnonzero(np.isin(encoded.ids[1:], self._special)) + 1
            new = _Known(text, chars, encoded, places.tolist(), encoded.offsets[places, 1].tolist())
        with self._lock:
            if best is not None and best in self._known:
                self._known.remove(best)
                self._known.append(best)
            if new is not None:
                self._known.append(new)
            while len(self._known) > _REMEMBERED or sum(len(known.text) for known in self._known) > _CHARACTERS:
                del self._known[0]

    def _shared(self, chars: npt.NDArray[np.uint32], known: _Known) -> tuple[int, int]:
        """Tokens left of the last safe place up to whose end both texts agree, and the character it begins at."""
        size = min(len(chars), len(known.chars))
        differ = chars[:size] != known.chars[:size]
        agreed = int(differ.argmax()) if differ.any() else size
        count, start = 0, 0
        number = bisect_right(known.place_ends, agreed)
        if number:
            count = known.places[number - 1]
            start = int(known.encoded.offsets[count, 0])
        for window in _WINDOWS if self._words and agreed - start > _NEAR else ():
            first = max(start, agreed - window)
            words = deque(_BETWEEN_WORDS.finditer(known.text, first, agreed), maxlen=1)  # looks ahead to `agreed` only
            if words:
                end = words[0].end()
                tokens = known.encoded.cut_at(end)
                if tokens and known.encoded.offsets[tokens - 1, 1] == end:
                    count, start = tokens, end
                break
        return count, start
