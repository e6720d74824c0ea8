"""Replies that compiled code waits for."""

from __future__ import annotations

import numpy as np
import xxhash

from keepwarm.core.reads import Reads, Replies
from keepwarm.runtime.native.reads import cached_reads

native = cached_reads()


SIZE = 1000


def wanted(count: int, deadline: float, fd: int) -> tuple[Reads, Replies, list[np.ndarray], list[bytes]]:
    """So many units of one reply and one part each; where they go, and what is to be sent."""
    sent = [bytes([number % 256]) * SIZE for number in range(count)]
    targets = [np.zeros(SIZE, np.uint8) for _ in range(count)]
    parts = np.array([(0, SIZE, target.ctypes.data) for target in targets], Reads.PART)
    tasks = np.empty(count, Reads.TASK)
    units = np.empty(count, Replies.UNIT)
    for at, data in enumerate(sent):
        digest = xxhash.xxh3_128_intdigest(data)
        tasks[at] = (0, Reads.IN_PLACE, at, at + 1, digest & (1 << 64) - 1, digest >> 64)
        units[at] = (4 * at, 4 * at + 4, at, at + 1, at, at + 1, at, at + 1)
    sizes, order = np.full(count, SIZE, np.int64), np.arange(count, dtype=np.int32)
    replies = Replies(b"ASK\n" * count, sizes, order, units, fd, deadline)
    return Reads(parts, tasks, list(targets)), replies, targets, sent
