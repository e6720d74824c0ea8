"""One run's blocks on their way from disk into a sink, layer by layer: while the earlier layers are computed with, the
later ones are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import numpy.typing as npt

from keepwarm.core.ports import Bytes, KVSink
from keepwarm.core.reads import ReadCached, Reads
from keepwarm.errors import CorruptRun, StoreStalled
from keepwarm.store.disk.timeouts import BoundedCalls
from keepwarm.store.runfile.codec import CodedSink
from keepwarm.store.runfile.layout import StoredBlock
from keepwarm.store.runfile.reader import RunReader

THREADS = 2  # more gain nothing: two already saturate memory, and computing needs the cores


class Fetch:
    """Implements `core.reads.Arriving`; closes the run's file after the last layer, or with `close`.

    What lies in the page cache is read by who asks for a layer, with all its threads (`cached`). As soon as something
    is not there, `THREADS` threads of the store read ahead, layer after layer, and who asks waits for them.
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
        """`blocks` are consecutive ones of the run, `end` lies in the last; `refuse` is told of an error once."""
        self.end = end
        self.layers = len(reader.header.geometry.layers)
        self._reader, self._blocks, self._sink = reader, blocks, sink
        self._bounded, self._refuse = bounded, refuse
        start = blocks[0].start
        self._views = [(sink.view(n, 0, start, end), sink.view(n, 1, start, end)) for n in range(self.layers)]
        self._reached = 0  # layers that are in place
        self._lock = threading.Lock()
        self._next = 0  # layer that no thread has taken
        self._arrived: list[Future[None]] = []  # per layer, once threads read
        self._threads: list[Future[None]] = []
        self._reading = 0  # threads
        self._closed = False
        self._reads: Reads | None = None
        self._plain = reader.header.cipher is None and blocks[-1].end == end

    def ready(self, layer: int, cached: ReadCached | None = None) -> None:
        """See `core.reads.Arriving`."""
        if layer < self._reached:
            return
        try:
            if not self._is_cached(layer, cached):
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
            self._reads = described(self._reader, self._blocks, self._views)
        return self._reads

    def passed(self, layer: int) -> None:
        """See `core.reads.Arriving`."""
        if self._reads is not None and layer < self.layers:
            self._reads.passed(layer)
        self._commit(layer)

    def _commit(self, layer: int) -> None:
        for each in range(self._reached, layer):
            self._sink.commit(each, self._blocks[0].start, self.end)
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
            self._reads = described(self._reader, self._blocks, self._views)
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
        """Read layer after layer, with others who do the same; one has the system read ahead from layer `ahead` on."""
        try:
            if ahead is not None:
                self._reader.read_ahead(ahead, self._blocks)
            while True:
                with self._lock:
                    if self._closed or self._next == self.layers:
                        return
                    layer = self._next
                    self._next += 1
                try:
                    self._reader.load_layer(layer, self._blocks, self.end, *self._views[layer])
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


def described(reader: RunReader, blocks: Sequence[StoredBlock], views: Sequence[tuple[Bytes, Bytes]]) -> Reads | None:
    """The reads that fill `views` (per layer keys and values, `[heads, tokens, head_bytes]`) with whole blocks; None
    for layers of different numbers of heads or strided memory."""
    header, layers = reader.header, len(views)
    heads = {(shape.kv_heads, shape.key_dim, shape.value_dim) for shape in header.geometry.layers}
    planes = [view for pair in views for view in pair]
    if len(heads) != 1 or any(view.strides[1:] != (view.shape[2], 1) for view in planes):
        return None
    count, start = len(blocks), blocks[0].start
    begins = np.array([block.start for block in blocks]) - start
    lengths = np.array([block.length for block in blocks])
    head = np.arange(planes[0].shape[0])
    widths = np.array([view.shape[2] for view in planes[:2]])

    def spread(per_plane: Sequence[int], per_head: Sequence[int]) -> npt.NDArray[np.int64]:
        """`[layer, block, kv, head]`: where the rows of each block begin."""
        first = np.array(per_plane).reshape(-1, 1, 2, 1) + np.array(per_head).reshape(-1, 1, 2, 1) * head
        places: npt.NDArray[np.int64] = first + begins.reshape(1, -1, 1, 1) * widths.reshape(1, 1, 2, 1)
        return places

    offsets = [reader.offset(layer, kv, start) for layer in range(layers) for kv in (0, 1)]
    rows = len(header.tokens)
    parts = np.empty((layers, count, 2, len(head)), Reads.PART)
    parts["offset"] = spread(offsets, [rows * view.shape[2] for view in planes])
    parts["to"] = spread([_address(view) for view in planes], [view.strides[0] for view in planes])
    parts["size"] = lengths.reshape(1, -1, 1, 1) * widths.reshape(1, 1, 2, 1)
    first = blocks[0].ordinal
    sums = np.frombuffer(header.checksums, ">u8").reshape(layers, len(header.blocks), 2)
    tasks = np.empty((layers, count), Reads.TASK)
    tasks["layer"] = np.arange(layers).reshape(-1, 1)
    tasks["fd"] = reader.fd
    each = 2 * len(head)
    tasks["first"] = (np.arange(layers * count) * each).reshape(tasks.shape)
    tasks["last"] = tasks["first"] + each
    tasks["high"], tasks["low"] = sums[:, first : first + count].transpose(2, 0, 1)
    return Reads(parts.reshape(-1), tasks.reshape(-1), planes)


def _address(view: Bytes) -> int:
    return int(view.__array_interface__["data"][0])
