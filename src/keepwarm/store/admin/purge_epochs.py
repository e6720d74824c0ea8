"""Record when salts were purged, for all processes that use a store. Work that was under way then is not written later.

A store has an *epoch*, a number that every purge increments twice: when it begins and when it ends. Every request takes
the epoch when it begins and passes it on with the data to write. The data may be written if no purge of its salts has
begun or ended since then. So a purge first increments the epoch and then removes: data that was written before is
removed with the rest, and data that comes later is refused. A request that begins during a purge may have read data
that is about to be removed, so its data is not written either.

`purges.json` holds all that and is replaced as a whole. `epoch` is a number in shared memory that changes when the file
does. A request looks only at this number, which calls nothing that could hang. A process that purges holds the lock of
the file `epoch`; the kernel frees it when the process dies. A purge that did not end (the process was killed, a disk
failed) stays begun: nothing is stored under its salt until a process finishes it.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keepwarm.core.identity import json_digest
from keepwarm.errors import PurgedMeanwhile, StoreError, StoreNotWritable
from keepwarm.store.disk.files import Place, locked, place_of, write_whole
from keepwarm.store.runfile.layout import UNKNOWN_SALT

PURGES = "purges.json"  # in the store's folder
COUNTER = "epoch"
EVERYTHING = bytes(32)  # in place of a salt's tag: all data, under any salt or none

_DIGEST = "keepwarm purges 1"
_WAIT_SECONDS = 120.0  # for another purge
_TRIES = 8  # to read a file that others are writing
_PAGE = 4096
_NUMBER = struct.Struct("<Q")


class Purge(NamedTuple):
    """The last purge of a salt: the epochs at which it began and ended."""

    began: int
    ended: int

    @property
    def is_under_way(self) -> bool:
        return self.ended < self.began


@dataclass(frozen=True)
class Began:
    """When a request began, for the process that continues it: perhaps another one, perhaps with another store."""

    store: str
    epoch: int


class Epochs:
    """The epoch of one store. Threads and processes may share it."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder the epoch belongs to this process alone. Raises StoreNotWritable."""
        self._folder = folder
        self._lock = threading.RLock()
        self._alone_here = threading.Lock()
        self._fd = -1  # of the file read last: while it is open, no other file can have its inode number
        self._place: Place | None = None
        self._shared: mmap.mmap | None = None
        self._shared_place: Place | None = None
        self._seen = b""  # the shared number when the file was read
        self._epoch = 1
        self._purges: dict[bytes, Purge] = {}
        self._closed = False
        try:
            self._look()
        except OSError as error:
            raise StoreNotWritable(
                f"{PURGES} in {folder} cannot be read or made ({error.strerror}); fix its owner and permissions"
            ) from error

    def close(self) -> None:
        """Close the files. Later calls answer with what was known last, and allow nothing."""
        with self._lock:
            self._closed = True
            self._shared = None  # unmapped when no thread reads it any more
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    # ---- for writers ----

    @property
    def is_news(self) -> bool:
        """Whether a purge began or ended since the last look at the file. Calls nothing that could hang."""
        shared = self._shared
        return shared is not None and shared[: _NUMBER.size] != self._seen

    def now(self) -> int:
        """Return the epoch for a request that begins now. Reads a file if `is_news`, and may then raise OSError."""
        if self.is_news:
            self._look()
        return self._epoch

    def began(self, epoch: int) -> Began:
        """Describe an epoch of this store for another process."""
        return Began(self._name(), epoch)

    def of(self, began: Began) -> int:
        """Return the epoch that another process described. If its store is another one, return the present epoch, since
        the two stores count independently. Raises OSError."""
        return began.epoch if began.store == self._name() else self.now()

    def _name(self) -> str:
        """Return a name of the store that is unique among the stores of all processes: the place of its epoch file."""
        where = f"process {os.getpid()} {id(self)}" if self._shared_place is None else self._shared_place
        return f"{socket.gethostname()} {where}"

    def allows(self, epoch: int, tags: Collection[bytes] = ()) -> bool:
        """Whether data of a request that began at `epoch` may be kept under the salts with these tags, as far as is
        known here. A file is read only if `is_news`, so a folder that hangs does not delay a request."""
        try:
            self.now()
        except OSError:
            return False
        purges = self._purges  # replaced as a whole, so no lock is needed
        asked = purges if UNKNOWN_SALT in tags else (EVERYTHING, *tags)
        found = [purges[tag] for tag in asked if tag in purges]
        return not self._closed and all(not each.is_under_way and each.ended <= epoch for each in found)

    def check(self, epoch: int, tags: Collection[bytes] = ()) -> None:
        """Raise PurgedMeanwhile unless the data may be written. Looks at the folder itself, which may have been
        replaced."""
        try:
            self._look()
        except OSError as error:
            raise PurgedMeanwhile(f"whether its salt was purged cannot be read: {error.strerror}") from error
        if not self.allows(epoch, tags):
            raise PurgedMeanwhile("its salt was purged while it was under way: nothing of it is stored")

    # ---- for followers ----

    def since(self, epoch: int) -> frozenset[bytes]:
        """Tags of the salts whose last purge began after `epoch`. Raises OSError."""
        self._look()
        with self._lock:
            return frozenset(tag for tag, purge in self._purges.items() if purge.began > epoch)

    def pending(self) -> frozenset[bytes]:
        """Tags of the salts whose purge has not ended: it is under way, or failed. Raises OSError."""
        self._look()
        with self._lock:
            return frozenset(tag for tag, purge in self._purges.items() if purge.is_under_way)

    # ---- for purges ----

    @contextmanager
    def purging(self, tags: Iterable[bytes], *, finish: bool = False, wait: bool = True) -> Iterator[frozenset[bytes]]:
        """Purge salts in the body, which gets their tags; with `finish` also the salts whose purge began and did not
        end. The purge ends when the body ends. It stays begun when the body raises.

        Only one purge runs at a time. Raises StoreError when another one takes too long (without `wait`, at once), and
        OSError.
        """
        with self._alone(wait):
            todo = frozenset(tags) | (self.pending() if finish else frozenset())
            if todo:
                self._count(todo, begins=True)
            yield todo
            if todo:
                self._count(todo, begins=False)

    def _count(self, tags: Iterable[bytes], *, begins: bool) -> None:
        """Increment the epoch: purges of these salts begin or end."""
        with self._lock:
            self._look()
            epoch, purges = self._epoch + 1, dict(self._purges)
            for tag in tags:
                began, ended = purges.get(tag, (0, 0))
                purges[tag] = Purge(epoch, ended) if begins else Purge(began, epoch)
            if self._folder is not None:
                self._write(self._folder, epoch, purges)
                self._look()
            else:
                self._epoch, self._purges = epoch, purges

    @contextmanager
    def _alone(self, wait: bool) -> Iterator[None]:
        seconds = _WAIT_SECONDS if wait else 0.0
        busy = StoreError("another purge of this store is under way: run it again later")
        if self._folder is None:
            if not self._alone_here.acquire(timeout=seconds):
                raise busy
            try:
                yield
            finally:
                self._alone_here.release()
            return
        held = locked(self._folder / COUNTER, seconds)
        try:
            held.__enter__()
        except TimeoutError:
            raise busy from None
        try:
            yield
        finally:
            held.__exit__(None, None, None)

    # ---- the files ----

    def _look(self) -> None:
        """Read the file unless it is the one that was read last. If it is missing, write it from what is known here. If
        it is damaged or nothing is known, write a purge of everything: requests that began before store nothing then.
        Raises OSError."""
        folder = self._folder
        if folder is None:
            return
        with self._lock:
            for _ in range(_TRIES):
                if self._closed:
                    return
                self._share(folder)
                seen, place = self._number(), place_of(folder / PURGES)
                if place is not None and place == self._place:
                    self._seen = seen
                    return
                if place is None or not self._read(folder / PURGES):
                    epoch = max(time.time_ns(), self._epoch + 1)
                    known = self._purges if self._place is not None and place is None else None
                    self._write(folder, epoch, known or {EVERYTHING: Purge(epoch, epoch)}, replace=place is not None)
        raise OSError(errno.EIO, f"{PURGES} does not stay as it was written")

    def _read(self, path: Path) -> bool:
        """Read the file. Return False if it is damaged."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True  # the next try creates it
        status = os.fstat(fd)
        found = _parsed(os.pread(fd, status.st_size, 0))
        if found is None:
            os.close(fd)
            return False
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._place = fd, (status.st_dev, status.st_ino)
        self._epoch, self._purges = found
        return True

    def _write(self, folder: Path, epoch: int, purges: Mapping[bytes, Purge], *, replace: bool = True) -> None:
        self._share(folder)
        write_whole(folder / PURGES, _text(epoch, purges), replace=replace)
        assert self._shared is not None
        number = _NUMBER.unpack(self._number())[0]
        self._shared[: _NUMBER.size] = _NUMBER.pack((number + 1) % (1 << 64))

    def _number(self) -> bytes:
        assert self._shared is not None
        return self._shared[: _NUMBER.size]

    def _share(self, folder: Path) -> None:
        """Map the shared number, unless the mapped file is still in its place."""
        if self._shared is not None and place_of(folder / COUNTER) == self._shared_place:
            return
        fd = os.open(folder / COUNTER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(fd)
            if status.st_size < _PAGE:
                os.ftruncate(fd, _PAGE)
            self._shared, self._shared_place = mmap.mmap(fd, _PAGE), (status.st_dev, status.st_ino)
        finally:
            os.close(fd)


def _text(epoch: int, purges: Mapping[bytes, Purge]) -> bytes:
    body = {"epoch": epoch, "purges": {tag.hex(): list(purge) for tag, purge in purges.items()}}
    return json.dumps(body | {"digest": json_digest(_DIGEST, body)}).encode()


def _parsed(text: bytes) -> tuple[int, dict[bytes, Purge]] | None:
    """Parse what `_text` wrote. Return None if it is damaged."""
    try:
        body = json.loads(text)
        if body.pop("digest") != json_digest(_DIGEST, body):
            return None
        return body["epoch"], {bytes.fromhex(tag): Purge(*purge) for tag, purge in body["purges"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def is_under(salts: Collection[bytes], purged: Collection[bytes]) -> bool:
    """Whether a purge of salts removes what is under `salts`: it is under one of them, or its salt is unknown."""
    return EVERYTHING in purged or (bool(purged) and any(tag in purged or tag == UNKNOWN_SALT for tag in salts))
