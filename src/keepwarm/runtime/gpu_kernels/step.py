"""What one step of the Triton decoder needs on its device, brought there in one copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.runtime.gpu_kernels.plan import Jobs, Numbers, planned
from keepwarm.runtime.gpu_kernels.upload import Upload
from keepwarm.runtime.native.places import Placed

_MOVED = 64  # rows that a move has at most

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Attending(Generic[T]):
    """Jobs; see `plan.Jobs`. `jobs` has those of each window."""

    rows: T
    members: T
    cells: T
    jobs: dict[int | None, T]
    results: int

    def each(self, of: Callable[[T], U]) -> Attending[U]:
        """Return what `of` makes of each array."""
        jobs = {window: of(array) for window, array in self.jobs.items()}
        return Attending(of(self.rows), of(self.members), of(self.cells), jobs, self.results)


@dataclass(frozen=True)
class Arranged(Generic[T]):
    """The rows of a step: a `Plan` has arrays of the host, a `Step` tensors of the device. `every` has the attention of
    all, `few` that of the rows that go through the whole last layer: all, or the `wanted` ones, whose logits are asked
    for."""

    tokens: T
    positions: T
    slots: T
    pages: T
    regions: T
    moves: T
    wanted: T
    every: list[Attending[T]]
    few: list[Attending[T]]
    there: torch.Tensor | None = None  # the tokens on the device, if they are not known here

    @property
    def results(self) -> int:
        """The most results that are in memory at the same time."""
        return max((each.results for each in chain(self.every, self.few)), default=0)

    @property
    def is_whole(self) -> bool:
        """Whether all rows go through the whole last layer."""
        return self.every is self.few

    def each(self, of: Callable[[T], U]) -> Arranged[U]:
        """Return what `of` makes of each array."""
        every = [part.each(of) for part in self.every]
        return Arranged(
            of(self.tokens),
            of(self.positions),
            of(self.slots),
            of(self.pages),
            of(self.regions),
            of(self.moves),
            of(self.wanted),
            every,
            every if self.is_whole else [part.each(of) for part in self.few],
            self.there,
        )


Attended = Attending[torch.Tensor]
Plan = Arranged[Numbers]
Step = Arranged[torch.Tensor]


def arranged(
    ids: Numbers,
    positions: Numbers,
    placed: Placed,
    wanted: Sequence[int],
    windows: Collection[int | None],
    tile: int,
    most: int,
    *,
    whole: bool = False,
) -> Plan:
    """Arrange a step on the host. `tile` and `most`: see `plan.planned`. `whole`: all rows go through the whole last
    layer, as they do anyway if all are wanted."""
    chosen, rows = np.array(wanted, dtype=np.int64), np.arange(len(ids))

    def attending(some: Numbers) -> list[Attending[Numbers]]:
        return [_within(jobs, positions, windows) for jobs in planned(placed, positions, some, tile, most)]

    every = attending(rows)
    few = every if whole or np.array_equal(chosen, rows) else attending(np.unique(chosen))
    memory = placed.slots, placed.pages, flat(placed.regions), pieces(placed.moves)
    return Arranged(ids, positions, *memory, chosen, every, few)


def brought(plan: Plan, device: torch.device, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Step]:
    """Bring a step to a device. Return all its numbers in one piece, and the step, whose tensors are parts of it.
    `into`: see `Upload.sent`."""
    upload = Upload(device)
    places = plan.each(upload.add)
    sent = upload.sent(into)
    step = places.each(lambda place: sent[place])
    if plan.there is not None:
        count = len(plan.there)
        step.tokens[:count].copy_(plan.there)
        if len(step.tokens) > count:  # copies of the last row
            step.tokens[count:].copy_(plan.there[-1:])
    return sent, step


def asked(rows: torch.Tensor, wanted: Numbers) -> torch.Tensor:
    """Return the `wanted` ones of some rows, without numbers that would have to be on the device."""
    if np.array_equal(wanted, np.arange(len(rows))):
        return rows
    if len(wanted) == 1:
        return rows[int(wanted[0]) :][:1]
    return torch.cat([rows[row : row + 1] for row in wanted.tolist()])


def _within(jobs: Jobs, positions: Numbers, windows: Collection[int | None]) -> Attending[Numbers]:
    within = {window: jobs.within(window, positions) for window in windows}
    return Attending(jobs.rows, jobs.members, jobs.cells, within, jobs.results)


def flat(regions: npt.NDArray[np.void]) -> Numbers:
    """Return five numbers of each region: see `attention`. Raises ValueError for encoded ones."""
    if any(tuple(coding) != (0, 0, 0, 0) for coding in regions["coding"]):
        raise ValueError("the Triton kernels read no encoded KV")
    parts = [regions["base"], regions["value"], regions["layer"], regions["heads"][:, 0], regions["heads"][:, 1]]
    return np.stack(parts, axis=1).astype(np.int64)


def pieces(moves: npt.NDArray[np.void]) -> Numbers:
    """Return three numbers of each move: source, target and rows. Long ones are split."""
    made = [
        (int(move["source"]) + at, int(move["target"]) + at, min(_MOVED, int(move["rows"]) - at))
        for move in moves
        for at in range(0, int(move["rows"]), _MOVED)
    ]
    return np.array(made, dtype=np.int64).reshape(-1, 3)
