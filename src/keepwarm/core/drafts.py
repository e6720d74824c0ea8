"""Tokens drafted for an answer: what followed the same tokens earlier in the prompt and the answer.

A step that computes a few rows takes hardly longer than one that computes a single row, since both read all weights.
So the rows of drafted tokens run beside the newest token's. As far as a draft says what is chosen from their logits,
the step yields several tokens. Where rows are invariant, these have the bits of steps without drafts.

The field knows this as prompt lookup decoding (A. Saxena, 2023), a kind of speculative decoding (arXiv:2211.17192) that
needs no second model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import TokenIds

_MOST_ROWS = 16  # of a step with drafts
_LONGEST = 8  # tokens that are compared; longer matches count as this long
_KEPT = 0.9  # weight of earlier drafts, with each new one
_WEIGHT = 0.2  # of a new time in the moving means
_OUTLIER = 2.0  # a time counts at most as so many times the mean

# How likely a draft's next token is right, by the tokens that matched: 1, 2, 3 and more. It counts as this many tokens
# that were seen, and is what answers of small models to all kinds of requests showed.
_LIKELY, _LIKELY_WEIGHT = (0.0, 0.15, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85), 3.0

# What a step of so many rows costs at least, as multiples of one row's cost.
_ROWS = (1, 2, 4, 8, 16)
_COSTS = (1.0, 1.03, 1.06, 1.2, 2.0)


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next, `matched` of the tokens before them being as they were earlier."""

    tokens: tuple[int, ...] = ()
    matched: int = 0


class Drafter:
    """One answer's drafts, and how often they were right."""

    def __init__(self, prompt: TokenIds, room: int, most: int) -> None:
        """The answer has at most `room` tokens, and a draft `most`."""
        self._tokens: npt.NDArray[np.int32] = np.empty(len(prompt) + room, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)
        self._most = most
        self._seen = [_LIKELY_WEIGHT] * len(_LIKELY)
        self._right = [_LIKELY_WEIGHT * likely for likely in _LIKELY]
        self.drafted = 0  # tokens
        self.accepted = 0  # of them: those that became the answer's

    def add(self, token: int) -> None:
        """Note the answer's next token."""
        self._tokens[self._length] = token
        self._length += 1

    def draft(self) -> Draft:
        """Return what stands behind the longest match of the last tokens, the latest if there are several. A match that
        reaches to the end repeats. With its draft and one more token, the answer is not longer than it may be."""
        known = self._tokens[: self._length]
        most = min(self._most, len(self._tokens) - self._length - 1)
        found = np.flatnonzero(known[:-1] == known[-1]) if most > 0 else known[:0]
        matched = begin = 0
        while matched < _LONGEST and len(found):
            matched, begin = matched + 1, int(found[-1]) + 1
            found = found[found >= matched]
            found = found[known[found - matched] == known[len(known) - 1 - matched]]
        period = self._length - begin
        return Draft(tuple(int(known[begin + number % period]) for number in range(most if matched else 0)), matched)

    def likely(self, draft: Draft) -> float:
        """Return how likely each of a draft's tokens is right if those before it are."""
        return self._right[draft.matched] / self._seen[draft.matched]

    def was(self, draft: Draft, accepted: int) -> None:
        """Note how many of a draft's tokens were right."""
        if draft.tokens:
            at = draft.matched
            self._seen[at] = self._seen[at] * _KEPT + min(accepted + 1, len(draft.tokens))
            self._right[at] = self._right[at] * _KEPT + accepted
            self.drafted += len(draft.tokens)
            self.accepted += accepted


@dataclass
class StepCosts:
    """What steps of several rows cost, as multiples of one row's, and how many drafted rows pay."""

    costs: list[float] = field(default_factory=lambda: [*_COSTS])
    _base: tuple[int, float] | None = None  # rows of the last steps without drafts, and the mean of their seconds

    def cost(self, rows: int) -> float:
        """Return the cost of a step; between two measured sizes, in proportion."""
        return float(np.interp(rows, _ROWS, self.costs))

    def begin(self) -> None:
        """Forget the times of steps without drafts: other sequences run from now on."""
        self._base = None

    def took(self, sequences: int, rows: int, seconds: float) -> None:
        """Note the time of a step in which so many sequences ran so many rows."""
        if rows == sequences:
            mean = self._base[1] if self._base and self._base[0] == rows else seconds
            self._base = rows, mean + _WEIGHT * (min(seconds, _OUTLIER * mean) - mean)
        elif self._base and self._base[0] == sequences and rows in _ROWS:
            at = _ROWS.index(rows)
            cost = self.cost(sequences) * seconds / self._base[1]
            cost = min(max(cost, _COSTS[at]), _OUTLIER * self.costs[at])
            self.costs[at] += _WEIGHT * (cost - self.costs[at])
            for more in range(at + 1, len(_ROWS)):  # more rows cost no less
                self.costs[more] = max(self.costs[more], self.costs[at])

    def lengths(self, likely: Sequence[float], most: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each sequence of a step: those that make its tokens cheapest. `likely`
        says how likely each draft's next token is right, `most` how many tokens each may have."""
        best, chosen = len(likely) / self.cost(len(likely)), [0] * len(likely)
        for length in (1, 3, 7):
            drafts = [min(length, limit) for limit in most]
            rows = len(likely) + sum(drafts)
            if rows > _MOST_ROWS:
                break
            tokens = sum(sum(p**i for i in range(count + 1)) for p, count in zip(likely, drafts, strict=True))
            if tokens / self.cost(rows) > best:
                best, chosen = tokens / self.cost(rows), drafts
        return chosen


def drafts(drafters: Sequence[Drafter | None], costs: StepCosts) -> list[Draft]:
    """Return the drafts of the answers that run in one step, as long as they pay. An answer without a drafter has
    none."""
    found = [Draft()] * len(drafters)
    if 2 * len(drafters) <= _MOST_ROWS:
        found = [Draft() if each is None else each.draft() for each in drafters]
    likely = [0.0 if each is None else each.likely(draft) for each, draft in zip(drafters, found, strict=True)]
    lengths = costs.lengths(likely, [len(draft.tokens) for draft in found])
    return [replace(draft, tokens=draft.tokens[:length]) for draft, length in zip(found, lengths, strict=True)]
