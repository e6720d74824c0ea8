"""What one step of the Triton decoder needs on its device, brought there in one copy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.runtime.gpu_kernels.plan import Jobs, Numbers, planned
from keepwarm.runtime.gpu_kernels.upload import Upload
from keepwarm.runtime.native.places import Placed

_MOVED = 64  # rows that a move has at most


@dataclass(frozen=True)
class Attended:
    """Jobs on the device; see `plan.Jobs`. `jobs` has those of each window."""

    rows: torch.Tensor
    members: torch.Tensor
    cells: torch.Tensor
    jobs: dict[int | None, torch.Tensor]
    results: int


@dataclass(frozen=True)
class Step:
    """The rows of a step. `every` has the attention of all, `few` that of the `wanted` rows, whose logits are asked
    for; it is the same where these are all."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    regions: torch.Tensor
    moves: torch.Tensor
    wanted: torch.Tensor
    every: list[Attended]
    few: list[Attended]

    @property
    def results(self) -> int:
        """The most results that are in memory at the same time."""
        return max((each.results for each in chain(self.every, self.few)), default=0)

    @property
    def wants_all(self) -> bool:
        """Whether the logits of all rows are asked for, in order."""
        return self.every is self.few


def prepared(
    ids: Numbers,
    positions: Numbers,
    placed: Placed,
    wanted: Sequence[int],
    device: torch.device,
    windows: Collection[int | None],
    tile: int,
    most: int,
) -> Step:
    """Bring a step to a device. `tile` and `most`: see `plan.planned`."""
    upload = Upload(device)
    asked = np.array(wanted, dtype=np.int64)
    arrays = ids, positions, placed.slots, placed.pages, flat(placed.regions), pieces(placed.moves), asked
    places = [upload.add(array) for array in arrays]
    rows = np.arange(len(ids))
    plans = [planned(placed, positions, rows, tile, most)]
    if not np.array_equal(asked, rows):
        plans.append(planned(placed, positions, np.unique(asked), tile, most))
    added = [[_added(upload, jobs, positions, windows) for jobs in plan] for plan in plans]
    sent = upload.sent()
    tokens, at, slots, pages, regions, moves, few = (sent[place] for place in places)
    attended = [[_on_device(sent, *each) for each in plan] for plan in added]
    return Step(tokens, at, slots, pages, regions, moves, few, attended[0], attended[-1])


_Added = tuple[tuple[slice, slice, slice], dict[int | None, slice], int]


def _added(upload: Upload, jobs: Jobs, positions: Numbers, windows: Collection[int | None]) -> _Added:
    places = upload.add(jobs.rows), upload.add(jobs.members), upload.add(jobs.cells)
    return places, {window: upload.add(jobs.within(window, positions)) for window in windows}, jobs.results


def _on_device(
    sent: torch.Tensor, places: tuple[slice, slice, slice], jobs: dict[int | None, slice], results: int
) -> Attended:
    rows, members, cells = (sent[place] for place in places)
    return Attended(rows, members, cells, {window: sent[place] for window, place in jobs.items()}, results)


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
