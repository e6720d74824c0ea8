"""One layer of an arena as a transformers cache layer. Steps append in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from keepwarm.runtime.arena.gap import first_attended
from keepwarm.runtime.arena.late import Late, written
from keepwarm.runtime.device import Stream
from keepwarm.runtime.device.plane import Plane
from keepwarm.runtime.native.places import UNIT
from keepwarm.runtime.waiting import Waiting


class ArenaLayer(CacheLayerMixin):
    """One layer's KV, of which `length` positions are valid.

    With a `window`, a step sees the last `window - 1` positions before it, as with transformers' own layer.
    """

    def __init__(self, planes: tuple[Plane, Plane], waiting: Waiting, window: int | None = None) -> None:
        """`waiting` counts the time of deferred copies to a device."""
        self.planes: tuple[Plane, Plane] | None = planes
        self._waiting = waiting
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.is_sliding = window is not None
        self.capacity = planes[0].shape[1]
        self.dtype, self.device = planes[0].dtype, planes[0].port.device
        self.is_initialized = True
        self.length = 0
        self._late: list[Late] = []
        self.arrive: Callable[[], None] | None = None  # waits for KV that is still arriving

    @property
    def keys(self) -> torch.Tensor | None:
        """`[1, kv_heads, capacity, key_dim]`, for the calling thread's next computations to read; None once freed."""
        return None if self.planes is None else self.planes[0].tensor()[None]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        assert value is None, "an arena's memory is written through its planes"

    @property
    def values(self) -> torch.Tensor | None:
        """`[1, kv_heads, capacity, value_dim]`, to be read like `keys`; None once freed."""
        return None if self.planes is None else self.planes[1].tensor()[None]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        assert value is None, "an arena's memory is written through its planes"

    def plane(self, kv: int) -> Plane:
        """Return the plane of keys (0) or values (1). Not for a freed arena."""
        assert self.planes is not None
        return self.planes[kv]

    def fill_late(self, part: Late) -> None:
        """Write a part when the layer is used.

        Attention reads the layer's keys and values right after, while they are in the processor's cache.
        """
        self._late.append(part)

    @property
    def is_late(self) -> bool:
        """Whether some positions are still deferred."""
        return bool(self._late)

    def is_late_before(self, end: int) -> bool:
        """Whether some positions before `end` are still deferred."""
        return any(part.start < end for part in tuple(self._late))

    def materialize(self, start: int = 0) -> None:
        """Write deferred positions, at least those from `start` on; forget the others."""
        if self.arrive is not None:
            self.arrive()
        if not self._late:
            return
        if self.plane(0).port.is_host:  # not counted as waiting: attention would read these bytes anyway
            written(self._late, start, whole=True)
        else:
            with self._waiting.counted(self.plane(0).port):
                written(self._late, start, whole=True)
                self.turn()
        self._late.clear()

    def bring(self, start: int) -> None:
        """Write deferred positions from `start` on, too. Attention still reads them where they are kept."""
        written(self._late, start, whole=False)

    def turn(self, stream: Stream | None = None) -> None:
        """Order the further work of a stream (None: the calling thread's) after the copies under way."""
        self.plane(0).turns.take(stream)  # shared with the values

    def seek(self, length: int) -> None:
        """Make the first `length` positions the valid ones."""
        self.length = length
        if self._late:
            self._late = [part.cut(length) for part in self._late if part.start < length]

    def clear_before(self, first: int) -> None:
        """Write zeros before position `first`, back to the start of its unit. Nothing is loaded there, but the kernels
        read whole units: a weight of zero times garbage may not be a number."""
        start = max(self.length, first // UNIT * UNIT)
        if start < first and self.plane(0).array is not None:
            for kv in (0, 1):
                array = self.plane(kv).array
                assert array is not None
                array[:, start:first] = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.materialize()
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.capacity:
            raise IndexError(f"arena holds {self.capacity} positions, step ends at {end}")
        first = self._first_shown()
        keys = self.plane(0).extend(start, key_states[0], first)
        values = self.plane(1).extend(start, value_states[0], first)
        self.length = end
        return keys[None], values[None]

    def _first_shown(self) -> int:
        return first_attended(self.window, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_shown()
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.seek(0)
