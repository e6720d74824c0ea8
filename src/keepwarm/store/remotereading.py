"""Reading a run out of a remote body: straight into where the KV goes, verified as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, wait

import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import KVSink
from keepwarm.errors import CorruptRun
from keepwarm.store.coding import Coding
from keepwarm.store.header import RunHeader
from keepwarm.store.reading import RunReader
from keepwarm.store.source import Source


class RemoteReader(RunReader):
    """A run file whose head is here and whose KV is in `body`. Its methods may be called from several threads."""

    def __init__(self, body: Source, header: RunHeader) -> None:
        super().__init__(-1, header)
        self._body = body
        self.read_bytes = 0

    def _fill(self, offset: int, buffers: list[memoryview]) -> None:
        self.read_bytes += sum(len(buffer) for buffer in buffers)
        self._body.fill(offset - self.header.data_offset, buffers)


def load_blocks(
    reader: RunReader,
    first: int,
    ids: Sequence[bytes],
    tokens: TokenIds,
    end: int,
    sink: KVSink,
    executor: Executor,
    coding: Coding | None = None,
) -> None:
    """Read the blocks `ids`, from ordinal `first` on and up to position `end`, straight into the sink.

    `tokens` are the expected ids from the first block's start to `end`. Layers are read in the executor's threads and
    committed in order and in this one, after their bytes are verified; none is written to after this returned or
    raised. Raises CorruptRun for wrong bytes, token ids or blocks, and what the reader's source does.
    """
    header = reader.header
    blocks = header.blocks[first : first + len(ids)]
    if not blocks or [block.id for block in blocks] != list(ids):
        raise CorruptRun("it holds other blocks")
    start = blocks[0].start
    if not blocks[-1].start < end <= blocks[-1].end:
        raise CorruptRun(f"position {end} is not in the block [{blocks[-1].start}, {blocks[-1].end})")
    if not np.array_equal(header.tokens[start - header.start : end - header.start], tokens):
        raise CorruptRun("token ids differ from the prompt's")
    if coding is not None:  # blocks are decoded as a whole
        sink = coding.sink(sink, header.geometry, blocks, end)
        end = blocks[-1].end
    count = len(header.geometry.layers)
    views = [(sink.view(layer, 0, start, end), sink.view(layer, 1, start, end)) for layer in range(count)]
    for layer, shape in enumerate(header.geometry.layers):
        for kv, view in enumerate(views[layer]):
            expected = (shape.kv_heads, end - start, header.geometry.head_bytes(layer, kv))
            if view.shape != expected:
                raise CorruptRun(f"layer {layer} has {expected} bytes, the model expects {view.shape}")
    futures = [executor.submit(reader.load_layer, layer, blocks, end, *views[layer]) for layer in range(count)]
    try:
        for layer, future in enumerate(futures):
            future.result()
            sink.commit(layer, start, end)
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)
        raise
