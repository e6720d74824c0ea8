"""Stands for CUDA graphs under Triton's interpreter.

What is recorded is not done, as with CUDA. A replay does it with the very arguments that it had then: a number that
Python computed meanwhile has its old value, a grid its old size, a tensor its old place. Memory that was allocated
while recording is NaN before each replay, so nothing can be left over from the one before. One thing is not as with
CUDA: what was allocated before, and is read or written, lives as long as what was recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

_READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "unique",
    "equal",
    "__bool__",
    "__float__",
    "__index__",
    "__int__",
}


class _NoReads(TorchFunctionMode):
    """Forbids what waits for a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in _READS, f"{name} waits for the device, which nothing may that is recorded"
        return func(*args, **(kwargs or {}))


class _Noting(TorchDispatchMode):
    """Notes torch's operations as work for a replay, and the memory that they allocate."""

    def __init__(self, work: list[Callable[[], object]], memory: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._memory = work, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._work.append(partial(func, *args, **kwargs))
        elif func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self._memory.append(found)
        elif not any(_shares(found, each) for each in args):  # no view
            self._work.append(lambda: found.copy_(func(*args, **kwargs)))
        return found


def _shares(one: torch.Tensor, other: Any) -> bool:
    """Whether two have the same memory."""
    storages = [each.untyped_storage().data_ptr() for each in (one, other) if isinstance(each, torch.Tensor)]
    return len(storages) == 2 and storages[0] == storages[1]


class Recorder:
    """See `capture.Capture`."""

    def __init__(self) -> None:
        self.recorded = self.replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.recorded += 1
        work: list[Callable[[], object]] = []
        memory: list[torch.Tensor] = []
        with torch.inference_mode(), _launches_noted(work), _NoReads(), _Noting(work, memory):
            found = run()

        def replay() -> None:
            self.replays += 1
            with torch.inference_mode():
                for each in memory:
                    each.view(torch.uint8).fill_(0xFF)
                for launch in work:
                    launch()

        return replay, found

    def in_turn(self) -> None:
        """Nothing runs beside."""

    def settle(self) -> None:
        """All is done."""


@contextmanager
def _launches_noted(work: list[Callable[[], object]]) -> Iterator[None]:
    """Note what this thread launches. Others go on."""
    launch, mine = InterpretedFunction.run, threading.get_ident()

    def run(*given: Any, **named: Any) -> Any:
        if threading.get_ident() != mine:
            return launch(*given, **named)
        return work.append(partial(launch, *given, **named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield
