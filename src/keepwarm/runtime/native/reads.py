"""Reads stored KV from the page cache, with all threads of a step, or from a server's connection. It is verified while
it is in the processor's cache."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

from keepwarm.core.reads import Reads, Replies
from keepwarm.runtime.native.build import READS, compiled

log = logging.getLogger(__name__)

_FOUND, _LATE, _AGAIN = 1, 4, 5  # as in reads.cpp
_SO_FAR = 10  # the count of numbers in `Received` of reads.cpp, which says how far receiving has come


class _Hash(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("create", "reset", "update", "digest", "free"))


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "tasks", "hash", "left", "progress", "spent", "most")),
        ("count", ctypes.c_int32),
    )


class Taking:
    """Reads that the threads of another kernel do: each of them calls `function` with `job` and a layer."""

    def __init__(self, reads: Reads, hashing: _Hash, function: int) -> None:
        self._held = reads, hashing
        parts, tasks, left, progress, spent, most = (
            array.ctypes.data
            for array in (reads.parts, reads.tasks, reads.left, reads.progress, reads.spent, reads.most)
        )
        self.record = _Job(parts, tasks, ctypes.addressof(hashing), left, progress, spent, most, len(reads.tasks))
        self.job = ctypes.addressof(self.record)
        self.function = function
        self.wrong = progress + reads.progress.itemsize  # the address of an int32: not 0 if a read failed


class CachedReads:
    """Implements `core.reads.ReadCached` with the compiled reader and the xxHash library of the Python package.
    `receive` implements `core.reads.Receive`."""

    def __init__(self, library: ctypes.CDLL, hashing: _Hash) -> None:
        self._library = library
        self._hashing = hashing
        self._take = ctypes.cast(library.keepwarm_take, ctypes.c_void_p).value or 0

    def __call__(self, reads: Reads, layer: int) -> bool:
        self._library.keepwarm_read(ctypes.byref(self.taking(reads).record), layer, torch.get_num_threads())
        return not reads.progress[1]

    def taking(self, reads: Reads) -> Taking:
        """Return the same reads for the threads of another kernel."""
        return Taking(reads, self._hashing, self._take)

    def receive(
        self, reads: Reads, replies: Replies, *, team: int = 1, go_on: Callable[[], bool] = lambda: True
    ) -> bool:
        """Receive replies (see `core.reads.Receive`). `team` says how many of the calling thread's OpenMP threads,
        itself included, do nothing else meanwhile. While nothing comes, Python handles signals, and `go_on` is asked
        about every 0.1 s. As soon as it says no, or the deadline is over, TimeoutError is raised."""
        so_far = np.zeros(_SO_FAR, np.int64)
        *arrays, sizes, noted = (
            ctypes.c_void_p(each.ctypes.data)
            for each in (reads.parts, reads.tasks, replies.order, replies.units, replies.sizes, so_far)
        )
        found = _AGAIN
        while found == _AGAIN and go_on():  # Python handles signals between two calls
            found = self._library.keepwarm_receive(
                *arrays,
                len(replies.units),
                replies.commands,
                sizes,
                replies.socket,
                ctypes.c_double(replies.deadline),
                ctypes.byref(self._hashing),
                noted,
                team,
            )
        if found in (_LATE, _AGAIN):
            raise TimeoutError("not everything came in time")
        return bool(found == _FOUND)


@functools.cache
def cached_reads(*defines: str) -> CachedReads | None:
    """Return the reader. Return None if it cannot be compiled, or if the library of the xxHash package does not export
    its functions. Then the store's own threads read what is stored."""
    found = compiled(READS, *defines)
    if found is None:
        return None
    try:
        return CachedReads(found.library, _hashing())
    except (AttributeError, OSError) as error:
        log.info("stored KV is read by threads of the store: %s", error)
        return None


def _hashing() -> _Hash:
    """Return functions of the xxHash library. Raises AttributeError or OSError if it does not export them."""
    library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]

    def address(name: str) -> Any:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p)

    update = "XXH3_128bits_update_dispatch"  # it picks the best code for this processor
    return _Hash(
        create=address("XXH3_createState"),
        reset=address("XXH3_128bits_reset"),
        update=address(update if hasattr(library, update) else "XXH3_128bits_update"),
        digest=address("XXH3_128bits_digest"),
        free=address("XXH3_freeState"),
    )
