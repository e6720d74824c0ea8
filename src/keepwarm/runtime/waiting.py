"""How long computing waited for KV that was on its way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from keepwarm.runtime.device.port import DevicePort, Event


class Waiting:
    """Counts it by the clock of who waits: the calling thread on the host, elsewhere the stream it computes on, which
    may have been busy while its thread waited."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._spans: list[tuple[Event, Event]] = []

    @contextmanager
    def counted(self, port: DevicePort) -> Iterator[None]:
        """Count what the block waits for; on a device, what it has the stream wait for."""
        if port.is_host:
            started = time.perf_counter()
            yield
            self.add(time.perf_counter() - started)
        else:
            began = port.current().record(timed=True)
            yield
            self._spans.append((began, port.current().record(timed=True)))

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def clear(self) -> None:
        self._seconds = 0.0
        self._spans.clear()

    @property
    def seconds(self) -> float:
        """So far; waits for a device to have come there."""
        spans, self._spans = self._spans, []
        self._seconds += sum(end.seconds_since(began) for began, end in spans)
        return self._seconds
