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
