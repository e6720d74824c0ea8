"""Many copies as one plan: from addresses, to addresses, of sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Copies:
    """Copies between pinned host memory and a device. All go in one direction; their order does not matter.

    `sources`, `targets` and `sizes` are flat and of one length, in bytes. With `inward` the targets are on the device.
    """

    sources: Numbers
    targets: Numbers
    sizes: Numbers
    inward: bool

    @classmethod
    def between(cls, there: Numbers, here: Numbers, sizes: Numbers, *, inward: bool) -> Copies:
        """Plan copies between addresses on the device (`there`) and of the host (`here`), merged where both go on."""
        there, here, sizes = (
            np.ascontiguousarray(part, np.int64).ravel() for part in np.broadcast_arrays(there, here, sizes)
        )
        if not len(sizes):
            return cls(here, there, sizes, inward)
        ends_there, ends_here = there[:-1] + sizes[:-1] == there[1:], here[:-1] + sizes[:-1] == here[1:]
        first = np.flatnonzero(np.concatenate([[True], ~(ends_there & ends_here)]))
        there, here, sizes = there[first], here[first], np.add.reduceat(sizes, first)
        return cls(here, there, sizes, inward) if inward else cls(there, here, sizes, inward)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())
