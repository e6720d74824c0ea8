"""Sources of a run's bytes: a file, or a value of a remote store."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from keepwarm.errors import CorruptRun


class Gone(CorruptRun):
    """The bytes are no longer there: the run was evicted or removed."""


class Source(Protocol):
    """Bytes that can be read in parts, from several threads."""

    @property
    def size(self) -> int: ...

    def read(self, count: int, offset: int) -> bytes:
        """Return `count` bytes at `offset`. Raises CorruptRun when the source is too short, and OSError."""
        ...

    def fill(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill buffers, one after another, from `offset` on. Raises CorruptRun when the source is too short, and
        OSError."""
        ...


@runtime_checkable
class Asked(Source, Protocol):
    """Bytes that a server sends as RESP's bulk strings."""

    deadline: float  # seconds of `time.monotonic`

    def commands(self, offset: int, size: int) -> list[tuple[bytes, int]]:
        """Return the commands that request `size` bytes at `offset`, each with the number of bytes in its reply."""
        ...

    def socket(self) -> AbstractContextManager[int | None]:
        """The file descriptor of a connection that nothing else uses; None for an encrypted connection. It is closed
        when an exception is raised, and an OSError becomes RemoteUnavailable."""
        ...


class FileSource:
    """An open file; its owner closes it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, count: int, offset: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = os.pread(self._fd, count, offset)
            if not part:
                raise CorruptRun(f"the file ends at {offset}, {count} bytes short")
            parts.append(part)
            offset += len(part)
            count -= len(part)
        return b"".join(parts)

    def fill(self, offset: int, buffers: list[memoryview]) -> None:
        while buffers:
            count = os.preadv(self._fd, buffers, offset)
            if not count:
                raise CorruptRun(f"the file ends at {offset}")
            offset += count
            # A single call may return less than asked for, at most 2 GiB; go on where it stopped.
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if buffers and count:
                buffers[0] = buffers[0][count:]
