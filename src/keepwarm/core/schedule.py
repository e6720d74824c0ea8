"""Where blocks and prefill steps end. This differs between the two kinds of arithmetic:

* `Pages`, under invariant arithmetic: a row's bits depend only on the tokens at and before it. Blocks are pages at
  absolute positions, a match ends at the first token that differs, and steps only affect speed.
* `Schedule`, under scheduled arithmetic: a row's bits depend on its step. Reuse at a cut repeats the arithmetic of a
  cold run only when both cut at the same positions. So cuts depend on what the *request* declares and on a fixed step,
  never on what happens to be cached. A block is one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keepwarm.errors import ConfigError

PAGE_TOKENS = 32  # of a block under invariant arithmetic: docs/decisions/0087-exact-at-any-token.md
SERIAL_TAIL, SERIAL_STEP = 64, 16  # docs/decisions/0100-snapshots.md
PAGE_ENCODED = 64  # of a block that is quantized: this many tokens share the scales of keys
Step = tuple[int, int]  # positions [start, end) that are computed together


class Breakpoint(NamedTuple):
    """A position (in tokens) where the request asks for a cut.

    A *soft* one (a message's end) is used only when at least `Schedule.min_step` tokens lie between it and the last
    cut. A hard one (end of tools, system prompt, document, `cache_control`, declared segment) is always used.
    """

    position: int
    soft: bool = False
    label: str = ""


@dataclass(frozen=True)
class Scratch:
    """Memory that a step of s tokens at position p needs besides KV: `s * row_bytes + s * (p + s) * score_bytes`.

    `score_bytes` is 0 if attention does not keep its scores. Steps are short enough to stay under `bound`.
    """

    row_bytes: int
    score_bytes: int
    bound: int

    def most_rows(self, position: int) -> int:
        """The longest step at a position that stays under the bound; at least 1."""
        a, b = self.score_bytes, self.row_bytes + position * self.score_bytes
        if a == 0:
            return max(1, self.bound // max(b, 1))
        return max(1, (math.isqrt(b * b + 4 * a * self.bound) - b) // (2 * a))


def next_part(length: int, most: int) -> int:
    """Return the length of the next of as few parts as there can be, if a part has at most `most`. All have the same
    length, but for one: a short one would cost more for each token."""
    return -(-length // -(-length // most))


def _longest(step: int, scratch: Scratch | None, position: int) -> int:
    return step if scratch is None else min(step, scratch.most_rows(position))


@dataclass(frozen=True)
class Pages:
    """Blocks of `page` tokens at absolute positions, computed in steps of at most `step` tokens."""

    step: int
    scratch: Scratch | None = None
    page: int = PAGE_TOKENS

    inside = True  # a match may end inside a block: the KV before the difference is valid as it is

    def cuts(self, length: int, breakpoints: Iterable[Breakpoint] = (), regions: Iterable[int] = ()) -> tuple[int, ...]:
        """End positions of the blocks of a prompt of `length` tokens: the ends of all pages, the beginnings of
        `regions` under an extra key, and `length`. Breakpoints of the request have no effect."""
        pages = range(self.page, length, self.page)
        apart = {at for at in regions if 0 < at < length and at % self.page}
        return tuple(sorted({*pages, *apart, length})) if apart else (*pages, length)

    def steps(self, cuts: Sequence[int], reached: int) -> Iterator[Step]:
        """Yield the steps that compute `[reached, cuts[-1])`."""
        while reached < cuts[-1]:
            end = reached + next_part(cuts[-1] - reached, _longest(self.step, self.scratch, reached))
            yield reached, end
            reached = end


@dataclass(frozen=True)
class Schedule:
    """Steps of at most `step` tokens (G), and at least `min_step` (G_min) before a soft breakpoint.

    With `scratch`, steps shrink as the context grows. That depends on the position alone, so cuts stay reproducible.
    """

    step: int
    min_step: int
    scratch: Scratch | None = None

    inside = False

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ConfigError(f"step must be at least 1 token, got {self.step}")
        if not 0 <= self.min_step <= self.step:
            raise ConfigError(f"min_step must lie between 0 and step ({self.step}), got {self.min_step}")

    def step_at(self, position: int) -> int:
        """The longest step that begins at a position."""
        return _longest(self.step, self.scratch, position)

    def cuts(self, length: int, breakpoints: Iterable[Breakpoint] = (), regions: Iterable[int] = ()) -> tuple[int, ...]:
        """End positions of the steps of a prompt of `length` tokens: strictly increasing, the last is `length`.
        `regions` under an extra key begin at 0 or at a hard breakpoint.

        Every cut at or below a position p depends only on breakpoints at or below p, so prompts that agree up to p
        agree on those cuts.
        """
        cuts: list[int] = []
        last = 0
        declared = sorted(breakpoints, key=lambda point: (point.position, point.soft))
        for point in declared:
            if not 0 < point.position < length:
                continue
            while point.position - last > (step := self.step_at(last)):
                last += step
                cuts.append(last)
            if point.position == last or (point.soft and point.position - last < self.min_step):
                continue
            last = point.position
            cuts.append(last)
        while length - last > (step := self.step_at(last)):
            last += step
            cuts.append(last)
        if length > last:
            cuts.append(length)
        return tuple(cuts)

    def steps(self, cuts: Sequence[int], reached: int) -> Iterator[Step]:
        """Yield the steps that compute `[reached, cuts[-1])`: the prompt's own steps; the first is shortened when reuse
        ended inside it."""
        start = 0
        for end in cuts:
            if end > reached:
                yield max(start, reached), end
            start = end


@dataclass(frozen=True)
class Serial(Schedule):
    """The schedule of a model that processes several tokens at once only at the beginning of a sequence
    (`runtime.runner.Runner.serial`): each token of a later step costs as much as decoding one. There is one cut. It is
    where the request declares it, at most `tail` tokens before the end, else at the last multiple of `SERIAL_STEP`, so
    that the same prompt can continue there when it comes again."""

    tail: int = SERIAL_TAIL

    def cuts(self, length: int, breakpoints: Iterable[Breakpoint] = (), regions: Iterable[int] = ()) -> tuple[int, ...]:
        known = list(breakpoints)
        declared = [point.position for point in known if length - self.tail <= point.position < length]
        forced = [at for at in regions if 0 < at < length]
        ends_there = any(point.position == length and not point.soft for point in known)  # longer prompts are cut there
        usual = 0 if ends_there else (length - 1) // SERIAL_STEP * SERIAL_STEP
        cut = min((at for at in declared if at > 0), default=usual)
        return tuple(sorted({*forced, *([cut] if cut else []), length}))


Grid = Pages | Schedule
