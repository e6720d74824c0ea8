"""Whose turn it is in a batch, for how long, and how much of it one owner may hold.

Rows do not depend on whose other rows run beside them, nor on where a prompt is cut into steps. So all of this is free
to choose: it changes times, never answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from keepwarm.batching.request import Prefilling, Running, Waiting
from keepwarm.core.shares import Shares

_ALONE = 0.1  # seconds that a step may take where there are owners: who comes meanwhile waits for its end
_AMONG = 0.025  # the same where several have requests under way
LEAST_ROWS = 32  # of a prompt's step: it reads all weights, however few its rows are
TOGETHER = 128  # rows of several prompts' last steps in one pass
_PER_ROW = 256  # positions; attending to so many takes about as long as a row's products
PASSED = 16  # admissions that a request without room is passed over for
_PER_FREE = 3  # times what is left free that one owner may hold


def may_hold(owner: str, held: int, more: int, free: int) -> bool:
    """Whether an owner who holds some may have more, of which so many are free.

    The more is free, the more anybody may have; so something is left whoever comes, without anybody saying how many
    will. Who holds nothing may always have what there is. Requests of no owner are their process's own.
    """
    return not owner or not held or held + more <= _PER_FREE * (free - more)


def overdue(waiting: Iterable[Waiting], admitted: int, under_way: Iterable[Waiting]) -> list[Waiting]:
    """The one to be let in before anybody else: who found no room first, and was then passed over for long; or nobody.

    Others' small requests may always take the little that becomes free, so a large one would wait as long as they come.
    Whose own requests hold what it waits for has nobody else wait.
    """
    busy = {job.owner for job in under_way}
    late = [job for job in waiting if admitted - job.held_at >= PASSED and job.owner not in busy]
    return sorted(late, key=lambda job: job.held_at)[:1]


class _Pace:
    """How long an amount of work takes, by the latest that was done."""

    def __init__(self) -> None:
        self._seconds_each = 0.0

    def note(self, amount: float, seconds: float) -> None:
        each = seconds / amount
        self._seconds_each = (self._seconds_each + each) / 2 if self._seconds_each else each

    def within(self, seconds: float) -> float:
        """How much can be done in that time; no bound before anything was."""
        return seconds / self._seconds_each if self._seconds_each else inf


class Turns:
    """Shares the time of one batch among owners, in steps short enough that others need not wait long."""

    def __init__(self, rows: int) -> None:
        """At most `rows` of a prompt are run in one step."""
        self._rows = rows
        self._shares = Shares()
        self._prefill, self._decode = _Pace(), _Pace()
        self._seconds = inf  # that a step may take now
        self._counts: Counter[str] = Counter()  # requests under way, by owner
        self.round = 0

    def look(self, under_way: Iterable[Waiting]) -> None:
        """Note whose requests are under way now."""
        self._counts = Counter(job.owner for job in under_way)
        self._shares.active(self._counts)
        self._seconds = _AMONG if len(self._counts) > 1 else _ALONE if any(self._counts) else inf

    @property
    def rows(self) -> int:
        """Rows of a prompt that are to be run in the next step."""
        return int(max(LEAST_ROWS, min(self._rows, self._prefill.within(self._seconds))))

    def in_order(self, owners: Collection[str]) -> list[str]:
        """The owner who had least first, and of equals who has fewest requests under way."""
        return sorted(owners, key=lambda owner: (self._shares.taken(owner), self._counts[owner]))

    def due(self, prefilling: Sequence[Prefilling]) -> Prefilling | None:
        """The prompt whose next step is to be run; None while it is for others to get their tokens first."""
        if not prefilling:
            return None
        first = self.in_order(self._counts)[0]
        return next((job for job in prefilling if job.owner == first), None)

    def decoded(self, running: Sequence[Running]) -> list[Running]:
        """Who gets a token in this round: all, or as many as fit into a step's time."""
        room = self._decode.within(self._seconds)
        if sum(map(_weight, running)) <= room:
            return list(running)
        chosen: list[Running] = []
        for job in sorted(running, key=lambda job: (self._shares.taken(job.owner), job.decoded)):
            room -= _weight(job)
            if chosen and room < 0:
                break
            chosen.append(job)
        return chosen

    def took_prefill(self, rows: Mapping[Prefilling, int], seconds: float, begun: Sequence[float]) -> None:
        """Note what a step of so many rows of these prompts took, and what beginning each one's answer took."""
        total = sum(rows.values())
        self._prefill.note(max(total, LEAST_ROWS), seconds + sum(begun))
        for (job, count), own in zip(rows.items(), begun, strict=True):
            self._shares.take(job.owner, seconds * count / total + own)

    def took_decode(self, jobs: Sequence[Running], seconds: float, choosing: Sequence[float]) -> None:
        """Note what a token for each of these took: the step of all together, and choosing each one's token."""
        for job in jobs:
            job.decoded = self.round
        weight = sum(map(_weight, jobs))
        self._decode.note(weight, seconds + sum(choosing))
        for job, own in zip(jobs, choosing, strict=True):
            self._shares.take(job.owner, seconds * _weight(job) / weight + own)


def _weight(job: Running) -> int:
    return job.last[1] + _PER_ROW
