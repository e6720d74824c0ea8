"""Small files in a store's folder, written whole or not at all, and locks between processes."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Place = tuple[int, int]
_PAUSE = 0.005


def place_of(path: Path) -> Place | None:
    """Return what distinguishes a file from another one at the same path; None when there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def write_whole(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a durable file, with all of its bytes or not at all. Without `replace`, an existing file stays.

    Raises OSError; nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with open(temporary, "wb", opener=_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return
            except OSError:  # a file system without links
                os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a folder's list of names durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Hold a lock that one thread of one process can hold at a time. The kernel frees the lock of a process that dies.

    Raises TimeoutError when the lock is not free within `seconds` (None: no limit), and OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # a new one, so threads exclude each other, too
    try:
        if seconds is None:
            fcntl.flock(fd, fcntl.LOCK_EX)
        else:
            _lock_within(fd, seconds)
        yield
    finally:
        os.close(fd)


def _lock_within(fd: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process has it locked for more than {seconds} s") from None
        time.sleep(_PAUSE)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def size(path: Path) -> int:
    """Bytes of a file; 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def size_of(folder: Path) -> int:
    """Bytes of all files except the catalogue's log, which exists only while a process has the catalogue open."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-wal", "-shm")))
    return sum(size(path) for path in files)
