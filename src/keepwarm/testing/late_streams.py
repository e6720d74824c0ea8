"""Streams and events of the adversarial device: work that is put off until something waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from keepwarm.runtime.device.port import Event

STREAM_BITS = 20  # low bits of a mark, for the stream that wrote; the time stands above them


class Clock(Protocol):
    """What streams need of their device."""

    @property
    def lock(self) -> Any: ...

    def now(self) -> int:
        """Count what is done now, and return its number."""
        ...

    def clock(self) -> float:
        """Seconds, as events tell them."""
        ...

    def seen(self, known: dict[int, int]) -> None:
        """Note that the calling thread saw that an event is past."""
        ...

    def host_knows(self) -> dict[int, int]:
        """Return what the calling thread saw, by stream."""
        ...


class LateEvent:
    """A point in a stream. Once the stream has reached it, `known` is what happened before it, by stream."""

    def __init__(self, stream: LateStream, timed: bool) -> None:
        self.stream, self._timed = stream, timed
        self._at = 0.0  # seconds, when the stream reached it
        self.known: dict[int, int] | None = None

    def reach(self, known: dict[int, int], at: float) -> None:
        self.known, self._at = dict(known), at

    def synchronize(self) -> None:
        self.stream.run_to(self)
        self.stream.port.seen(self.known or {})

    def is_past(self) -> bool:
        self.stream.port.seen(self.known or {})
        return self.known is not None

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, LateEvent)
        assert self._timed
        assert earlier._timed
        for each in (earlier, self):
            each.synchronize()
        return self._at - earlier._at


class LateStream:
    """Work that is put off until something waits for it. With `prompt` it is done at once, as computing is."""

    def __init__(self, port: Clock, number: int, *, prompt: bool) -> None:
        self.number = number
        self.known: dict[int, int] = {}  # the latest time of itself and of each stream that it has waited for
        self.port, self._prompt = port, prompt
        self._work: deque[LateEvent | Callable[[], None]] = deque()

    def record(self, *, timed: bool = False) -> LateEvent:
        with self.port.lock:
            event = LateEvent(self, timed)
            self._give(event)
            return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)

        def waits() -> None:
            event.stream.run_to(event)
            join(self.known, event.known or {})

        with self.port.lock:
            self._give(waits)

    def give(self, work: Callable[[], None]) -> None:
        with self.port.lock:
            self._give(work)

    def _give(self, work: LateEvent | Callable[[], None]) -> None:
        if seen := self.port.host_knows():
            self._work.append(partial(join, self.known, dict(seen)))
        self._work.append(work)
        if self._prompt:
            self.run_to(None)

    def run_to(self, event: LateEvent | None) -> None:
        """Do the work that was put off up to an event; None: all of it."""
        with self.port.lock:
            while self._work and (event is None or event.known is None):
                self.advance()

    @property
    def is_busy(self) -> bool:
        """Whether work was put off."""
        return bool(self._work)

    def advance(self) -> None:
        """Do the first piece of work that was put off."""
        with self.port.lock:
            if self._work:
                work = self._work.popleft()
                work.reach(self.known, self.port.clock()) if isinstance(work, LateEvent) else work()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Do work at once while the block runs."""
        before, self._prompt = self._prompt, True
        self.run_to(None)
        try:
            yield
        finally:
            self._prompt = before

    def tick(self) -> int:
        """Note that something was written now. Return the mark that memory keeps of it."""
        self.known[self.number] = self.port.now()
        return self.known[self.number] << STREAM_BITS | self.number

    def knows(self, written: int) -> bool:
        """Whether this stream has waited for the write with this mark."""
        return self.known.get(written & (1 << STREAM_BITS) - 1, 0) >= written >> STREAM_BITS


def join(known: dict[int, int], other: dict[int, int]) -> None:
    """Add what another knows."""
    for stream, number in other.items():
        known[stream] = max(known.get(stream, 0), number)
