"""How stored KV gets into place layer by layer: what must be read, and which code does it. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from keepwarm.core.codecs import Bytes


@dataclass
class Reads:
    """Parts of files, their places in memory, and their checksums.

    `parts`: records of `PART`. `tasks`: records of `TASK`, in order of layer; one for each checksum (XXH3-128, its two
    halves), over the parts `[first, last)`. `targets` keep the memory alive to whose addresses the parts refer.
    """

    PART: ClassVar[Any] = np.dtype([("offset", "<i8"), ("size", "<i8"), ("to", "<i8")])
    TASK: ClassVar[Any] = np.dtype([
        ("layer", "<i4"),
        ("fd", "<i4"),
        ("first", "<i8"),
        ("last", "<i8"),
        ("low", "<u8"),
        ("high", "<u8"),
    ])
    IN_PLACE: ClassVar[int] = -1  # in place of a file descriptor: the bytes are there, and only verified
    parts: npt.NDArray[Any]
    tasks: npt.NDArray[Any]
    targets: list[Bytes]
    layers: int = 0  # number of layers, since the last ones may have no task

    def __post_init__(self) -> None:
        self._count = np.bincount(self.tasks["layer"], minlength=self.layers).astype(np.int32)
        self.left = self._count.copy()  # tasks that are not done yet, by layer
        self.progress = np.zeros(2, np.int32)  # number of tasks begun; an error code, or 0
        self.most = np.zeros(len(self.left), np.int64)  # most bytes that one thread took before a layer
        self.spent = np.zeros(1, np.int64)  # nanoseconds, of all threads together

    def passed(self, layer: int) -> None:
        """Mark the tasks before a layer as done, and all others as not done."""
        self.left[:] = np.where(np.arange(len(self.left)) < layer, 0, self._count)
        self.most[:] = 0
        self.progress[:] = np.searchsorted(self.tasks["layer"], layer), 0

    @staticmethod
    def joined(several: Sequence[Reads]) -> Reads:
        """Join several into one."""
        if len(several) == 1:
            return several[0]
        tasks = [each.tasks.copy() for each in several]
        first = 0
        for each, own in zip(several, tasks, strict=True):
            own["first"] += first
            own["last"] += first
            first += len(each.parts)
        every = np.concatenate(tasks)
        return Reads(
            np.concatenate([each.parts for each in several]),
            every[np.argsort(every["layer"], kind="stable")],
            [target for each in several for target in each.targets],
            max(each.layers for each in several),
        )


@dataclass
class Replies:
    """How the bytes of `Reads` come from a server: the commands, and the replies (RESP's bulk strings).

    `units`: records of `UNIT`, each requested at once: ranges of `commands`, of `sizes` (bytes of each reply), of
    `order` (numbers of parts, in the order in which their bytes arrive), and of the tasks that are then complete.
    `socket` is connected and unencrypted, with no data in transit. `deadline` is in seconds of `time.monotonic`.
    """

    UNIT: ClassVar[Any] = np.dtype([
        (name + end, "<i8") for name in ("command", "reply", "part", "task") for end in ("", "_end")
    ])
    commands: bytes
    sizes: npt.NDArray[np.int64]
    order: npt.NDArray[np.int32]
    units: npt.NDArray[Any]
    socket: int  # its file descriptor
    deadline: float


class Receive(Protocol):
    """Requests and receives replies."""

    def __call__(self, reads: Reads, replies: Replies) -> bool:
        """Receive every part into place and verify every task.

        False: the connection ended, or the received data is wrong. Then memory may hold anything, and the connection
        may have unread data. Raises TimeoutError after the deadline, with the same consequences; nothing is written
        into memory after that.
        """
        ...


class Coming(Protocol):
    """KV that can be requested from a server."""

    start: int
    end: int  # positions

    def reads(self) -> Reads | None:
        """The reads into the sink's own memory; None: the KV must be read in another way."""
        ...

    def receive(self, reads: Reads, receive: Receive) -> bool:
        """Receive the KV into the places in `reads`, with `receive`. Return what it does. Raises RemoteUnavailable."""
        ...


class ReadCached(Protocol):
    """Reads bytes that need no wait."""

    def __call__(self, reads: Reads, layer: int) -> bool:
        """Read and verify every task up to `layer` that is not read yet, if all of that is in the system's page cache.

        False: it is not, or the bytes are wrong; memory may then hold anything.
        """
        ...


class Arriving(Protocol):
    """KV that is being loaded into a sink."""

    end: int  # position after the last one

    def ready(self, layer: int, cached: ReadCached | None) -> None:
        """Return when a layer is in place, verified and committed. Layers are requested in order, in one thread.

        `cached` may be used for bytes that need no wait. Raises CorruptRun after the damaged run was taken out of use,
        and StoreStalled, after which the sink's memory may still be written to and must not be used again.
        """
        ...

    def reads(self) -> Reads | None:
        """The reads that load all layers; None if loading needs more than reads, or has begun in another way."""
        ...

    def passed(self, layer: int) -> None:
        """Note that the caller did the reads of `reads`: everything before this layer is in place and verified."""
        ...

    def close(self) -> None:
        """End the loading: after this returns, nothing is written into the sink. Raises StoreStalled."""
        ...
