"""One request's load: from a loader's thread into vLLM's pages. The model's thread may wait for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace

import torch

from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import BlockCodec, Bytes, KVSink
from keepwarm.core.reads import Arriving, Coming, Reads, Replies
from keepwarm.integrations.vllm.page_copies import Pages, Staged
from keepwarm.runtime.native.reads import CachedReads

_LOOK_UP = 0.1  # seconds between checks, while a loader waits for the model's thread, whether its load is wanted

Work = Callable[[], None]


class Loading:
    """One request's load: a `KVSink` over vLLM's pages, filled by a loader's thread and awaited by the model's.

    While the model's thread waits, it reads what is in the page cache, with its team of OpenMP threads. It also
    receives what a Redis server sends, with its team asleep: idle threads would spin for a while, on cores that others
    need.
    """

    def __init__(
        self,
        memory: Pages,
        pages: Sequence[int],
        positions: range,
        deadline: float,
        told: queue.SimpleQueue[Work | None] | None,
        native: CachedReads | None,
        *,
        straight: bool,
    ) -> None:
        """`positions` are those of the tokens whose KV goes into `pages`; `deadline` is in seconds of `time.monotonic`.
        `told` is the queue of work for the model's thread, None if it does not wait. With `straight`, KV in the page
        cache or from a Redis server goes into vLLM's pages without using the staging memory."""
        self.pages = pages
        self.staged = memory.stage(len(positions))
        self.straight = straight
        self.seconds = 0.0
        self._future: Future[dict[str, int]] | None = None
        self._began = time.monotonic()
        self._deadline = deadline
        self._memory = memory
        self._start = positions.start
        self._ready = [False] * len(memory.names)
        self._told = told
        self._lock = threading.Lock()
        self._given_up = False
        self._native = native
        self.wanted = True  # any thread may set it to False
        self._was_read: bool | None = None  # whether the model's thread read what is arriving; None: not tried

    def begin(self, future: Future[dict[str, int]]) -> None:
        """Begin; `future` is the loader's."""
        self._future = future
        future.add_done_callback(lambda _: self._tell(None))

    def wait_for(self, layer: int) -> None:
        """Wait until the layer is in place or will not come. In the latter case the load has failed, even if it still
        ends well: the step continues without it and its result is discarded."""
        while not self._ready[layer] and not self.is_over():
            assert self._told is not None, "not waited for"
            try:
                work = self._told.get(timeout=max(self._deadline - time.monotonic(), 0))
            except queue.Empty:
                break
            if work is not None:
                work()
        if not self._ready[layer]:
            self._give_up()

    def is_over(self) -> bool:
        """Whether it ended or its time is over."""
        assert self._future is not None
        return self._future.done() or time.monotonic() > self._deadline

    def result(self) -> dict[str, int]:
        """Return tokens by tier. Raises the load's error, or TimeoutError. Nothing is written into the pages
        afterwards."""
        assert self._future is not None
        self.wait_for(len(self._ready) - 1)
        wait([self._future], timeout=max(self._deadline - time.monotonic(), 0))
        came_late = self._give_up()
        taken = self._future.result(timeout=0)
        if came_late:
            raise TimeoutError
        return taken

    def _give_up(self) -> bool:
        """Let nothing more be written into the pages. Return whether that was so already."""
        with self._lock:
            was, self._given_up = self._given_up, True
        return was

    # core.ports.ReceivingSink

    @property
    def geometry(self) -> KVGeometry:
        return self.staged.geometry

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return self.staged.plane(layer, kv)[:, start - self._start : end - self._start]

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self.view(layer, kv, start, start + data.shape[1])[...] = data

    def defer(self, arriving: Arriving) -> bool:
        """Defer nothing, but read what is in the page cache directly."""
        if self._native is None or self._told is None:
            return False
        try:
            for layer in range(len(self._ready)):
                arriving.ready(layer, self._from_cache)
        finally:
            self._was_read = None
        return True

    def receive(self, coming: Coming) -> bool:
        if self._native is None or (reads := coming.reads()) is None:
            return False
        native = self._native

        def receive(reads: Reads, replies: Replies) -> bool:
            seconds = replies.deadline - time.monotonic()  # the server's time, without the wait before `received`
            team = 1 if self._told is None else torch.get_num_threads()

            def received() -> bool:
                deadline = min(time.monotonic() + seconds, self._deadline)
                return native.receive(reads, replace(replies, deadline=deadline), team=team, go_on=lambda: self.wanted)

            if self._told is not None:
                return self._lent(received)
            with self._awaited():
                return received()

        try:
            self._was_read = coming.receive(self._target(reads), receive)
            for layer in range(len(self._ready)) if self._was_read else ():
                self.commit(layer, coming.start, coming.end)
            return self._was_read
        finally:
            self._was_read = None

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> KVSink | None:
        return None  # the pages are vLLM's

    def commit(self, layer: int, start: int, end: int) -> None:
        """Write a part of a layer into the pages at once; parts arrive in order."""
        size = self._memory.page_size
        first, last = (start - self._start) // size, (end - self._start) // size
        with self._awaited():
            if not (self._was_read and self.straight):
                self._memory.write(self.staged, layer, self.pages[first:last], first)
        if last == len(self.pages):
            self.seconds = time.monotonic() - self._began
            self._ready[layer] = True
            self._tell(None)

    def arrived(self) -> None:
        """Do nothing: what is committed is in the pages."""

    def _tell(self, work: Work | None) -> None:
        if self._told is not None:
            self._told.put(work)

    def _from_cache(self, reads: Reads, layer: int) -> bool:
        """Read all layers at once from the page cache; a `core.reads.ReadCached`."""
        if self._was_read is None:
            cached, target = self._native, self._target(reads)
            assert cached is not None
            try:
                self._was_read = self._lent(lambda: cached(target, len(self._ready) - 1))
            except Late:
                self._was_read = False
        return self._was_read

    def _target(self, reads: Reads) -> Reads:
        return self._memory.placed(reads, self.staged, self.pages) if self.straight else reads

    def _lent(self, work: Callable[[], bool]) -> bool:
        """Run work in the model's thread and return its result. Raises what it raises, and Late if it was not begun."""
        done: Future[bool] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    with self._awaited():
                        done.set_result(work())
                except Exception as error:  # it concerns the loader, not the model
                    done.set_exception(error)
                except BaseException:  # raised by a signal: the loader ends, and the model's thread handles it
                    done.set_exception(Late("the model's thread was interrupted"))
                    raise

        self._tell(run)
        while self.wanted and time.monotonic() < self._deadline and not wait([done], timeout=_LOOK_UP).done:
            pass
        if done.cancel():
            raise Late("the load came too late")
        return done.result()

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """Guard writes into vLLM's pages: abandoning the load waits for the end of the block. Raises Late."""
        with self._lock:
            if self._given_up:
                raise Late("the load came too late")
            yield


class Late(Exception):
    """No caller waits for the load any more. It is no OSError, so that no tier is blamed for it."""


class Source:
    """Staged pages for positions from `start` on, as a `KVSource`."""

    def __init__(self, staged: Staged, start: int) -> None:
        self._staged = staged
        self._start = start

    @property
    def geometry(self) -> KVGeometry:
        return self._staged.geometry

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        self._staged.ready()
        return self._staged.plane(layer, kv)[:, start - self._start : end - self._start]
