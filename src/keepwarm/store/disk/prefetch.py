"""Read one run's blocks from disk into a sink, layer by layer. Later layers are read while the model computes with the
earlier ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from keepwarm.core.ports import Bytes, KVSink
from keepwarm.core.reads import ReadCached, Reads
from keepwarm.errors import CorruptRun, StoreStalled
from keepwarm.store.disk.timeouts import BoundedCalls
from keepwarm.store.runfile.attended import Taken, attended
from keepwarm.store.runfile.codec import CodedSink
from keepwarm.store.runfile.layout import Layout, StoredBlock
from keepwarm.store.runfile.reader import RunReader

THREADS = 2  # more do not help: two saturate memory bandwidth, and the model needs the cores


class Fetch:
    """Implements `core.reads.Arriving`; closes the run's file after the last layer, or with `close`.

    The caller that asks for a layer reads what is in the page cache, with all its threads (`cached`). As soon as
    something is not there, `THREADS` threads of the store read ahead, layer after layer, and the caller waits for them.
    """

    def __init__(
        self,
        reader: RunReader,
        blocks: Sequence[StoredBlock],
        end: int,
        sink: KVSink,
        bounded: BoundedCalls,
        refuse: Callable[[CorruptRun], None],
    ) -> None:
        """`blocks` are consecutive blocks of the run, and `end` lies in the last. `refuse` gets an error, once."""
        self.end = end
        self.layers = len(reader.header.geometry.layers)
        self._reader, self._sink = reader, sink
        self._bounded, self._refuse = bounded, refuse
        self._taken = attended(sink, reader.header.geometry, blocks, end)
        self._views = views(sink, reader.layout, self._taken, end)
        self._reached = 0  # layers that are in place
        self._lock = threading.Lock()
        self._next = 0  # first layer that no thread has taken
        self._arrived: list[Future[None]] = []  # per layer, once threads read
        self._threads: list[Future[None]] = []
        self._reading = 0  # number of threads that read now
        self._closed = False
        self._reads: Reads | None = None
        self._plain = reader.header.cipher is None and blocks[-1].end == end

    def ready(self, layer: int, cached: ReadCached | None = None) -> None:
        """See `core.reads.Arriving`."""
        if layer < self._reached:
            return
        try:
            if self._taken[layer] and not self._is_cached(layer, cached):
                self._wait(layer)
        except CorruptRun as error:
            self._refuse(error)
            if not isinstance(error, StoreStalled):
                self.close()
            raise
        self._commit(layer + 1)

    def reads(self) -> Reads | None:
        """See `core.reads.Arriving`."""
        if self._reached or self._arrived or not self._plain or isinstance(self._sink, CodedSink):
            return None
        if self._reads is None:
            self._reads = described(self._reader, self._taken, self._views)
        return self._reads

    def passed(self, layer: int) -> None:
        """See `core.reads.Arriving`."""
        if self._reads is not None and layer < self.layers:
            self._reads.passed(layer)
        self._commit(layer)

    def _commit(self, layer: int) -> None:
        for each in range(self._reached, layer):
            if blocks := self._taken[each]:
                self._sink.commit(each, self._reader.layout.begin(each, blocks[0]), self.end)
        self._reached = layer
        if self._reached == self.layers:
            self.close()

    def close(self) -> None:
        """See `core.reads.Arriving`."""
        self._reached = self.layers
        with self._lock:
            self._closed = True
            if not self._reading:
                self._reader.close()
        for thread in self._threads:
            self._bounded.wait(thread)

    def _is_cached(self, layer: int, cached: ReadCached | None) -> bool:
        if cached is None or self._arrived or not self._plain:
            return False
        if self._reads is None:
            self._reads = described(self._reader, self._taken, self._views)
        return self._reads is not None and cached(self._reads, layer)

    def _wait(self, layer: int) -> None:
        if not self._arrived:
            self._next = layer
            self._arrived = [Future() for _ in range(self.layers)]
            for thread in range(min(THREADS, self.layers - layer)):
                self._reading += 1
                try:
                    self._threads.append(self._bounded.start(partial(self._read_on, layer if thread == 0 else None)))
                except StoreStalled:
                    self._reading -= 1
                    raise
        self._bounded.wait(self._arrived[layer])

    def _read_on(self, ahead: int | None) -> None:
        """Read the next free layer until none is left; several threads do so. The thread with `ahead` first lets the
        system read ahead from that layer on."""
        try:
            if ahead is not None:
                self._reader.read_ahead(ahead, self._taken)
            while True:
                with self._lock:
                    if self._closed or self._next == self.layers:
                        return
                    layer = self._next
                    self._next += 1
                try:
                    if blocks := self._taken[layer]:
                        self._reader.load_layer(layer, blocks, self.end, *self._views[layer])
                except BaseException as error:
                    self._arrived[layer].set_exception(self._reader.corrupt(error))
                    return
                else:
                    self._arrived[layer].set_result(None)
        finally:
            with self._lock:
                self._reading -= 1
                if self._closed and not self._reading:
                    self._reader.close()


def views(sink: KVSink, layout: Layout, taken: Taken, end: int) -> list[tuple[Bytes, ...]]:
    """Return the places of each layer's keys and values in a sink, `[heads, tokens, head_bytes]`; empty for a layer of
    which the sink takes nothing."""
    return [
        tuple(sink.view(layer, kv, layout.begin(layer, blocks[0]), end) for kv in (0, 1)) if blocks else ()
        for layer, blocks in enumerate(taken)
    ]


def described(reader: RunReader, taken: Taken, views: Sequence[Sequence[Bytes]]) -> Reads | None:
    """Return the reads that fill `views` (from the function `views`) with whole blocks. None if the layers differ in
    their numbers or sizes of heads, if the memory has gaps inside a head, or if there is nothing to read."""
    shapes = {(shape.kv_heads, shape.key_dim, shape.value_dim) for shape in reader.header.geometry.layers}
    planes = [view for pair in views for view in pair]
    if len(shapes) != 1 or not planes or any(view.strides[1:] != (view.shape[2], 1) for view in planes):
        return None
    groups: dict[tuple[int, int | None], list[int]] = {}  # layers that take the same rows
    for layer, blocks in enumerate(taken):
        groups.setdefault((len(blocks), reader.header.geometry.layers[layer].kept), []).append(layer)
    made: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
    for (count, _), layers in groups.items():
        if count:
            parts, tasks = _reads_of(reader, layers, taken[layers[0]], [views[layer] for layer in layers])
            if len(groups) > 1:
                made |= {layer: (parts[at], tasks[at]) for at, layer in enumerate(layers)}
    if len(groups) > 1:
        every = [made[layer] for layer in sorted(made)]
        parts = np.concatenate([each.reshape(-1) for each, _ in every])
        tasks = np.concatenate([each for _, each in every])
    each = 2 * planes[0].shape[0]
    tasks = tasks.reshape(-1)
    tasks["first"] = np.arange(len(tasks)) * each
    tasks["last"] = tasks["first"] + each
    return Reads(parts.reshape(-1), tasks, planes, len(taken))


def _reads_of(
    reader: RunReader, layers: Sequence[int], blocks: Sequence[StoredBlock], views: Sequence[Sequence[Bytes]]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return parts `[layer, block, kv, head]` and tasks `[layer, block]` of layers that take the same rows. The tasks
    do not refer to their parts yet."""
    header, planes = reader.header, [view for pair in views for view in pair]
    count, each = len(blocks), list(reader.layout.each(layers[0], blocks))
    begins = np.array([first for _, first, _ in each])
    lengths = np.array([last - first for _, first, last in each])
    head = np.arange(planes[0].shape[0])
    widths = np.array([view.shape[2] for view in planes[:2]])

    def spread(per_plane: Sequence[int], per_head: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return where the rows of each block begin, as `[layer, block, kv, head]`."""
        first = np.array(per_plane).reshape(-1, 1, 2, 1) + np.array(per_head).reshape(-1, 1, 2, 1) * head
        places: npt.NDArray[np.int64] = first + begins.reshape(1, -1, 1, 1) * widths.reshape(1, 1, 2, 1)
        return places

    offsets = [reader.offset(layer, kv, blocks[0]) for layer in layers for kv in (0, 1)]
    rows = reader.layout.shape(layers[0], 0)[1]
    parts = np.empty((len(layers), count, 2, len(head)), Reads.PART)
    parts["offset"] = spread(offsets, [rows * view.shape[2] for view in planes])
    parts["to"] = spread([_address(view) for view in planes], [view.strides[0] for view in planes])
    parts["size"] = lengths.reshape(1, -1, 1, 1) * widths.reshape(1, 1, 2, 1)
    first = blocks[0].ordinal
    sums = np.frombuffer(header.checksums, ">u8").reshape(len(header.geometry.layers), len(header.blocks), 2)
    tasks = np.empty((len(layers), count), Reads.TASK)
    tasks["layer"] = np.array(layers).reshape(-1, 1)
    tasks["fd"] = reader.fd
    tasks["high"], tasks["low"] = sums[layers, first : first + count].transpose(2, 0, 1)
    return parts, tasks


def _address(view: Bytes) -> int:
    return int(view.__array_interface__["data"][0])
