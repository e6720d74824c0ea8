"""Tokens drafted for an answer: what followed the same tokens in the prompt and the answer, or in an earlier answer.

A step that computes a few rows takes hardly longer than one that computes a single row, since both read all weights.
So the rows of drafted tokens run beside the newest token's. As far as a draft says what is chosen from their logits,
the step yields several tokens. Where rows are invariant, these have the bits of steps without drafts.

The field knows this as prompt lookup decoding (A. Saxena, 2023), a kind of speculative decoding (arXiv:2211.17192) that
needs no second model.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import TokenIds

_MOST_ROWS = 16  # of a step with drafts
_LONGEST = 8  # tokens that are compared; longer matches count as this long
_KEPT = 0.9  # weight of earlier drafts, with each new one
_MEAN = 0.2  # weight of a new time in the mean of steps without drafts
_WEIGHT = 0.1  # of a new cost
_FORGOTTEN = 0.003  # of a cost, with each step
_RETRIED = 0.005  # of what an answer knows of a length of matches, with each draft that was not tried
_COMPARED = 64  # steps with drafts between two without
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

    def __init__(self, prompt: TokenIds, room: int, most: int, recall: Callable[[int], TokenIds]) -> None:
        """The answer has at most `room` tokens, and a draft `most`. `recall` is asked once, after the first token or
        later: it returns so many tokens, or fewer, that followed the prompt before."""
        self._tokens: npt.NDArray[np.int32] = np.empty(len(prompt) + room, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self._prompt = self._length = len(prompt)
        self._most = most
        self._recall: Callable[[int], TokenIds] | None = recall
        self._before = 0  # tokens at the beginning that followed the prompt before, less the last one
        self._seen = [_LIKELY_WEIGHT] * len(_LIKELY)
        self._right = [_LIKELY_WEIGHT * likely for likely in _LIKELY]
        self.drafted = 0  # tokens
        self.accepted = 0  # of them: those that became the answer's

    def add(self, token: int) -> None:
        """Note the answer's next token."""
        self._tokens[self._length] = token
        self._length += 1

    def draft(self) -> Draft:
        """Return what stands behind the longest match of the last tokens. Of several, one in what followed the prompt
        before comes first, then the latest. A match that reaches to the end repeats. With its draft and one more token,
        the answer is not longer than it may be."""
        if self._recall is not None:
            self._remember(self._recall)
        known = self._tokens[: self._length]
        most = min(self._most, len(self._tokens) - self._length - 1)
        found = np.flatnonzero(known[:-1] == known[-1]) if most > 0 else known[:0]
        matched = begin = 0
        while matched < _LONGEST and len(found):
            matched, before = matched + 1, int(np.searchsorted(found, self._before))
            begin = int(found[before - 1 if before else -1]) + 1
            found = found[found >= matched]
            found = found[known[found - matched] == known[len(known) - 1 - matched]]
        period = self._length - begin
        return Draft(tuple(int(known[begin + number % period]) for number in range(most if matched else 0)), matched)

    def _remember(self, recall: Callable[[int], TokenIds]) -> None:
        """Let the search begin with the last tokens of the prompt, and what followed them before."""
        self._recall = None
        before, end = recall(len(self._tokens) - self._prompt), self._prompt
        if len(before):
            earlier = np.concatenate([self._tokens[max(0, end - _LONGEST) : end], before.astype(np.int32)])
            self._tokens = np.concatenate([earlier, self._tokens])
            self._length += len(earlier)
            self._before = len(earlier) - 1

    def likely(self, draft: Draft) -> float:
        """Return how likely each of a draft's tokens is right if those before it are."""
        return self._right[draft.matched] / self._seen[draft.matched]

    def was(self, draft: Draft, accepted: int) -> None:
        """Note how many of a draft's tokens were right. What was not tried is forgotten little by little."""
        at = draft.matched
        if not draft.tokens:
            self._seen[at] += _RETRIED * (_LIKELY_WEIGHT - self._seen[at])
            self._right[at] += _RETRIED * (_LIKELY_WEIGHT * _LIKELY[at] - self._right[at])
        else:
            self._seen[at] = self._seen[at] * _KEPT + min(accepted + 1, len(draft.tokens))
            self._right[at] = self._right[at] * _KEPT + accepted
            self.drafted += len(draft.tokens)
            self.accepted += accepted


class StepCosts:
    """What steps of several rows cost, as multiples of one row's. Threads may share it."""

    def __init__(self) -> None:
        self.costs = [*_COSTS]

    def cost(self, rows: float) -> float:
        """Return the cost of a step; between two sizes, in proportion."""
        return float(np.interp(rows, _ROWS, self.costs))

    def saw(self, rows: int, cost: float) -> None:
        """Note what a step cost. No size costs less than the least that it can, or more than as many single rows."""
        below, above = bisect_right(_ROWS, rows) - 1, min(bisect_left(_ROWS, rows), len(_ROWS) - 1)
        known, costs = self.cost(rows), [*self.costs]
        for at in {below, above} - {0}:
            costs[at] += _WEIGHT * (min(cost / known, _OUTLIER) - 1) * costs[at]
        costs[1:] = [min(max(each, _COSTS[at]), _ROWS[at]) for at, each in enumerate(costs)][1:]
        for at in range(above + 1, len(costs)):  # more rows cost no less
            costs[at] = max(costs[at], costs[above])
        for at in range(1, below):
            costs[at] = min(costs[at], costs[below])
        self.costs = costs

    def relax(self) -> None:
        """Move all costs towards the least, so that what was slow once is tried again."""
        self.costs = [each + _FORGOTTEN * (least - each) for each, least in zip(self.costs, _COSTS, strict=True)]


class Pace:
    """How many tokens to draft in the steps of one answer, or of the answers of a batch."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._bases: dict[int, tuple[float, int]] = {}  # of steps without drafts, by rows: mean seconds, steps since

    def took(self, sequences: int, rows: int, seconds: float) -> None:
        """Note the time of a step in which so many sequences ran so many rows."""
        self._costs.relax()
        mean, age = self._bases.get(sequences, (seconds, 0))
        if rows == sequences:
            self._bases[rows] = mean + _MEAN * (min(seconds, _OUTLIER * mean) - mean), 0
        elif sequences in self._bases:
            self._bases[sequences] = mean, age + 1
            if mean > 0:
                self._costs.saw(rows, self._costs.cost(sequences) * seconds / mean)

    def drafts(self, drafters: Sequence[Drafter | None]) -> list[Draft]:
        """Return the drafts of the answers that run in one step, as long as they pay. An answer without a drafter has
        none. Now and then a step has none, to be compared with."""
        found = [Draft()] * len(drafters)
        if 2 * len(drafters) <= _MOST_ROWS:
            found = [Draft() if each is None else each.draft() for each in drafters]
        likely = [0.0 if each is None else each.likely(draft) for each, draft in zip(drafters, found, strict=True)]
        lengths, base = [0] * len(found), self._bases.get(len(found))
        if base is not None and base[1] < _COMPARED:
            lengths = self._lengths(likely, [len(draft.tokens) for draft in found])
        return [replace(draft, tokens=draft.tokens[:length]) for draft, length in zip(found, lengths, strict=True)]

    def _lengths(self, likely: Sequence[float], most: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each sequence of a step: those that make its tokens cheapest. `likely`
        says how likely each draft's next token is right, `most` how many tokens each may have."""
        cost = self._costs.cost
        best, chosen = len(likely) / cost(len(likely)), [0] * len(likely)
        for length in (1, 3, 7):
            drafts = [min(length, limit) for limit in most]
            rows = len(likely) + sum(drafts)
            if rows > _MOST_ROWS:
                break
            tokens = sum(sum(p**i for i in range(count + 1)) for p, count in zip(likely, drafts, strict=True))
            if tokens / cost(rows) > best:
                best, chosen = tokens / cost(rows), drafts
        return chosen
