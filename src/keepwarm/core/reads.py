"""How stored KV comes into place layer by layer: what is to be read, and who does it. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from keepwarm.core.codecs import Bytes


@dataclass
class Reads:
    """Stretches of files, where each goes in memory, and what must be found there.

    `parts`: records of `PART`. `tasks`: records of `TASK`, in order of layer; one for each checksum (XXH3-128, its two
    halves), over the parts `[first, last)`. `targets` keep the memory alive that the parts name by address.
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
    IN_PLACE: ClassVar[int] = -1  # for a file descriptor: the bytes are there, and only verified
    parts: npt.NDArray[Any]
    tasks: npt.NDArray[Any]
    targets: list[Bytes]
    layers: int = 0  # how many there are, should the last ones have no task

    def __post_init__(self) -> None:
        self._count = np.bincount(self.tasks["layer"], minlength=self.layers).astype(np.int32)
        self.left = self._count.copy()  # tasks that are not done yet, by layer
        self.progress = np.zeros(2, np.int32)  # tasks begun; what went wrong, if anything did
        self.most = np.zeros(len(self.left), np.int64)  # bytes that one thread took on before a layer, at most
        self.spent = np.zeros(1, np.int64)  # nanoseconds, by all threads together

    def passed(self, layer: int) -> None:
        """Take what comes before a layer as done, and nothing else."""
        self.left[:] = np.where(np.arange(len(self.left)) < layer, 0, self._count)
        self.most[:] = 0
        self.progress[:] = np.searchsorted(self.tasks["layer"], layer), 0

    @staticmethod
    def joined(several: Sequence[Reads]) -> Reads:
        """Several as one."""
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
    """How the bytes of `Reads` come from a server: what it is asked, and what it answers with (RESP's bulk strings).

    `units`: records of `UNIT`, each asked for at once: ranges of `commands`, of `sizes` (bytes of each reply), of
    `order` (numbers of parts, in the order in which their bytes arrive), and of the tasks that are whole then.
    `socket` is connected and plain, without anything on its way; `deadline` is in seconds of `time.monotonic`.
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
    """Asks for and receives replies."""

    def __call__(self, reads: Reads, replies: Replies) -> bool:
        """Bring every part into place and verify every task.

        False: the connection ended, or something is wrong with what came; memory may then hold anything, and the
        connection anything unread. Raises TimeoutError after the deadline, with the same consequences; nothing is
        written into memory then.
        """
        ...


class Coming(Protocol):
    """KV that a server may be asked for."""

    start: int
    end: int  # positions

    def reads(self) -> Reads | None:
        """Where it goes, in the sink's own memory; None: it has to be read in another way."""
        ...

    def receive(self, reads: Reads, receive: Receive) -> bool:
        """Have it received into the places that `reads` names. False as of `Receive`. Raises RemoteUnavailable."""
        ...


class ReadCached(Protocol):
    """Reads what needs no wait."""

    def __call__(self, reads: Reads, layer: int) -> bool:
        """Read and verify every task up to `layer` that is not read yet, if all of that is in the system's page cache.

        False: it is not, or something is wrong with it; memory may then hold anything.
        """
        ...


class Arriving(Protocol):
    """KV on its way into a sink."""

    end: int  # position behind the last one

    def ready(self, layer: int, cached: ReadCached | None) -> None:
        """Return when a layer is in place, verified and committed; layers are asked for in order, in one thread.

        `cached` may be used for what needs no wait. Raises CorruptRun, after the damaged run was taken out of use; and
        StoreStalled, after which the sink's memory may still be written to and must not be used again.
        """
        ...

    def reads(self) -> Reads | None:
        """What brings all layers into place; None where that is not only reading, or has begun in another way."""
        ...

    def passed(self, layer: int) -> None:
        """Somebody did what `reads` says, and all before this layer is in place and verified."""
        ...

    def close(self) -> None:
        """Nobody asks any more; when it returns, nothing is written into the sink. Raises StoreStalled."""
        ...
