"""The worker's half of the connector: moves KV between the store and vLLM's pages, layer by layer."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from keepwarm.core.blocks import Chain, chain
from keepwarm.core.identity import Namespace
from keepwarm.core.spans import Exactness
from keepwarm.errors import CorruptRun, StoreStalled
from keepwarm.integrations.vllm.counts import TransferStats
from keepwarm.integrations.vllm.deferred_saves import DeferredSaves
from keepwarm.integrations.vllm.device_loading import DeviceLoading, Piece
from keepwarm.integrations.vllm.device_pages import DevicePages
from keepwarm.integrations.vllm.loading import Loading, Source, Work
from keepwarm.integrations.vllm.memory import pages_of
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.page_copies import Pages, Staged
from keepwarm.integrations.vllm.variants import variant_of
from keepwarm.runtime.native.reads import cached_reads
from keepwarm.store.archive import Archive

log = logging.getLogger(__name__)

_LOADERS = 4  # loads at a time, so that a stalled one does not hold up the others


class WorkerHalf:
    """Lives in one of vLLM's workers and holds its shard of the heads and layers."""

    def __init__(
        self,
        archive: Archive,
        namespace: Namespace,
        rank: int,
        page_size: int,
        *,
        timeout: float,
        keeps: bool,
        at_once: bool = False,
        stores: bool = True,
        label: Exactness = Exactness.PREFIX,
    ) -> None:
        """`timeout` is in seconds. `keeps`: there is RAM or a disk to keep what comes from a remote tier. `at_once`:
        vLLM may write to pages before it tells that they changed owners, so a device's saves must not wait. Without
        `stores` another rank stores the same KV, and this one only loads. `label` is that of what is loaded."""
        self._archive = archive
        self._namespace = namespace
        self._rank = rank
        self._page_size = page_size
        self._timeout = timeout
        self._keeps = keeps
        self._at_once = at_once
        self._stores = stores
        self._memory: Pages | DevicePages | None = None
        self._deferred: DeferredSaves | None = None  # on a device
        self._loader = ThreadPoolExecutor(_LOADERS, thread_name_prefix="keepwarm-vllm")
        self._loading: list[Loading | DeviceLoading] = []
        self._told: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # work for the waiting model's thread
        self._apart: dict[str, Loading | DeviceLoading] = {}
        self._failed: set[int] = set()
        self._saved: set[str] = set()
        self.stats = TransferStats(label)

    def register(self, views: Mapping[str, torch.Tensor], count: int | None = None) -> None:
        """Note vLLM's `count` pages: per layer `[pages, heads, page_size, width]`, in the order of the layers."""
        self._memory = pages_of(views, self._page_size, count)
        if isinstance(self._memory, DevicePages):
            self._deferred = DeferredSaves(self._memory, self._put_save, at_once=self._at_once)
        self._number = {name: number for number, name in enumerate(views)}
        self._native = cached_reads() if self._memory.can_place else None

    # ---- loading ----

    def fence(self, step: Step) -> None:
        """Begin what was deferred to this step, before its pages are written to."""
        if self._deferred is not None:
            self._deferred.issue()
            self._deferred.fence(step.preempted)

    def start(self, step: Step) -> None:
        """Begin this step's loads. Layers become ready one after another; failures are known when loads end. On a
        device a load that is not apart is waited for here: within a graph nothing could wait for it."""
        self.fence(step)
        self._loading = [self._begin(load) for load in step.loads if not load.apart]
        self._apart |= {load.prefix.request_id: self._begin(load) for load in step.loads if load.apart}
        if self._deferred is not None:
            self.end_of_step()

    def wait_for(self, layer: str) -> None:
        """Wait until this layer's loads of the step are in place or abandoned.

        On the CPU this waits for all layers: loaders that take a core from the model's threads slow each of its many
        parallel regions, which costs more than concurrent loading saves. These threads themselves read what is in the
        page cache.
        """
        if self._deferred is not None:
            return
        number = len(self._pages.names) - 1 if self._pages.on_host else self._number[layer]
        try:
            for loading in self._loading:
                if isinstance(loading, Loading):
                    loading.wait_for(number)
        except BaseException:  # raised by a signal
            self._end_all()
            raise

    def _end_all(self) -> None:
        """Make loads end soon, as their results are no longer wanted."""
        for loading in (*self._loading, *self._apart.values()):
            loading.wanted = False

    def _begin(self, load: Load) -> Loading | DeviceLoading:
        memory = self._pages
        deadline = time.monotonic() + self._timeout
        pages = load.prefix.pages[load.start // self._page_size :]
        positions = range(load.start, len(load.prefix.tokens))
        if isinstance(memory, DevicePages):
            there = DeviceLoading(memory, pages, positions, deadline, memory.port.current().record())
            there.begin(self._loader.submit(self._load_pieces, load, there))
            return there
        is_far = any(ref.tier in self._archive.remotes.names for ref in load.found[self._rank])
        told = None if load.apart else self._told
        straight = not (is_far and self._keeps)
        sink = Loading(memory, pages, positions, deadline, told, self._native, straight=straight)
        sink.begin(self._loader.submit(self._load, load, sink))
        return sink

    def _load_pieces(self, load: Load, loading: DeviceLoading) -> dict[str, int]:
        """Load onto a device. Runs in a loader's thread: a piece is read while the one before it is copied."""
        taken: Counter[str] = Counter()
        for piece in loading.pieces():
            taken.update(self._load(load.part(piece.start, piece.end), piece))
        return dict(taken)

    def _load(self, load: Load, sink: Loading | Piece) -> dict[str, int]:
        """Load, and return tokens by tier. Runs in a loader's thread."""
        first, end = load.start // self._page_size, len(load.prefix.tokens)
        tokens = load.prefix.tokens[load.start :]
        kept = False
        try:
            try:
                taken = self._archive.load(load.found[self._rank], tokens, end, sink)
            except StoreStalled:
                kept = True  # a read may still write to the staging memory
                raise
            except CorruptRun:  # a run was merged with others, evicted or found damaged since the lookup
                blocks = self._chain(load.prefix)
                refs = self._archive.lookup([block.exact for block in blocks])
                if len(refs) < len(blocks):
                    raise
                sink.straight = not self._keeps  # it may come from a remote tier now
                taken = self._archive.load(refs[first:], tokens, end, sink)
            sink.arrived()
            if self._keeps and not taken.keys().isdisjoint(self._archive.remotes.names):
                kept = True
                self._put(load.prefix, load.start, sink.staged)
            return taken
        finally:
            if not kept:
                sink.staged.release()

    def end_of_step(self) -> None:
        """Wait for the step's loads, and count them."""
        for loading in self._loading:
            self._ended(loading)
        self._loading = []

    def take_arrived(self) -> set[str]:
        """Return, once, the requests whose loads without a waiting step have ended, successfully or not."""
        ended = {request_id for request_id, loading in self._apart.items() if loading.is_over()}
        for request_id in ended:
            self._ended(self._apart.pop(request_id))
        return ended

    def _ended(self, loading: Loading | DeviceLoading) -> None:
        try:
            by_tier = loading.result()
        except Exception as error:  # after any error vLLM computes these pages itself
            why = str(error) or f"it took longer than load_timeout, {self._timeout} s"
            log.warning("loading %d pages failed, vLLM recomputes them: %s", len(loading.pages), why)
            self._failed.update(loading.pages)
            self.stats.failed(len(loading.pages))
        else:
            self.stats.loaded(by_tier, loading.seconds)

    def take_failed(self) -> set[int]:
        """Return, once, the pages whose KV did not arrive."""
        failed, self._failed = self._failed, set()
        return failed

    # ---- saving ----

    def save(self, step: Step) -> None:
        """Copy the pages to store, as vLLM may overwrite them from now on. The store takes the copies later. On a
        device the copies begin with the next step."""
        saves = step.saves if self._stores else [save.of_nothing() for save in step.saves]
        if self._deferred is not None:
            self._deferred.defer(saves)
            return
        for save in saves:
            try:
                if self._stores:
                    self._save(save)
            except Exception as error:  # requests must not fail because of this
                log.warning("saving %d tokens failed: %s", len(save.prefix.tokens) - save.start, error)
            if save.last:
                self._saved.add(save.prefix.request_id)

    def _save(self, save: Save) -> None:
        started = time.perf_counter()
        assert isinstance(self._pages, Pages)
        staged = self._pages.stage(len(save.prefix.tokens) - save.start)
        self._pages.read(staged, save.prefix.pages[save.start // self._page_size :])
        self._put(save.prefix, save.start, staged)
        self.stats.saved(staged.tokens, time.perf_counter() - started)

    def _put_save(self, save: Save, staged: Staged, seconds: float) -> None:
        self._put(save.prefix, save.start, staged)
        self.stats.saved(staged.tokens, seconds)

    def _put(self, prefix: Prefix, start: int, staged: Staged) -> None:
        """Hand a request's KV from `start` on to the store, unless its salt was purged since the request arrived."""
        blocks, epoch = self._chain(prefix)[start // self._page_size :], self._archive.epochs.of(prefix.began)
        source = Source(staged, start)
        self._archive.put(source, blocks, self._variant(prefix), on_copied=staged.release, epoch=epoch)

    def take_saved(self) -> set[str]:
        """Return, once, the ended requests whose answers are copied."""
        saved, self._saved = self._saved, set()
        return saved if self._deferred is None else self._deferred.take_finished()

    def close(self) -> None:
        self._end_all()
        self._loader.shutdown(wait=True, cancel_futures=True)
        if self._deferred is not None and isinstance(self._memory, DevicePages):
            self._deferred.issue()
            self._memory.drain()

    @property
    def _pages(self) -> Pages | DevicePages:
        if self._memory is None:
            raise RuntimeError("vLLM registered no pages")
        return self._memory

    def _variant(self, prefix: Prefix) -> Namespace:
        return variant_of(self._namespace, prefix.variant)

    def _chain(self, prefix: Prefix) -> Chain:
        cuts = range(self._page_size, len(prefix.tokens) + 1, self._page_size)
        return chain(prefix.tokens, cuts, self._variant(prefix), prefix.extra_keys)
