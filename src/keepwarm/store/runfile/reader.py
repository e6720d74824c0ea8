"""Read a run file directly to the place of its KV; each block is verified from the bytes that arrived there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from keepwarm.core.ports import Bytes
from keepwarm.errors import CorruptRun, StoreLocked, StoreStalled, StoreTooNew
from keepwarm.store.runfile.attended import Taken
from keepwarm.store.runfile.crypto import TAG_BYTES, RunCipher, StoreKey
from keepwarm.store.runfile.header import KnownHeaders, RunHeader, read_header
from keepwarm.store.runfile.layout import Layout, Run, StoredBlock, block_checksum
from keepwarm.store.runfile.source import FileSource

_MAX_PARTS = 1024  # IOV_MAX
_GAP = 128 << 10  # bytes

_Group = tuple[Sequence[StoredBlock], tuple[Bytes, Bytes]]  # consecutive whole blocks, and where their KV goes


class RunReader:
    """An open run file, until `close` or the end of a `with` block. Its methods may be called from several threads."""

    def __init__(self, fd: int, header: RunHeader) -> None:
        self.header = header
        self.fd = fd
        self._discard = memoryview(bytearray(_GAP))  # written by all threads, read by none
        self.layout = Layout.of(header)

    @classmethod
    def open(cls, path: Path, run_id: str, key: StoreKey | None = None, known: KnownHeaders | None = None) -> RunReader:
        """Open a file and verify its header. Raises what `read_header` does, and CorruptRun if it is another run's."""
        # Without O_NONBLOCK, a pipe in a file's place would block the request that opens it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            header = read_header(FileSource(fd), key, known=known)
            if header.run_id != run_id:
                raise CorruptRun(f"the file holds run {header.run_id}")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, header)

    def close(self) -> None:
        """Close the file. It may be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> RunReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def corrupt(self, error: BaseException) -> BaseException:
        """Turn an error of reading this file into a CorruptRun; see `as_corrupt`."""
        return as_corrupt(self.header.run_id, error)

    def offset(self, layer: int, kv: int, block: StoredBlock) -> int:
        """File offset of a block's rows in the first head of keys (0) or values (1) of a layer."""
        first, _ = self.layout.rows(layer, (block,))
        return self.header.data_offset + self.layout.offset(layer, kv) + first * self.layout.shape(layer, kv)[2]

    def read_ahead(self, layer: int, taken: Taken) -> None:
        """Let the system read ahead all layers from `layer` on, so that the disk stays busy while bytes are verified. A
        layer of which less than half is needed is skipped. Adjacent layers are requested at once: Linux then reads only
        the first megabytes of them ahead, and its own reading ahead goes on. In pieces it took
        1.5 times as long."""
        stretches: list[list[int]] = []
        for each in range(layer, len(taken)):
            (first, last), rows = self.layout.rows(each, taken[each]), self.layout.shape(each, 0)[1]
            if 2 * (last - first) < rows:
                continue
            begin = self.offset(each, 0, self.header.blocks[0])
            if not stretches or stretches[-1][1] != begin:
                stretches.append([begin, begin])
            stretches[-1][1] += self.layout.token_bytes(each) * rows
        for begin, end in stretches:
            with suppress(OSError):
                os.posix_fadvise(self.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def load_layer(self, layer: int, blocks: Sequence[StoredBlock], end: int, keys: Bytes, values: Bytes) -> None:
        """Read one layer of consecutive blocks up to position `end`, which may lie inside the last one.

        `keys` and `values` are `[heads, rows, head_bytes]`, for the rows that the blocks keep. Raises CorruptRun and
        OSError.
        """
        last = blocks[-1]
        if last.end == end:
            self._read_verified(layer, [(blocks, (keys, values))])
            return
        # The checksum covers the whole block, so all of it is read to verify the part that is used.
        first, begin = self.layout.rows(layer, blocks)[0], self.layout.rows(layer, (last,))[0]
        count = begin - first
        scratch = self._scratch(layer, (last,))
        whole = [(blocks[:-1], (keys[:, :count], values[:, :count]))] if count else []
        self._read_verified(layer, [*whole, ([last], scratch)])
        for target, part in zip((keys, values), scratch, strict=True):
            np.copyto(target[:, count:], part[:, : end - self.layout.begin(layer, last)])

    def read_run(self) -> Run:
        """Read the whole run, verified. Raises CorruptRun and OSError."""
        header = self.header
        run = Run(
            id=header.run_id,
            geometry=header.geometry,
            namespace=header.namespace,
            tokens=header.tokens,
            blocks=header.blocks,
            data=np.empty(self.layout.nbytes, np.uint8),
        )
        for layer, parts in enumerate(run.layers()):
            self._read_verified(layer, [(header.blocks, parts)])
        return run

    def verify(self) -> None:
        """Read everything, a layer at a time, and keep nothing. Raises CorruptRun and OSError."""
        for layer in range(len(self.header.geometry.layers)):
            parts = self._scratch(layer, self.header.blocks)
            self._read_verified(layer, [(self.header.blocks, parts)])

    def _scratch(self, layer: int, blocks: Sequence[StoredBlock]) -> tuple[Bytes, Bytes]:
        (keys, values), (first, last) = (self.layout.shape(layer, kv) for kv in (0, 1)), self.layout.rows(layer, blocks)
        rows = last - first
        return np.empty((keys[0], rows, keys[2]), np.uint8), np.empty((values[0], rows, values[2]), np.uint8)

    def _read_verified(self, layer: int, groups: Sequence[_Group]) -> None:
        """Fill the parts of consecutive groups of whole blocks of one layer, then compare the blocks' checksums."""
        if self.header.cipher is not None:
            for blocks, parts in groups:
                self._read_sealed(layer, blocks, parts, self.header.cipher)
            return
        if not all(head.flags.c_contiguous for _, parts in groups for part in parts for head in part):
            for blocks, parts in groups:
                scratch = self._scratch(layer, blocks)
                self._read_verified(layer, [(blocks, scratch)])
                for target, part in zip(parts, scratch, strict=True):
                    np.copyto(target, part)
            return
        pieces: list[tuple[int, memoryview]] = []
        for kv in (0, 1):
            heads, rows, width = self.layout.shape(layer, kv)
            base = self.offset(layer, kv, groups[0][0][0])
            for head in range(heads):
                offset = base + head * rows * width
                for _, parts in groups:
                    pieces.append((offset, memoryview(parts[kv][head]).cast("B")))
                    offset += len(pieces[-1][1])
        self._read_pieces(pieces)
        for blocks, (keys, values) in groups:
            for block, first, last in self.layout.each(layer, blocks):
                if block_checksum(keys[:, first:last], values[:, first:last]) != self.header.checksum(
                    layer, block.ordinal
                ):
                    raise CorruptRun(f"layer {layer}, block {block.ordinal}: the checksum does not match")

    def _read_sealed(
        self, layer: int, blocks: Sequence[StoredBlock], parts: tuple[Bytes, Bytes], cipher: RunCipher
    ) -> None:
        """Fill the parts of consecutive whole blocks of one layer of an encrypted file."""
        width, (begin, end) = self.layout.token_bytes(layer), self.layout.rows(layer, blocks)
        base = self.header.data_offset + self.layout.offset(layer, 0) + begin * width
        # The ciphertext is contiguous in the file. In memory, each block's tag from the header follows its ciphertext.
        buffer = memoryview(bytearray((end - begin) * width + TAG_BYTES * len(blocks)))
        pieces: list[tuple[int, memoryview]] = []
        sealed: list[memoryview] = []
        at = 0
        for block, first, last in self.layout.each(layer, blocks):
            tag = at + (last - first) * width
            buffer[tag : tag + TAG_BYTES] = self.header.checksum(layer, block.ordinal)
            pieces.append((base + first * width, buffer[at:tag]))
            sealed.append(buffer[at : tag + TAG_BYTES])
            at = tag + TAG_BYTES
        self._read_pieces(pieces)
        for (block, first, last), piece in zip(self.layout.each(layer, blocks), sealed, strict=True):
            plain = np.frombuffer(cipher.open(layer, block.ordinal, block.start, piece), np.uint8)
            taken = 0
            for part in parts:
                target = part[:, first:last]
                np.copyto(target, plain[taken : taken + target.size].reshape(target.shape))
                taken += target.size

    def _read_pieces(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its file offset, in few calls. A call costs a wait for the interpreter's lock, which is
        more than reading and discarding a short gap between two pieces. Raises CorruptRun on a short file."""
        group: list[memoryview] = []
        begin = following = 0
        for offset, buffer in pieces:
            gap = offset - following
            if group and (not 0 <= gap <= _GAP or len(group) + 2 > _MAX_PARTS):
                self._fill(begin, group)
                group = []
            if not group:
                begin = offset
            elif gap:
                group.append(self._discard[:gap])
            group.append(buffer)
            following = offset + len(buffer)
        self._fill(begin, group)

    def _fill(self, offset: int, buffers: list[memoryview]) -> None:
        FileSource(self.fd).fill(offset, buffers)


def as_corrupt(run_id: str, error: BaseException) -> BaseException:
    """Return a CorruptRun for an error of reading a run. Return StoreStalled and unrelated errors as they are."""
    if isinstance(error, OSError):
        corrupt = CorruptRun(f"run {run_id}: {error.strerror or error}")
    elif isinstance(error, (CorruptRun, StoreTooNew, StoreLocked)) and not isinstance(error, StoreStalled):
        # In a newer or locked store, the catalogue would be newer or locked, too. So a single such file is damaged.
        corrupt = CorruptRun(f"run {run_id}: {error}")
    else:
        return error
    corrupt.__cause__ = error
    return corrupt
