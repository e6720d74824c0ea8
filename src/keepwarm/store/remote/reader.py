"""Read a run from a remote body directly to the place of its KV, verified as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress

import numpy as np

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import Bytes, KVSink, ReceivingSink
from keepwarm.core.reads import Reads, Receive, Replies
from keepwarm.errors import CorruptRun
from keepwarm.store.disk.prefetch import described, views
from keepwarm.store.remote import keys
from keepwarm.store.remote.backend import Blobs
from keepwarm.store.remote.limits import Limits
from keepwarm.store.runfile.attended import Taken, attended
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.header import RunHeader
from keepwarm.store.runfile.layout import StoredBlock, check_sink
from keepwarm.store.runfile.reader import RunReader
from keepwarm.store.runfile.source import Asked, Source

_TRIED_BYTES = 8 << 20  # that are read to test a body whose reading timed out before
_AT_ONCE = 256 << 10  # bytes per request: larger ones do not stay in the caches of both sides on their way


class RemoteReader(RunReader):
    """A run file whose header is known and whose KV is in `body`. Its methods may be called from several threads."""

    def __init__(self, body: Source, header: RunHeader) -> None:
        super().__init__(-1, header)
        self.body = body
        self.read_bytes = 0

    def _fill(self, offset: int, buffers: list[memoryview]) -> None:
        self.read_bytes += sum(len(buffer) for buffer in buffers)
        self.body.fill(offset - self.header.data_offset, buffers)


class _Coming:
    """Whole, unencrypted blocks that can be requested from a server. Implements `core.reads.Coming`."""

    def __init__(
        self, reader: RemoteReader, blocks: Sequence[StoredBlock], taken: Taken, views: Sequence[Sequence[Bytes]]
    ) -> None:
        """`reader.body` is an `Asked`."""
        assert isinstance(reader.body, Asked)
        self.start, self.end = blocks[0].start, blocks[-1].end
        self._reader, self._body, self._taken, self._views = reader, reader.body, taken, views

    def reads(self) -> Reads | None:
        """See `Coming`."""
        return described(self._reader, self._taken, self._views)

    def receive(self, reads: Reads, receive: Receive) -> bool:
        """See `Coming`."""
        try:
            with self._body.socket() as socket:
                if socket is None or not receive(reads, self._replies(reads, socket)):
                    raise CorruptRun("something else came")
        except CorruptRun:
            return False  # the usual way finds out what is wrong
        self._reader.read_bytes += int(reads.parts["size"].sum())
        return True

    def _replies(self, reads: Reads, socket: int) -> Replies:
        parts, tasks, data_offset = reads.parts, reads.tasks, self._reader.header.data_offset
        order = np.argsort(parts["offset"], kind="stable")  # a file holds layer after layer, as tasks are in order
        begins, sizes = parts["offset"][order], parts["size"][order]
        ends = begins + sizes
        layer = np.repeat(tasks["layer"], tasks["last"] - tasks["first"])[order]
        number = (np.cumsum(sizes) - sizes) // _AT_ONCE
        of_part = np.cumsum(np.diff(number, prepend=0).astype(bool) | np.diff(layer, prepend=layer[0]).astype(bool))
        arrives = np.empty_like(of_part)
        arrives[order] = of_part
        of_task = np.maximum.reduceat(arrives, tasks["first"])
        first = np.flatnonzero(np.concatenate([[True], (begins[1:] != ends[:-1]) | (of_part[1:] != of_part[:-1])]))
        last = np.concatenate([first[1:], [len(order)]]) - 1
        stretches = zip(begins[first].tolist(), ends[last].tolist(), strict=True)
        asked = [self._body.commands(begin - data_offset, end - begin) for begin, end in stretches]
        units = np.empty(int(of_part[-1]) + 1, Replies.UNIT)
        for name, count in {
            "command": np.bincount(of_part[first], [sum(len(command) for command, _ in each) for each in asked]),
            "reply": np.bincount(of_part[first], [len(each) for each in asked]),
            "part": np.bincount(of_part),
            "task": np.bincount(of_task, minlength=len(units)),
        }.items():
            units[name + "_end"] = np.cumsum(count)
            units[name] = units[name + "_end"] - count
        return Replies(
            commands=b"".join(command for each in asked for command, _ in each),
            sizes=np.array([size for each in asked for _, size in each], np.int64),
            order=order.astype(np.int32),
            units=units,
            socket=socket,
            deadline=self._body.deadline,
        )


def load_blocks(
    reader: RemoteReader,
    first: int,
    ids: Sequence[bytes],
    tokens: TokenIds,
    end: int,
    sink: KVSink,
    executor: Executor,
    coding: Coding | None = None,
) -> None:
    """Read the blocks `ids`, from ordinal `first` on and up to position `end`, directly into the sink.

    `tokens` are the expected ids from the first block's start to `end`. Layers are read in the executor's threads. They
    are committed in order and in this thread, after their bytes are verified. After this returns or raises, nothing is
    written to the sink. Raises CorruptRun for wrong bytes, token ids or blocks, and what the reader's source does.
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
    if coding is not None and not header.geometry.is_state:  # blocks are decoded as a whole
        sink = coding.sink(sink, header.geometry, blocks, end)
        end = blocks[-1].end
    check_sink(header.geometry, sink)
    taken = attended(sink, header.geometry, blocks, end)
    places = views(sink, reader.layout, taken, end)
    can_ask = isinstance(reader.body, Asked) and header.cipher is None and blocks[-1].end == end
    if can_ask and isinstance(sink, ReceivingSink) and sink.receive(_Coming(reader, blocks, taken, places)):
        return
    futures = {
        layer: executor.submit(reader.load_layer, layer, needed, end, *places[layer])
        for layer, needed in enumerate(taken)
        if needed
    }
    try:
        for layer, future in futures.items():
            future.result()
            sink.commit(layer, reader.layout.begin(layer, taken[layer][0]), end)
    except BaseException:
        for future in futures.values():
            future.cancel()
        wait(futures.values())
        raise


def try_body(blobs: Blobs, run_id: str, size: int, limits: Limits) -> None:
    """Read the beginning of a body of `size` bytes, in its share of the load time. Raises RemoteUnavailable."""
    seconds = limits.timeout + limits.load_timeout * min(1.0, _TRIED_BYTES / size)
    body = blobs.body(keys.body(run_id), size, seconds, whole=False)
    with suppress(CorruptRun):  # the body is gone, but the service answered in time
        body.read(min(size, _TRIED_BYTES), 0)
