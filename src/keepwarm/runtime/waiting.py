"""Measures how long computing waited for KV that was still arriving."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from keepwarm.runtime.device.port import DevicePort, Event


class Waiting:
    """Counts waits by the clock of the waiting side: on the host the calling thread, elsewhere the stream on which it
    computes, which may be busy while the thread waits."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._spans: list[tuple[Event, Event]] = []
        self._copies: list[tuple[Event, Event]] = []

    @contextmanager
    def counted(self, port: DevicePort) -> Iterator[None]:
        """Count the time that the block takes; on a device, the time that it makes the stream wait."""
        if port.is_host:
            started = time.perf_counter()
            yield
            self.add(time.perf_counter() - started)
        else:
            began = port.current().record(timed=True)
            yield
            self._spans.append((began, port.current().record(timed=True)))

    def copied(self, began: Event, ended: Event) -> None:
        """Count the time of copies to a device between two events, for which computing will wait."""
        self._copies.append((began, ended))

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    @property
    def is_copying(self) -> bool:
        """Whether copies were counted whose time nobody has asked for."""
        return bool(self._copies)

    def clear(self, *, copies: bool = True) -> None:
        """Forget all waits; with `copies` those for copies, too."""
        self._seconds = 0.0
        self._spans.clear()
        if copies:
            self._copies.clear()

    @property
    def seconds(self) -> float:
        """Seconds so far. Waits until the device has reached this point."""
        spans, self._spans, self._copies = [*self._spans, *self._copies], [], []
        self._seconds += sum(end.seconds_since(began) for began, end in spans)
        return self._seconds
