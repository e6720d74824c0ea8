"""Repeats small steps by graphs: what one step launches is recorded, and launched by one call for others like it.

What is recorded has fixed grids, and reads a step's numbers from one place. So a step is padded: each of its arrays has
a length that is a power of two. A graph serves all steps whose padded arrays have its lengths. What pads a step changes
no bit of it. Rows that pad are copies of the last row: they compute what it computes, and write what it writes. Jobs
that pad have no rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from keepwarm.runtime.capture import Capture
from keepwarm.runtime.device.port import is_out_of_memory
from keepwarm.runtime.gpu_kernels.launch import Heads
from keepwarm.runtime.gpu_kernels.plan import Numbers
from keepwarm.runtime.gpu_kernels.step import Arranged, Attending, Plan, Step, brought
from keepwarm.runtime.gpu_kernels.upload import Upload

log = logging.getLogger(__name__)

ROWS = 256  # that a step has at most: of larger ones launching is a smaller part
_MOST = 32  # graphs that are kept
_TWICE, _OFTEN = 2, 32  # how often a form comes until it is recorded, and until another graph makes way for it
# The least lengths. Larger ones make fewer graphs. Only jobs and results cost the device anything.
_PAGES, _REGIONS, _MEMBERS, _JOBS, _RESULTS = 4096, 64, 128, 16, 16

Form = tuple[int, ...]


def repeats(plan: Plan) -> bool:
    """Whether a step may be run by a graph."""
    return plan.is_whole and len(plan.every) == 1 and 0 < len(plan.tokens) <= ROWS


def padded(plan: Plan) -> Plan:
    """Return a step that repeats, with arrays of a power of two numbers, or of rows of numbers. It has no moves: these
    are made before it."""
    (part,) = plan.every
    rows = np.minimum(np.arange(_power(len(plan.tokens))), len(plan.tokens) - 1)
    every = [
        Attending(
            np.arange(len(rows)),
            _zeros_behind(part.members, _MEMBERS),
            part.cells[rows],
            {window: _zeros_behind(jobs, _JOBS) for window, jobs in part.jobs.items()},
            _power(part.results, _RESULTS),
        )
    ]
    return Arranged(
        plan.tokens[rows],
        plan.positions[rows],
        plan.slots[rows],
        _zeros_behind(plan.pages, _PAGES),
        _zeros_behind(plan.regions, _REGIONS),
        plan.moves[:0],
        np.arange(len(rows)),
        every,
        every,
        plan.there,
    )


def form_of(plan: Plan) -> Form:
    """Return what steps of one graph have in common. Arrays that are not named here have as many numbers as rows."""
    (part,) = plan.every
    arrays = plan.tokens, plan.pages, plan.regions, part.members, *part.jobs.values()
    return (*map(len, arrays), part.results)


def _power(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


def _zeros_behind(array: Numbers, least: int) -> Numbers:
    made = np.zeros((_power(len(array), least), *array.shape[1:]), dtype=np.int64)
    made[: len(array)] = array
    return made


def written(plan: Plan, heads: Heads, layers: int, device: torch.device) -> torch.Tensor:
    """Return a copy of the keys and values of a step's rows, in all layers."""
    rows, size = len(plan.slots), heads.launch.dtype.itemsize
    held = torch.empty(layers, 2, heads.kv_heads, rows, heads.dim, dtype=heads.launch.dtype, device=device)
    head = rows * heads.dim * size
    own = [held.data_ptr(), heads.kv_heads * head, 2 * heads.kv_heads * head, head, head]
    targets = len(plan.regions) << 32 | np.arange(rows)
    upload = Upload(device)
    moves = upload.add(np.stack([plan.slots, targets, np.ones_like(targets)], axis=1))
    regions = upload.add(np.concatenate([plan.regions, [own]]))
    numbers = upload.sent()
    heads.move(numbers[moves], numbers[regions], held, 0, layers)
    return held


@dataclass(frozen=True)
class Pass:
    """How a decoder runs a step. `through` returns the rows behind the last layer, `written` a copy of the keys and
    values that were written of them. `arrive` waits until all memory of the step is in place, and `move` makes the
    step's moves in all layers."""

    through: Callable[[Step], torch.Tensor]
    written: Callable[[Plan], torch.Tensor]
    arrive: Callable[[], None]
    move: Callable[[Plan], None]


@dataclass(frozen=True)
class _Graph:
    numbers: torch.Tensor  # of the step, on the device
    replay: Callable[[], None]
    rows: torch.Tensor  # behind the last layer


class Graphs:
    """The graphs of one decoder. Steps of a form are recorded when a second one comes, and its result is compared with
    what single launches give, once. If recording fails, or a bit differs, there are no graphs any more."""

    def __init__(self, device: torch.device, make: Callable[[], Capture] | None) -> None:
        """`make` makes what records; None: nothing does."""
        self._device, self._make = device, make
        self._capture: Capture | None = None
        self._seen: dict[Form, int] = {}  # how often forms without a graph came; the last one is the last
        self._kept: dict[Form, _Graph] = {}  # the one that was used last is the last

    def apart(self) -> Graphs:
        """Return graphs for a decoder beside this one's. They share nothing."""
        return Graphs(self._device, self._make)

    @property
    def repeat(self) -> bool:
        """Whether steps may be repeated at all."""
        return self._make is not None

    def drop(self) -> None:
        """Forget all graphs. Call this when something lies elsewhere that is not told by the numbers of a step."""
        if self._capture is not None:
            self._capture.settle()
        self._kept.clear()

    def run(self, plan: Plan, how: Pass) -> torch.Tensor | None:
        """Return all rows of a step behind the last layer, which hold until the next step; None: run it by single
        launches. A graph does not stop at each layer, so all layers arrive before."""
        if self._make is None or not repeats(plan):
            return None
        whole = padded(plan)
        form = form_of(whole)
        graph = self._kept.pop(form, None)
        if graph is None:
            if not self._is_due(form):
                return None
            how.arrive()
            return self._first(plan, whole, form, how)
        self._kept[form] = graph
        how.arrive()
        how.move(plan)
        assert self._capture is not None
        self._capture.in_turn()
        brought(whole, self._device, graph.numbers)
        graph.replay()
        return graph.rows[: len(plan.tokens)]

    def _is_due(self, form: Form) -> bool:
        """Note that a form came. Return whether it came often enough to be recorded."""
        self._seen[form] = self._seen.pop(form, 0) + 1
        if len(self._seen) > 4 * _MOST:
            del self._seen[next(iter(self._seen))]
        return self._seen[form] >= (_TWICE if len(self._kept) < _MOST else _OFTEN)

    def _first(self, plan: Plan, whole: Plan, form: Form, how: Pass) -> torch.Tensor:
        """Record a step and replay it. Then run it by single launches, and compare. Those come last, so what they write
        stays."""
        try:
            how.move(plan)
            graph = self._recorded(whole, how)
            graph.replay()
            mine = graph.rows[: len(plan.tokens)], how.written(plan)
        except Exception as error:  # those of torch, CUDA and Triton have no type in common
            if is_out_of_memory(error):
                self._seen[form] = -_OFTEN  # it is tried again much later
                return how.through(brought(plan, self._device)[1])
            log.warning("no CUDA graph can be recorded, so single launches run all steps now", exc_info=error)
            self._stop()
            return how.through(brought(plan, self._device)[1])
        found = how.through(brought(plan, self._device)[1])
        if all(map(_same, mine, (found, how.written(plan)))):
            self._kept[form] = graph
            del self._seen[form]
        else:
            log.error(
                "a CUDA graph computes other bits than single launches, which run all steps now; please report this"
            )
            self._stop()
        return found

    def _recorded(self, whole: Plan, how: Pass) -> _Graph:
        assert self._make is not None
        if self._capture is None or not self._kept:
            self._capture = self._make()
        elif len(self._kept) == _MOST:
            self._capture.settle()
            del self._kept[next(iter(self._kept))]
        self._capture.in_turn()
        with torch.inference_mode(mode=False):  # so that it can be written to in inference mode and outside of it
            numbers, step = brought(whole, self._device)
        how.through(step)  # kernels are loaded when they are launched first, which nothing may that is recorded
        return _Graph(numbers, *self._capture.record(lambda: how.through(step)))

    def _stop(self) -> None:
        self.drop()
        self._make = None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, where they are not numbers, too."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
