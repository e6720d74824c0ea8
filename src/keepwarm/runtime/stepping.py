"""What a decoder of ours is to the code that runs steps: the lean decoder on the processor, Triton's on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from keepwarm.core.blocks import TokenIds
from keepwarm.runtime.native.places import Region, Sequenced
from keepwarm.runtime.native.reads import Taking


class ArrivingLayers(Protocol):
    """Keys and values that are arriving at a sequence."""

    def taking(self) -> Taking | None:
        """Return the reads that the step's own threads can do, or None if they cannot do all of them."""
        ...

    def passed(self, layer: int) -> None:
        """Note that the step's threads have read all layers before this one, and not this one."""
        ...

    def arrive(self, layer: int) -> None:
        """Wait for a layer. On a device, let the calling thread's further work wait."""
        ...


class Decoder(Protocol):
    """Runs forward passes in which a row's bits depend only on the tokens at and before it. One call at a time."""

    threads: int | None  # threads of a step, if threads compute; None: as many as torch uses
    rows_at_once: int | None  # a step of more rows is better run in pieces; None: it is not

    @property
    def name(self) -> str:
        """Its name in the arithmetic identity."""
        ...

    @property
    def digest(self) -> str:
        """Names the kernels: their code, and what compiles it."""
        ...

    @property
    def constants(self) -> str:
        """Names the tables and numbers that it takes from the model's modules beside weights."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def scaling(self) -> float:
        """The factor of scores."""
        ...

    @property
    def states(self) -> tuple[int, ...]:
        """Numbers in the recurrent state of each layer that has one."""
        ...

    @property
    def is_routed(self) -> bool:
        """Whether rows use some of several experts."""
        ...

    @property
    def in_blocks(self) -> bool:
        """Whether weights are in blocks of few bits."""
        ...

    @property
    def screens(self) -> bool:
        """Whether the head can be read in part, where only the largest logits are asked for."""
        ...

    @property
    def reads_encoded(self) -> bool:
        """Whether attention reads encoded blocks."""
        ...

    @property
    def is_threaded(self) -> bool:
        """Whether threads of the host compute."""
        ...

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of the weights as the kernels read them, by address, as far as they are not the model's own."""
        ...

    def adapted(self) -> Any:
        """Return the kernels for rows with an adapter, None if there are none."""
        ...

    def apart(self) -> Decoder:
        """Return a decoder with the same weights, for steps beside this one's. No step may run meanwhile."""
        ...

    def step(
        self,
        tokens: Sequence[TokenIds],
        starts: Sequence[int],
        sequences: Sequence[Sequenced],
        wanted: Sequence[int],
        arrivals: ArrivingLayers | None = None,
        there: torch.Tensor | None = None,
        *,
        largest: bool = False,
    ) -> torch.Tensor:
        """See `LeanDecoder.step`. `there` is all tokens on the decoder's device; then `tokens` only tells how many
        there are."""
        ...

    def rows(
        self,
        tokens: TokenIds,
        positions: npt.NDArray[np.int64],
        sequence: Sequenced,
        wanted: Sequence[int],
        layers: int | None = None,
        seen: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """See `LeanDecoder.rows`."""
        ...

    def copy_rows(self, source: Region, row: int, target: Region, at: int, rows: int) -> None:
        """Copy rows of every layer and head from one region to another."""
        ...
