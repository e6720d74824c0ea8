"""A lower bound on a text's tokens, without tokenizing it: what cannot fit is refused before it costs seconds."""

from __future__ import annotations

import json
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_COMPOSED = 4  # NFC makes a text's UTF-8 at most 3.5 times shorter: U+1FBE U+0308 U+0301 becomes that short
_KEEPING = ("Split", "Digits", "ByteLevel")  # pre-tokenizers that drop no character unless they say so


def plain_steps(backend: Any) -> list[dict[str, Any]] | None:
    """Return the steps in which plain BPE splits a text before anything merges; None for other models, for subword
    prefixes or word suffixes, and for normalizers that do more than compose."""
    model, normalizer, pre = backend.model, backend.normalizer, backend.pre_tokenizer
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix or pre is None:
        return None
    if normalizer is not None and json.loads(normalizer.__getstate__()).get("type") != "NFC":
        return None
    described = json.loads(pre.__getstate__())
    return list(described["pretokenizers"]) if described["type"] == "Sequence" else [described]


class Shortest:
    """The bound for byte-level BPE only: its tokens are made of bytes, and their greatest length is known."""

    def __init__(self, longest: int, dropped: bytes) -> None:
        """A token stands for at most `longest` bytes; the `dropped` ones are in no token."""
        self._longest, self._dropped = longest, dropped

    @classmethod
    def of(cls, backend: Any) -> Shortest | None:
        """Return the bound for a tokenizer's backend; None where it is not known."""
        steps = plain_steps(backend)
        if not steps or steps[-1]["type"] != "ByteLevel":
            return None
        if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in steps):
            return None
        added = backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):  # it takes all white space beside it
            return None
        vocabulary = backend.get_vocab(with_added_tokens=False)
        letters = bytes_to_unicode()
        dropped = bytes(byte for byte, letter in letters.items() if letter not in vocabulary)
        composing = backend.normalizer is not None
        if composing and dropped:
            return None
        longest = max(*map(len, vocabulary), *(len(token.content.encode()) for token in added), 1)
        return cls(longest * (_COMPOSED if composing else 1), dropped)

    def count(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        return len(text.encode(errors="replace").translate(None, self._dropped)) // self._longest
