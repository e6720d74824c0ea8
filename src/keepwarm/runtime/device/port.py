"""What is asked of a device that holds KV: memory, streams and events, and copies between host and device.

A device works while its caller goes on. What it is given goes to a *stream* and is done in the order in which it was
given; streams know nothing of each other until one waits for an *event* of another. So three rules hold:

- KV is written and read through a port (`runtime.device.plane`); only a port to the host's own memory tells addresses.
  `Turns` keeps what different streams do with the same memory in order.
- A copy is over when an event recorded behind it is. Until then its target holds anything, and its source must stay as
  it is.
- The host waits itself for what it reads or writes itself (`Event.synchronize`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from errno import ENOMEM
from typing import ClassVar, Protocol

import torch

from keepwarm.errors import Overloaded

# As torch words it where it has no exception of its own for it: MPS, and the processor's allocator on each system.
_WORDS = ("out of memory", "invalid buffer size", "can't allocate memory", "not enough memory")


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Return when everything before it is done."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two events, by the device's own clock; both recorded with `timed`. Waits for both."""
        ...


class Stream(Protocol):
    """Work that a device does in the order in which it is given. Threads may share one; equal ones are the same."""

    def record(self, *, timed: bool = False) -> Event:
        """An event behind all that the stream was given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Have whatever is given from now on begin after an event of any stream of the device. Returns at once."""
        ...


class Memory(Protocol):
    """Bytes on a device, the caller's own until `free`, or until nothing refers to it any more."""

    @property
    def tensor(self) -> torch.Tensor:
        """All of it, uint8 `[nbytes]`. What is in new memory nobody knows."""
        ...

    @property
    def owner(self) -> object:
        """An object that lives as long as anything may read or write the bytes."""
        ...

    def used_by(self, stream: Stream) -> None:
        """Take note that a stream is given work on it: freed memory is nobody else's before that is done."""
        ...

    def free(self) -> None:
        """Give it back, now and not when the garbage is collected. Safe to call twice."""
        ...


class DevicePort(ABC):
    """One device, as one engine uses it. Threads may share it.

    `inbound` and `outbound` are its streams for copies to the device and from it. What a thread computes goes to
    `current()`, as torch has it.
    """

    kind: ClassVar[str]  # as torch names it
    is_host: ClassVar[bool]  # its memory is the host's: it may be read and written in place, by address
    device: torch.device
    inbound: Stream
    outbound: Stream

    @abstractmethod
    def current(self) -> Stream:
        """The stream that the calling thread's computing goes to."""

    @abstractmethod
    def stream(self) -> Stream:
        """A stream that nothing was given yet; on a device with a single one, that."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Have what the calling thread computes go to a stream, for as long as the block runs."""
        return nullcontext()

    def allocate(self, nbytes: int, *, huge: bool = True) -> Memory:
        """New memory; on the host in `huge` pages where the system has such. Raises Overloaded when there is none."""
        with self.memory_for(f"{nbytes} bytes of KV"):
            return self._allocate(nbytes, huge)

    @abstractmethod
    def _allocate(self, nbytes: int, huge: bool) -> Memory: ...

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8 `[nbytes]`, that the device copies from and to by itself, where there is such.

        It is used anew when nothing refers to it and the copies that streams were given are done.
        """

    @abstractmethod
    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Give a stream the copy of `source`, pinned bytes, into `target` on the device, of the same shape."""

    @abstractmethod
    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        """Give a stream the copy of `source` on the device into `target`, pinned bytes of the same shape."""

    def write(self, target: torch.Tensor, rows: torch.Tensor, at: torch.Tensor | None = None) -> None:
        """Write what the calling thread computed, `[heads, n, dim]`, over all of `target`, part of a Memory; or over
        its positions `at`, `[n]`."""
        if at is None:
            target.copy_(rows)
        else:
            target.index_copy_(1, at, rows.to(target.dtype))

    def synchronize(self) -> None:
        """Return when all that the calling thread's stream and the streams for copies were given is done."""
        for stream in (self.current(), self.inbound, self.outbound):
            stream.record().synchronize()

    def reclaim(self) -> None:
        """Give memory that was freed back to the system, so that what is allocated next may have it."""
        return

    @contextmanager
    def memory_for(self, what: str) -> Iterator[None]:
        """Run the block; that memory has run out becomes Overloaded, which says for `what`."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise Overloaded(
                f"{self.device} has no memory left for {what} ({str(error).strip().splitlines()[0]}): ask again later, "
                "lower max_device, or run fewer requests at once"
            ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
