"""Records what a thread launches on a device, so that it can be launched again by one call."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol

import torch

# Held by who records, and by who waits for a whole device: CUDA allows neither beside the other.
ALONE = threading.Lock()


class Capture(Protocol):
    """Records launches. All that one of these recorded shares memory, so one replay runs at a time."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record what `run` launches, without doing it. Return what does it, and where its result is then, until the
        next replay."""
        ...

    def in_turn(self) -> None:
        """Order the calling thread's further work after all replays so far, and what followed them."""
        ...

    def settle(self) -> None:
        """Return when all replays so far are done."""
        ...


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector, which may ask the driver for something, out of what is recorded."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class CudaCapture:
    """Records CUDA graphs. Once the last of them is gone, so is the memory that they share: make a new one then."""

    _broken: ClassVar[list[Any]] = []  # some versions of torch ask for these whenever memory is allocated

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Streams are shared out of a pool, and what others queue in this one would be recorded: of this priority nobody
        # else has any.
        self._side = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with ALONE, _uncollected(), torch.cuda.stream(self._side):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads go on
                found = run()
                graph.capture_end()
            except BaseException:
                self._give_up(graph)
                raise
        return graph.replay, found

    def _give_up(self, graph: Any) -> None:
        """End what was recorded. If CUDA says that this failed, some versions of torch do not tell their allocator."""
        self._broken.append(graph)
        with suppress(Exception):
            graph.capture_end()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)

    def in_turn(self) -> None:
        mine = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != mine:
            mine.wait_stream(self._last)
        self._last = mine

    def settle(self) -> None:
        if self._last is not None:
            self._last.synchronize()
