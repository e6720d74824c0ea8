"""One request's load onto a device: verified in pinned memory piece by piece, each copied into vLLM's pages at once.

Copies run on a stream of the load's own, behind all that the model's stream was given when the load began: pages may
be new to the request, and others may still read or clear them. The model's stream waits for the copies before it goes
on, whether they are used or were given up, so a late one cannot reach a page that is somebody else's by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import Bytes
from keepwarm.core.sinks import PlainSink
from keepwarm.integrations.vllm.device_pages import DevicePages, PinnedStaged
from keepwarm.integrations.vllm.loading import Late
from keepwarm.runtime.device import Event

PIECE = 64 << 20  # bytes that are staged at once
_AHEAD = 4  # pieces of a load whose copies may be under way: the store may be faster than the device, or than a step


class DeviceLoading:
    """A load into `pages` on a device, whose pieces a loader's thread fills. All other methods but `pieces` are called
    from the model's thread."""

    def __init__(
        self, memory: DevicePages, pages: Sequence[int], positions: range, deadline: float, began: Event
    ) -> None:
        """`positions` are those of the tokens whose KV goes into `pages`; `deadline` is in seconds of `time.monotonic`.
        `began` is the point in the model's stream behind which pages may be written to."""
        self.pages = pages
        self.seconds = 0.0
        self.wanted = True  # any thread may set it to False
        self._memory = memory
        self._positions = positions
        self._deadline = deadline
        self._stream = memory.take_stream()
        self._stream.wait(began)
        self._began = time.monotonic()
        self._copied: list[Event] = []
        self._future: Future[dict[str, int]] | None = None
        self._lock = threading.Lock()
        self._given_up = False

    def begin(self, future: Future[dict[str, int]]) -> None:
        """Begin; `future` is the loader's."""
        self._future = future

    def is_over(self) -> bool:
        """Whether all is in place, or the load failed, or its time is over."""
        assert self._future is not None
        is_done = self._future.done() and all(event.is_past() for event in self._copied)
        return is_done or time.monotonic() > self._deadline

    def result(self) -> dict[str, int]:
        """Wait for the load, no longer than its deadline, and return tokens by tier. Raises the load's error, or
        TimeoutError. What the calling thread computes afterwards comes after everything that was written."""
        assert self._future is not None
        wait([self._future], timeout=max(self._deadline - time.monotonic(), 0))
        self._give_up()
        self.seconds = time.monotonic() - self._began
        return self._future.result(timeout=0)

    def _give_up(self) -> None:
        """Let no more copies begin, and the model's stream wait for those that did."""
        with self._lock:
            if not self._given_up:
                self._given_up = True
                for event in self._copied:
                    self._memory.port.current().wait(event)
                self._memory.give_stream(self._stream)

    # ---- the loader's thread ----

    def pieces(self, most: int = PIECE) -> Iterator[Piece]:
        """Yield the load's pieces in order, of `most` bytes each. Raises Late once it was given up."""
        size = self._memory.page_size
        count = max(most // (self._memory.geometry.bytes_per_token * size), 1)
        for number, first in enumerate(range(0, len(self.pages), count)):
            self._check()
            if number >= _AHEAD:
                self._copied[number - _AHEAD].synchronize()
                self._check()
            pages = self.pages[first : first + count]
            start = self._positions.start + first * size
            yield Piece(self, self._memory.stage(len(pages) * size), pages, start)

    def bring(self, staged: PinnedStaged, pages: Sequence[int]) -> None:
        """Queue the copies of a staged piece, whose bytes are verified, into its pages. Raises Late."""
        with self._lock:
            self._check()
            try:
                self._memory.bring(staged, pages, self._stream)
            finally:  # after an error a part of them may be queued
                self._copied.append(self._stream.record())

    def _check(self) -> None:
        if self._given_up or not self.wanted:
            raise Late("the load came too late")


class Piece(PlainSink):
    """A part of a load: a `KVSink` over pinned memory, of which all layers are copied at once."""

    def __init__(self, loading: DeviceLoading, staged: PinnedStaged, pages: Sequence[int], start: int) -> None:
        self.staged = staged
        self.start, self.end = start, start + staged.tokens
        self.straight = False
        self._loading, self._pages = loading, pages

    def arrived(self) -> None:
        """Note that all of it is in place and verified. Raises Late."""
        self._loading.bring(self.staged, self._pages)

    # core.ports.KVSink

    @property
    def geometry(self) -> KVGeometry:
        return self.staged.geometry

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return self.staged.plane(layer, kv)[:, start - self.start : end - self.start]
