"""A worker's half: moves KV between the store and vLLM's pages, a layer at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from keepwarm.core.blocks import Block, chain
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.identity import Namespace
from keepwarm.core.ports import Bytes
from keepwarm.core.reads import Arriving
from keepwarm.integrations.vllm.identity import variant_of
from keepwarm.integrations.vllm.messages import Load, Prefix, Save, Step
from keepwarm.integrations.vllm.metrics import TransferStats
from keepwarm.store.archive import Archive

log = logging.getLogger("keepwarm.vllm")


class WorkerHalf:
    """Lives in one of vLLM's workers and holds its shard of the heads and layers."""

    def __init__(self, archive: Archive, namespace: Namespace, page_size: int, *, timeout: float) -> None:
        self._archive = archive
        self._namespace = namespace
        self._page_size = page_size
        self._timeout = timeout
        self._pages: dict[str, torch.Tensor] = {}
        self._geometry: KVGeometry | None = None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-vllm")
        self._loading: list[_Loading] = []
        self._failed: set[int] = set()
        self._saved: set[str] = set()
        self.stats = TransferStats()

    def register(self, pages: Mapping[str, torch.Tensor]) -> None:
        """Take note of vLLM's pages: per layer `[pages, heads, page_size, width]`, in the order of the layers."""
        self._pages = dict(pages)
        self._geometry = KVGeometry(tuple(_shape(name, view, self._page_size) for name, view in pages.items()), _BYTES)

    # ---- loading ----

    def start(self, step: Step) -> None:
        """Begin this step's loads. Layers become ready one after another; a failure is found out by `failed`."""
        self._loading = [self._begin(load) for load in step.loads]

    def wait_for(self, layer: str) -> None:
        """Until this layer's loads of the step are in place, or given up."""
        number = self._number.get(layer)
        if number is not None:
            for loading in self._loading:
                loading.wait_for(number)

    @property
    def _number(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._pages)}

    def _begin(self, load: Load) -> _Loading:
        sink = _Loading(self._pages, self._layout(), load, self._page_size, time.perf_counter() + self._timeout)
        sink.future = self._loader.submit(self._load, load, sink)
        return sink

    def _load(self, load: Load, sink: _Loading) -> dict[str, int]:
        blocks = self._chain(load.prefix)
        refs = self._archive.lookup([block.exact for block in blocks])
        if len(refs) < len(blocks):
            raise LookupError(f"{len(blocks) - len(refs)} of {len(blocks)} blocks are gone since they were looked up")
        first = load.start // self._page_size
        return self._archive.load(refs[first:], load.prefix.tokens[load.start :], len(load.prefix.tokens), sink)

    def end_of_step(self) -> None:
        """Wait for what the step has loaded, and count it."""
        for loading in self._loading:
            try:
                by_tier = loading.result()
            except Exception as error:  # whatever it was: vLLM computes these pages itself
                log.warning("loading %d pages failed, vLLM recomputes them: %s", len(loading.pages), error)
                self._failed.update(loading.pages)
                self.stats.failed(len(loading.pages))
            else:
                self.stats.loaded(by_tier, loading.seconds)
        self._loading = []

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
        blocks = self._chain(save.prefix)
        known = len(self._archive.lookup([block.exact for block in blocks]))
        if known == len(blocks):
            return
        source = _Copy(self._pages, self._layout(), save.prefix.pages[known:], known * self._page_size)
        self._archive.put(source, blocks[known:], self._variant(save.prefix))
        self.stats.saved(len(save.prefix.tokens) - known * self._page_size, time.perf_counter() - started)

    def take_saved(self) -> set[str]:
        """Requests that ended and whose answer is copied, once."""
        saved, self._saved = self._saved, set()
        return saved

    def close(self) -> None:
        self._loader.shutdown(wait=True, cancel_futures=True)

    # ---- both ----

    def _layout(self) -> KVGeometry:
        if self._geometry is None:
            raise RuntimeError("vLLM registered no pages")
        return self._geometry

    def _variant(self, prefix: Prefix) -> Namespace:
        return variant_of(self._namespace, prefix.variant)

    def _chain(self, prefix: Prefix) -> tuple[Block, ...]:
        cuts = range(self._page_size, len(prefix.tokens) + 1, self._page_size)
        return chain(prefix.tokens, cuts, self._variant(prefix), prefix.extra_keys)


_BYTES = "float8_e4m3fn"  # one byte each: rows are moved as they are, whatever they mean to vLLM


def _shape(name: str, view: torch.Tensor, page_size: int) -> LayerGeometry:
    if view.dim() != 4 or view.shape[2] != page_size:
        raise ValueError(
            f"layer {name}: expected pages of shape [pages, heads, {page_size}, width], got {list(view.shape)}; this "
            "vLLM lays its KV out in another way"
        )
    keys = view.shape[3] // 2
    return LayerGeometry(view.shape[1], keys * view.element_size(), (view.shape[3] - keys) * view.element_size())


class _Loading:
    """Loads of one request: a `KVSink` over vLLM's pages, filled by the loader's thread and awaited by the model's."""

    def __init__(
        self, views: Mapping[str, torch.Tensor], geometry: KVGeometry, load: Load, page_size: int, deadline: float
    ) -> None:
        first = load.start // page_size
        self.pages = load.prefix.pages[first:]
        self.future: Future[dict[str, int]] | None = None
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._deadline = deadline
        self._views = list(views.values())
        self._index = torch.tensor(self.pages, dtype=torch.long)
        self._geometry = geometry
        self._start = load.start
        self._tokens = len(load.prefix.tokens) - load.start
        self._page_size = page_size
        self._staging: dict[tuple[int, int], Bytes] = {}
        self._ready = [threading.Event() for _ in self._views]
        self._lock = threading.Lock()
        self._given_up = False

    def wait_for(self, layer: int) -> None:
        assert self.future is not None
        while not self._ready[layer].wait(0.05):
            if self.future.done() or time.perf_counter() > self._deadline:
                return  # failed or too slow: the step's result is thrown away

    def result(self) -> dict[str, int]:
        """Tokens by tier. Raises what went wrong, and TimeoutError; nothing is written into the pages afterwards."""
        assert self.future is not None
        wait([self.future], timeout=max(self._deadline - time.perf_counter(), 0))
        with self._lock:
            self._given_up = True
        return self.future.result(timeout=0)

    # core.ports.KVSink

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        shape = self._geometry.layers[layer]
        if (layer, kv) not in self._staging:
            width = shape.value_dim if kv else shape.key_dim
            self._staging[layer, kv] = np.empty((shape.kv_heads, self._tokens, width), np.uint8)
        return self._staging[layer, kv][:, start - self._start : end - self._start]

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        self.view(layer, kv, start, start + data.shape[1])[...] = data

    def defer(self, arriving: Arriving) -> bool:
        return False  # this thread has nothing else to do

    def commit(self, layer: int, start: int, end: int) -> None:
        """Parts of a layer arrive in order; with the last one it goes into the pages."""
        if end - self._start < self._tokens:
            return
        view = self._views[layer]
        halves = [self._paged(self._staging.pop((layer, kv)), view) for kv in (0, 1)]
        index, keys = self._index.to(view.device), halves[0].shape[3]
        with self._lock:
            if self._given_up:
                raise TimeoutError("the load came too late")
            view[index, :, :, :keys] = halves[0]
            view[index, :, :, keys:] = halves[1]
        self._ready[layer].set()
        self.seconds = time.perf_counter() - self._began

    def _paged(self, rows: Bytes, view: torch.Tensor) -> torch.Tensor:
        """`[heads, tokens, bytes]` as `[pages, heads, page_size, width]` in the pages' dtype, on their device."""
        typed = torch.from_numpy(rows).view(view.dtype)
        paged: torch.Tensor = typed.unflatten(1, (len(self.pages), self._page_size)).transpose(0, 1)
        return paged.to(view.device)


class _Copy:
    """Host copy of pages: a `KVSource` of positions from `start` on."""

    def __init__(
        self, views: Mapping[str, torch.Tensor], geometry: KVGeometry, pages: Sequence[int], start: int
    ) -> None:
        index = torch.tensor(pages, dtype=torch.long)
        self.geometry = geometry
        self._start = start
        self._rows: list[Bytes] = []
        for view in views.values():
            taken = view[index.to(view.device)].permute(1, 0, 2, 3).contiguous().cpu()  # [heads, pages, page, width]
            rows = taken.flatten(1, 2).view(torch.uint8)
            self._rows.append(rows.numpy())

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        width = self.geometry.layers[layer].key_dim
        rows = self._rows[layer][:, start - self._start : end - self._start]
        return rows[:, :, width:] if kv else rows[:, :, :width]
