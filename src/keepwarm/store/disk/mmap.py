"""Use a run's file in place: the bytes in the page cache are verified where they are, and nothing is copied.

A user of this option accepts two risks. A page that the system evicted and reads again from disk is not verified again.
And if another program truncates a file, this process dies. Keepwarm itself never truncates or overwrites a file.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from keepwarm.core.ports import Bytes, KVSink
from keepwarm.core.reads import ReadCached, Reads
from keepwarm.errors import CorruptRun
from keepwarm.store.disk.prefetch import described
from keepwarm.store.runfile.attended import attended
from keepwarm.store.runfile.layout import StoredBlock, block_checksum
from keepwarm.store.runfile.reader import RunReader


class MappedRun:
    """One run's blocks in place. Implements `core.reads.Arriving`: each layer is verified when it is requested."""

    def __init__(
        self,
        reader: RunReader,
        blocks: Sequence[StoredBlock],
        end: int,
        sink: KVSink,
        refuse: Callable[[CorruptRun], None],
    ) -> None:
        """Take the arguments of `Fetch`; the file may be closed afterwards. Raises OSError if it cannot be mapped."""
        header = reader.header
        self.end = end
        self._taken = attended(sink, header.geometry, blocks, end)
        self._memory = mmap.mmap(reader.fd, header.file_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._reader, self._sink, self._refuse = reader, sink, refuse
        layout, every = reader.layout, np.frombuffer(self._memory, np.uint8)

        def plane(layer: int, kv: int) -> Bytes:
            at, shape = header.data_offset + layout.offset(layer, kv), layout.shape(layer, kv)
            whole: Bytes = every[at : at + int(np.prod(shape))].reshape(shape)
            return whole[:, slice(*layout.rows(layer, self._taken[layer]))]

        self._views = [(plane(n, 0), plane(n, 1)) if taken else () for n, taken in enumerate(self._taken)]
        self._reached = 0
        self._reads: Reads | None = None

    @property
    def is_in_memory(self) -> bool:
        """Whether the page cache now holds all needed bytes of the file. If so, no method waits for a disk."""
        address = np.frombuffer(self._memory, np.uint8).ctypes.data
        pages = np.zeros(-(-len(self._memory) // mmap.PAGESIZE), np.uint8)
        mincore = getattr(ctypes.CDLL(None), "mincore", None)
        if mincore is None:
            return False
        size = ctypes.c_size_t(len(self._memory))
        failed = mincore(ctypes.c_void_p(address), size, ctypes.c_void_p(pages.ctypes.data))
        there = np.concatenate([[0], np.cumsum(pages & 1, dtype=np.int64)])
        stretches = [_pages(head, address) for pair in self._views for view in pair for head in view]
        return not failed and all(there[last] - there[first] == last - first for first, last in stretches)

    def fill(self) -> None:
        """Give the sink all layers before they are verified. The sink must then ask for that (`KVSink.defer`)."""
        for layer, (blocks, pair) in enumerate(zip(self._taken, self._views, strict=True)):
            for kv, view in enumerate(pair):
                begin = self._reader.layout.begin(layer, blocks[0])
                self._sink.fill(layer, kv, begin, view[:, : self.end - begin])

    def ready(self, layer: int, cached: ReadCached | None = None) -> None:
        """See `core.reads.Arriving`."""
        try:
            reads = self.reads()
            for each in range(self._reached, layer + 1):
                if cached is None or reads is None or not cached(reads, each):
                    self._verify(each)
        except CorruptRun as error:
            self._refuse(error)
            raise
        self.passed(layer + 1)

    def reads(self) -> Reads | None:
        """See `core.reads.Arriving`."""
        if self._reads is None and (found := described(self._reader, self._taken, self._views)) is not None:
            found.tasks["fd"] = Reads.IN_PLACE
            self._reads = found
        return self._reads

    def passed(self, layer: int) -> None:
        """See `core.reads.Arriving`."""
        for each in range(self._reached, layer):
            if blocks := self._taken[each]:
                self._sink.commit(each, self._reader.layout.begin(each, blocks[0]), self.end)
        self._reached = max(self._reached, layer)
        if self._reads is not None:
            self._reads.passed(self._reached)

    def close(self) -> None:
        """See `core.reads.Arriving`. The memory stays mapped as long as it is used."""

    def _verify(self, layer: int) -> None:
        header = self._reader.header
        for block, first, last in self._reader.layout.each(layer, self._taken[layer]):
            found = block_checksum(*(view[:, first:last] for view in self._views[layer]))
            if found != header.checksum(layer, block.ordinal):
                error = CorruptRun(f"layer {layer}, block {block.ordinal}: the checksum does not match")
                raise self._reader.corrupt(error)


def _pages(rows: Bytes, address: int) -> tuple[int, int]:
    """Return the first page that holds the rows and the one after the last, counted from an address on."""
    first = int(rows.__array_interface__["data"][0]) - address
    return first // mmap.PAGESIZE, -(-(first + rows.nbytes) // mmap.PAGESIZE)


def map_run(
    reader: RunReader, blocks: Sequence[StoredBlock], end: int, sink: KVSink, refuse: Callable[[CorruptRun], None]
) -> MappedRun | None:
    """Map a run in place; None if it cannot be mapped or the page cache does not hold it."""
    try:
        run = MappedRun(reader, blocks, end, sink, refuse)
    except (OSError, ValueError):
        return None
    return run if run.is_in_memory else None
