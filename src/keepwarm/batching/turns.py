"""Whose turn it is in a batch, for how long, and how much of it one owner may hold.

A row's result depends neither on the other rows of its pass nor on where a prompt is cut into steps. So these choices
are free: they change times, never answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from keepwarm.batching.request import Prefilling, Running, Waiting
from keepwarm.core.shares import Shares

_ALONE = 0.1  # seconds that a step may take if requests have owners: a new request waits for its end
_AMONG = 0.025  # seconds that a step may take while several owners have requests under way
LEAST_ROWS = 32  # rows in a prompt's step: even a short step reads all weights
TOGETHER = 128  # at most this many rows of several prompts' last steps run in one pass
_PER_ROW = 256  # positions: attending to them takes about as long as the matrix products of a row
PASSED = 16  # after this many admissions of others, a request that found no room goes first


def overdue(waiting: Iterable[Waiting], admitted: int, under_way: Iterable[Waiting]) -> list[Waiting]:
    """Return at most one request, to be admitted before all others: of those passed over for long, the one that found
    no room first.

    Otherwise others' small requests could take all that becomes free, and a large one would wait as long as they come.
    A request whose owner has requests under way does not count: the owner itself may hold the room that it waits for.
    """
    busy = {job.owner for job in under_way}
    late = [job for job in waiting if admitted - job.held_at >= PASSED and job.owner not in busy]
    return sorted(late, key=lambda job: job.held_at)[:1]


class _Pace:
    """Estimates how long an amount of work takes, from the latest measurements."""

    def __init__(self) -> None:
        self._seconds_each = 0.0

    def note(self, amount: float, seconds: float) -> None:
        each = seconds / amount
        self._seconds_each = (self._seconds_each + each) / 2 if self._seconds_each else each

    def within(self, seconds: float) -> float:
        """Return how much can be done in that time; infinity before the first measurement."""
        return seconds / self._seconds_each if self._seconds_each else inf


class Turns:
    """Shares the time of one batch among owners, in steps so short that no owner waits long."""

    def __init__(self, rows: int) -> None:
        """At most `rows` of a prompt are run in one step."""
        self._rows = rows
        self._shares = Shares()
        self._prefill, self._decode = _Pace(), _Pace()
        self._seconds = inf  # seconds that a step may take now
        self._counts: Counter[str] = Counter()  # requests under way, by owner
        self.round = 0

    def look(self, under_way: Iterable[Waiting]) -> None:
        """Note which owners have requests under way now."""
        self._counts = Counter(job.owner for job in under_way)
        self._shares.active(self._counts)
        self._seconds = _AMONG if len(self._counts) > 1 else _ALONE if any(self._counts) else inf

    @property
    def rows(self) -> int:
        """The number of rows of a prompt to run in the next step."""
        return int(max(LEAST_ROWS, min(self._rows, self._prefill.within(self._seconds))))

    def in_order(self, owners: Collection[str]) -> list[str]:
        """Sort owners by the time they had, least first; equal ones by their number of requests under way."""
        return sorted(owners, key=lambda owner: (self._shares.taken(owner), self._counts[owner]))

    def due(self, prefilling: Sequence[Prefilling]) -> Prefilling | None:
        """Return the prompt whose next step is to run; None while another owner's tokens come first."""
        if not prefilling:
            return None
        first = self.in_order(self._counts)[0]
        return next((job for job in prefilling if job.owner == first), None)

    def decoded(self, running: Sequence[Running]) -> list[Running]:
        """Return the requests that get a token in this round: all, or as many as fit into a step's time."""
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
        """Note the time of a step with these `rows` per prompt, and the time that beginning each answer took."""
        total = sum(rows.values())
        self._prefill.note(max(total, LEAST_ROWS), seconds + sum(begun))
        for (job, count), own in zip(rows.items(), begun, strict=True):
            self._shares.take(job.owner, seconds * count / total + own)

    def took_decode(self, jobs: Sequence[Running], seconds: float, choosing: Sequence[float]) -> None:
        """Note the time of a token for each request: of their common step, and of choosing each one's token."""
        for job in jobs:
            job.decoded = self.round
        weight = sum(map(_weight, jobs))
        self._decode.note(weight, seconds + sum(choosing))
        for job, own in zip(jobs, choosing, strict=True):
            self._shares.take(job.owner, seconds * _weight(job) / weight + own)


def _weight(job: Running) -> int:
    return job.last[1] + _PER_ROW
