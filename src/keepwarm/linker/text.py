"""Text policy: how to tokenize a prompt whose text begins like one that was run before.

Tokenizing is not compositional: the ids of a text's beginning are not always the beginning of its ids. Two ways are
sound:

* canonical: the ids of the whole text, whatever was run before. Ids that cannot have changed are taken from an earlier
  text, up to a place where the ids are verified to agree (`models.tokenizer.PrefixMemo`).
* as generated: the ids that were really run are kept, and only the text after them is tokenized. So the model's own
  output keeps its ids. They are taken up to a place that both texts reach and that no token crosses, never by a token
  count of another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from keepwarm.core.blocks import token_ids
from keepwarm.core.recent import common_length
from keepwarm.core.texts import LEAST_SHARE, Outcome, StoredText, TextMatch
from keepwarm.models.tokenizer import Encoded, HFTokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the result of decoding only the first bytes of a character


class TextPolicy:
    """Tokenizes the prompt of one request. `ran` is the text that it continues as generated, if any."""

    def __init__(
        self, tokenizer: HFTokenizer, ran: StoredText | None = None, *, least_share: float = LEAST_SHARE
    ) -> None:
        """At least `least_share` of a stored text must agree, or its ids are not kept as generated."""
        self._tokenizer = tokenizer
        self._ran = ran
        self._least_share = least_share

    def compile(self, text: str, *, special: bool) -> Encoded:
        """Tokenize a text to ids and characters. `special`: the tokenizer adds its special tokens (raw prompts)."""
        kept = self._as_generated(text) if self._ran is not None else None
        return kept or self._tokenizer.compile(text, special=special)

    def _as_generated(self, text: str) -> Encoded | None:
        ran = self._ran
        assert ran is not None
        matched = common_length(ran.text, text)
        match = TextMatch.of(ran.text, text, matched)
        if match.outcome is Outcome.NEW or match.share < self._least_share:
            return None
        if matched == len(ran.text):
            count, start = len(ran.ids), matched
        else:
            count, start = self._tokenizer.place_before(ran, matched)
        if not count:
            return None
        match = replace(match, kept=count, as_generated=True)
        if start == len(text):
            return Encoded(ran.ids[:count], ran.offsets[:count], match)
        rest = self._tokenizer.follows(text[start:])
        if rest is None:
            return None
        return Encoded(
            np.concatenate([ran.ids[:count], rest.ids]),
            np.concatenate([ran.offsets[:count], rest.offsets + start]),
            match,
        )


def grown(prompt: StoredText, ids: Sequence[int], tokenizer: HFTokenizer) -> StoredText:
    """Return a prompt's text with the answer that was generated after it.

    Special tokens are part of the text, as templates write them. All tokens that share a character's bytes cover it.
    """
    text = prompt.text
    offsets: list[tuple[int, int]] = []
    context, waiting, at = 0, 0, len(text)
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[context:waiting])
        now = tokenizer.decode(ids[context:end])
        if end < len(ids) and (len(now) <= len(before) or now.endswith(_INCOMPLETE)):
            continue
        said = now[len(before) :]
        text += said
        offsets += [(at, at + len(said))] * (end - waiting)
        at += len(said)
        context, waiting = waiting, end
    added = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    return StoredText(text, np.concatenate([prompt.ids, token_ids(ids)]), np.concatenate([prompt.offsets, added]))
