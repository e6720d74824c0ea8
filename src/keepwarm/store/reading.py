"""Reading a run file: straight into where the KV goes, each block verified from the bytes that arrived there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from keepwarm.core.ports import Bytes
from keepwarm.errors import CorruptRun
from keepwarm.store.format import Layout, Run, RunHeader, StoredBlock, block_checksum, read_header

_MAX_PARTS = 1024  # IOV_MAX


class RunReader:
    """An open run file. Its methods may be called from several threads."""

    def __init__(self, fd: int, header: RunHeader) -> None:
        self.header = header
        self._fd = fd
        self._layout = Layout(header.geometry, len(header.tokens))

    @classmethod
    @contextmanager
    def open(cls, path: Path, run_id: str) -> Iterator[RunReader]:
        """Open and verify the header. Raises CorruptRun, also when the file is another run's, and OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = read_header(fd)
            if header.run_id != run_id:
                raise CorruptRun(f"the file holds run {header.run_id}")
            yield cls(fd, header)
        finally:
            os.close(fd)

    def load_layer(self, layer: int, blocks: Sequence[StoredBlock], end: int, keys: Bytes, values: Bytes) -> None:
        """Read one layer of consecutive blocks up to position `end`, which may lie inside the last one.

        `keys` and `values` are `[heads, end - blocks[0].start, head_bytes]`. Raises CorruptRun and OSError.
        """
        start = blocks[0].start
        whole = blocks if blocks[-1].end == end else blocks[:-1]
        if whole:
            count = whole[-1].end - start
            self._read_verified(layer, whole, (keys[:, :count], values[:, :count]))
        if len(whole) < len(blocks):
            # The checksum covers the whole block, so all of it is read to vouch for the part that is taken.
            last = blocks[-1]
            scratch = self._scratch(layer, last.length)
            self._read_verified(layer, [last], scratch)
            for target, part in zip((keys, values), scratch, strict=True):
                np.copyto(target[:, last.start - start :], part[:, : end - last.start])

    def read_run(self) -> Run:
        """The whole run, verified. Raises CorruptRun and OSError."""
        header = self.header
        run = Run(
            id=header.run_id,
            geometry=header.geometry,
            namespace=header.namespace,
            tokens=header.tokens,
            blocks=header.blocks,
            data=np.empty(self._layout.nbytes, np.uint8),
        )
        count = len(header.tokens)
        for layer in range(len(header.geometry.layers)):
            self._read_verified(layer, header.blocks, (run.view(layer, 0, 0, count), run.view(layer, 1, 0, count)))
        return run

    def _scratch(self, layer: int, tokens: int) -> tuple[Bytes, Bytes]:
        keys, values = (self._layout.shape(layer, kv) for kv in (0, 1))
        return np.empty((keys[0], tokens, keys[2]), np.uint8), np.empty((values[0], tokens, values[2]), np.uint8)

    def _read_verified(self, layer: int, blocks: Sequence[StoredBlock], parts: tuple[Bytes, Bytes]) -> None:
        """Fill `parts` with whole blocks of one layer, then compare their checksums."""
        first = blocks[0].start
        if not all(head.flags.c_contiguous for part in parts for head in part):
            scratch = self._scratch(layer, blocks[-1].end - first)
            self._read_verified(layer, blocks, scratch)
            for target, part in zip(parts, scratch, strict=True):
                np.copyto(target, part)
            return
        pieces: list[tuple[int, memoryview]] = []
        for kv, part in enumerate(parts):
            _, tokens, width = self._layout.shape(layer, kv)
            base = self.header.data_offset + self._layout.offset(layer, kv) + (first - self.header.start) * width
            pieces += [(base + head * tokens * width, memoryview(row).cast("B")) for head, row in enumerate(part)]
        _read_pieces(self._fd, pieces)
        keys, values = parts
        for block in blocks:
            t0, t1 = block.start - first, block.end - first
            if block_checksum(keys[:, t0:t1], values[:, t0:t1]) != self.header.checksum(layer, block.ordinal):
                raise CorruptRun(f"layer {layer}, block {block.ordinal}: the checksum does not match")


def _read_pieces(fd: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Fill each buffer from its file offset, in few calls. Raises CorruptRun on a short file."""
    at = 0
    while at < len(pieces):
        offset, first = pieces[at]
        group = [first]
        following = offset + len(first)
        at += 1
        while at < len(pieces) and pieces[at][0] == following and len(group) < _MAX_PARTS:
            group.append(pieces[at][1])
            following += len(pieces[at][1])
            at += 1
        _fill(fd, offset, group)


def _fill(fd: int, offset: int, buffers: list[memoryview]) -> None:
    while buffers:
        count = os.preadv(fd, buffers, offset)
        if not count:
            raise CorruptRun(f"the file ends at {offset}")
        offset += count
        # A single call may return less than asked for, at most 2 GiB; go on where it stopped.
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if buffers and count:
            buffers[0] = buffers[0][count:]
