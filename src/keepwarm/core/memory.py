"""Memory of our own, for keys and values; and what the allocator keeps."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

OWN_PAGES = 1 << 20  # bytes; smaller memory shares its pages with other things


def private_memory(size: int, *, huge: bool = True) -> mmap.mmap:
    """Allocate `size` bytes of zeros. `huge`: use huge pages if possible, which take 512 times fewer page faults.

    By default, Python maps anonymous memory as shared, and Linux gives shared memory no huge pages.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # not on Windows
    memory = mmap.mmap(-1, max(size, 1), **private)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def own_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Allocate `size` bytes; from `OWN_PAGES` on in pages of their own, which a device can register."""
    return np.frombuffer(private_memory(size), np.uint8) if size >= OWN_PAGES else np.empty(size, np.uint8)


def give_back() -> None:
    """Give freed memory back to the system, where the C library keeps it (glibc). After a load that is much."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
