"""How stored KV comes into place layer by layer: what is to be read, and who does it. No I/O here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from keepwarm.core.ports import Bytes


@dataclass
class Reads:
    """Stretches of files, where each goes in memory, and what must be found there.

    `parts`: records of `PART`. `tasks`: records of `TASK`, in order of layer; one for each checksum (XXH3-128, its two
    halves), over the parts `[first, last)`. `targets` keep the memory alive that the parts name by address.
    """

    PART: ClassVar[Any] = np.dtype([("offset", "<i8"), ("size", "<i8"), ("to", "<i8")])
    TASK: ClassVar[Any] = np.dtype(
        [("layer", "<i4"), ("fd", "<i4"), ("first", "<i8"), ("last", "<i8"), ("low", "<u8"), ("high", "<u8")]
    )
    parts: npt.NDArray[Any]
    tasks: npt.NDArray[Any]
    targets: list[Bytes]
    taken: int = 0  # tasks begun so far


@dataclass
class Replies:
    """How the bytes of `Reads` come from a server: what it is asked, and what it answers with (RESP's bulk strings).

    `units`: records of `UNIT`, each asked for at once: ranges of `commands`, of `sizes` (bytes of each reply), of
    `order` (numbers of parts, in the order in which their bytes arrive), and of the tasks that are whole then.
    `socket` is connected and plain, without anything on its way; `deadline` is in seconds of `time.monotonic`.
    """

    UNIT: ClassVar[Any] = np.dtype([(name + end, "<i8") for name in ("command", "reply", "part", "task")
                                    for end in ("", "_end")])  # fmt: skip
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
        StoreStalled, after which the sink's memory may still be written to and must be given up.
        """
        ...

    def close(self) -> None:
        """Nobody asks any more; when it returns, nothing is written into the sink. Raises StoreStalled."""
        ...
