"""A worker's half: moves KV between the store and vLLM's pages, a layer at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace

import torch

from keepwarm.core.blocks import Block, chain
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.identity import Namespace
from keepwarm.core.ports import BlockCodec, Bytes, KVSink
from keepwarm.core.reads import Arriving, Coming, Reads, Replies
from keepwarm.errors import CorruptRun, StoreStalled
from keepwarm.integrations.vllm.identity import variant_of
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.metrics import TransferStats
from keepwarm.integrations.vllm.pages import Pages, Staged
from keepwarm.runtime.native.reads import CachedReads, cached_reads
from keepwarm.store.archive import Archive

log = logging.getLogger("keepwarm.vllm")

_LOADERS = 4  # loads at a time: one that stalls shall not hold up the others


class WorkerHalf:
    """Lives in one of vLLM's workers and holds its shard of the heads and layers."""

    def __init__(
        self, archive: Archive, namespace: Namespace, rank: int, page_size: int, *, timeout: float, keeps: bool
    ) -> None:
        """`timeout` in seconds; with `keeps` there is RAM or a disk to keep what comes from afar."""
        self._archive = archive
        self._namespace = namespace
        self._rank = rank
        self._page_size = page_size
        self._timeout = timeout
        self._keeps = keeps
        self._memory: Pages | None = None
        self._loader = ThreadPoolExecutor(_LOADERS, thread_name_prefix="keepwarm-vllm")
        self._loading: list[_Loading] = []
        self._told: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()  # the model's thread, while it waits
        self._apart: dict[str, _Loading] = {}
        self._failed: set[int] = set()
        self._saved: set[str] = set()
        self.stats = TransferStats()

    def register(self, views: Mapping[str, torch.Tensor]) -> None:
        """Take note of vLLM's pages: per layer `[pages, heads, page_size, width]`, in the order of the layers."""
        self._memory = Pages(views, self._page_size)
        self._number = {name: number for number, name in enumerate(views)}
        self._native = cached_reads() if self._memory.can_place else None

    # ---- loading ----

    def start(self, step: Step) -> None:
        """Begin this step's loads. Layers become ready one after another; failures are found out when they end."""
        self._loading = [self._begin(load) for load in step.loads if not load.apart]
        self._apart |= {load.prefix.request_id: self._begin(load) for load in step.loads if load.apart}

    def wait_for(self, layer: str) -> None:
        """Until this layer's loads of the step are in place, or given up.

        On the CPU all layers are waited for: loaders that take a core from the model's threads slow each of its many
        parallel regions, which costs more than loading beside them saves. What lies in the page cache is read by those
        threads themselves.
        """
        number = len(self._pages.names) - 1 if self._pages.on_host else self._number[layer]
        for loading in self._loading:
            loading.wait_for(number)

    def _begin(self, load: Load) -> _Loading:
        is_far = any(ref.tier in self._archive.remotes.names for ref in load.found[self._rank])
        told = None if load.apart else self._told
        deadline = time.monotonic() + self._timeout
        sink = _Loading(self._pages, load, deadline, told, self._native, straight=not (is_far and self._keeps))
        sink.begin(self._loader.submit(self._load, load, sink))
        return sink

    def _load(self, load: Load, sink: _Loading) -> dict[str, int]:
        """Tokens by tier. Runs in a loader's thread."""
        first, end = load.start // self._page_size, len(load.prefix.tokens)
        tokens = load.prefix.tokens[load.start :]
        kept = False
        try:
            try:
                taken = self._archive.load(load.found[self._rank], tokens, end, sink)
            except StoreStalled:
                kept = True  # it may still be written to
                raise
            except CorruptRun:  # merged with others, given up or found damaged since it was looked up
                blocks = self._chain(load.prefix)
                refs = self._archive.lookup([block.exact for block in blocks])
                if len(refs) < len(blocks):
                    raise
                sink.straight = not self._keeps  # it may come from afar now
                taken = self._archive.load(refs[first:], tokens, end, sink)
            if self._keeps and not taken.keys().isdisjoint(self._archive.remotes.names):
                kept = True
                self._put(load.prefix, load.start, sink.staged)
            return taken
        finally:
            if not kept:
                sink.staged.release()

    def end_of_step(self) -> None:
        """Wait for what the step has loaded, and count it."""
        for loading in self._loading:
            self._ended(loading)
        self._loading = []

    def take_arrived(self) -> set[str]:
        """Requests whose loads apart from any step ended, well or not, once."""
        ended = {request_id for request_id, loading in self._apart.items() if loading.is_over()}
        for request_id in ended:
            self._ended(self._apart.pop(request_id))
        return ended

    def _ended(self, loading: _Loading) -> None:
        try:
            by_tier = loading.result()
        except Exception as error:  # whatever it was: vLLM computes these pages itself
            why = str(error) or f"it took longer than load_timeout, {self._timeout} s"
            log.warning("loading %d pages failed, vLLM recomputes them: %s", len(loading.pages), why)
            self._failed.update(loading.pages)
            self.stats.failed(len(loading.pages))
        else:
            self.stats.loaded(by_tier, loading.seconds)

    def take_failed(self) -> set[int]:
        """Pages whose KV did not arrive, once."""
        failed, self._failed = self._failed, set()
        return failed

    # ---- saving ----

    def save(self, step: Step) -> None:
        """Copy the pages to be stored, as vLLM may write into them from now on; the store takes the copies later."""
        for save in step.saves:
            try:
                self._save(save)
            except Exception as error:  # never a request's trouble
                log.warning("saving %d tokens failed: %s", len(save.prefix.tokens) - save.start, error)
            if save.last:
                self._saved.add(save.prefix.request_id)

    def _save(self, save: Save) -> None:
        started = time.perf_counter()
        staged = self._pages.stage(len(save.prefix.tokens) - save.start)
        self._pages.read(staged, save.prefix.pages[save.start // self._page_size :])
        self._put(save.prefix, save.start, staged)
        self.stats.saved(staged.tokens, time.perf_counter() - started)

    def _put(self, prefix: Prefix, start: int, staged: Staged) -> None:
        """Hand a request's KV from `start` on to the store, unless its salt was purged since the request came."""
        blocks, epoch = self._chain(prefix)[start // self._page_size :], self._archive.epochs.of(prefix.began)
        source = _Source(staged, start)
        self._archive.put(source, blocks, self._variant(prefix), on_copied=staged.release, epoch=epoch)

    def take_saved(self) -> set[str]:
        """Requests that ended and whose answer is copied, once."""
        saved, self._saved = self._saved, set()
        return saved

    def close(self) -> None:
        self._loader.shutdown(wait=True, cancel_futures=True)

    @property
    def _pages(self) -> Pages:
        if self._memory is None:
            raise RuntimeError("vLLM registered no pages")
        return self._memory

    def _variant(self, prefix: Prefix) -> Namespace:
        return variant_of(self._namespace, prefix.variant)

    def _chain(self, prefix: Prefix) -> tuple[Block, ...]:
        cuts = range(self._page_size, len(prefix.tokens) + 1, self._page_size)
        return chain(prefix.tokens, cuts, self._variant(prefix), prefix.extra_keys)


_Work = Callable[[], None]


class _Loading:
    """Loads of one request: a `KVSink` over vLLM's pages, filled by a loader's thread and awaited by the model's.

    While the model's thread waits, it reads what lies in the page cache, with its team of OpenMP threads, and receives
    what a Redis server sends, with its team asleep: by itself that spins for a while, on the cores that others need.
    """

    def __init__(
        self,
        memory: Pages,
        load: Load,
        deadline: float,
        told: queue.SimpleQueue[_Work | None] | None,
        native: CachedReads | None,
        *,
        straight: bool,
    ) -> None:
        """`deadline` in seconds of `time.monotonic`; `told` is what the model's thread is told, None where it does not
        wait. With `straight` what lies in the page cache or comes from a Redis server goes into vLLM's pages without
        touching the staging memory."""
        first = load.start // memory.page_size
        self.pages = load.prefix.pages[first:]
        self.staged = memory.stage(len(load.prefix.tokens) - load.start)
        self.straight = straight
        self.seconds = 0.0
        self._future: Future[dict[str, int]] | None = None
        self._began = time.monotonic()
        self._deadline = deadline
        self._memory = memory
        self._start = load.start
        self._ready = [False] * len(memory.names)
        self._told = told
        self._lock = threading.Lock()
        self._given_up = False
        self._native = native
        self._was_read: bool | None = None  # of what is arriving, by the model's thread; None: not tried

    def begin(self, future: Future[dict[str, int]]) -> None:
        """`future` is the loader's."""
        self._future = future
        future.add_done_callback(lambda _: self._tell(None))

    def wait_for(self, layer: int) -> None:
        """Return when the layer is in place, or will not come: then the load has failed, even if it ends well yet, as
        the step goes on without it and its result is thrown away."""
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
        """Whether it ended, or has had its time."""
        assert self._future is not None
        return self._future.done() or time.monotonic() > self._deadline

    def result(self) -> dict[str, int]:
        """Tokens by tier. Raises what went wrong, and TimeoutError; nothing is written into the pages afterwards."""
        assert self._future is not None
        self.wait_for(len(self._ready) - 1)
        wait([self._future], timeout=max(self._deadline - time.monotonic(), 0))
        came_late = self._give_up()
        taken = self._future.result(timeout=0)
        if came_late:
            raise TimeoutError
        return taken

    def _give_up(self) -> bool:
        """Have nothing written into the pages any more; whether that was so already."""
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
        """Nothing is put off; what lies in the page cache takes the short way."""
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
            seconds = replies.deadline - time.monotonic()  # the server's: it is not to blame for what comes before
            team = 1 if self._told is None else torch.get_num_threads()

            def received() -> bool:
                deadline = min(time.monotonic() + seconds, self._deadline)
                return native.receive(reads, replace(replies, deadline=deadline), team=team)

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
        """Parts of a layer arrive in order, and go into the pages at once."""
        size = self._memory.page_size
        first, last = (start - self._start) // size, (end - self._start) // size
        with self._awaited():
            if not (self._was_read and self.straight):
                self._memory.write(self.staged, layer, self.pages[first:last], first)
        if last == len(self.pages):
            self.seconds = time.monotonic() - self._began
            self._ready[layer] = True
            self._tell(None)

    def _tell(self, work: _Work | None) -> None:
        if self._told is not None:
            self._told.put(work)

    def _from_cache(self, reads: Reads, layer: int) -> bool:
        """A `core.reads.ReadCached` of all layers at once."""
        if self._was_read is None:
            cached, target = self._native, self._target(reads)
            assert cached is not None
            try:
                self._was_read = self._lent(lambda: cached(target, len(self._ready) - 1))
            except _Late:
                self._was_read = False
        return self._was_read

    def _target(self, reads: Reads) -> Reads:
        return self._memory.placed(reads, self.staged, self.pages) if self.straight else reads

    def _lent(self, work: Callable[[], bool]) -> bool:
        """What work in the model's thread comes to. Raises what it raised, and _Late when it was not begun."""
        done: Future[bool] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    with self._awaited():
                        done.set_result(work())
                except BaseException as error:  # the loader's trouble, not the model's
                    done.set_exception(error)

        self._tell(run)
        wait([done], timeout=max(self._deadline - time.monotonic(), 0))
        if done.cancel():
            raise _Late("the load came too late")
        return done.result()

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """For what writes into vLLM's pages: giving up waits for its end. Raises _Late."""
        with self._lock:
            if self._given_up:
                raise _Late("the load came too late")
            yield


class _Late(Exception):
    """Nobody waits for the load any more. No OSError: no tier shall be blamed for it."""


class _Source:
    """Staged pages of the positions from `start` on, as a `KVSource`."""

    def __init__(self, staged: Staged, start: int) -> None:
        self._staged = staged
        self._start = start

    @property
    def geometry(self) -> KVGeometry:
        return self._staged.geometry

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        return self._staged.plane(layer, kv)[:, start - self._start : end - self._start]
