"""The interface to a device that holds KV: memory, streams and events, and copies between host and device.

A device works asynchronously. Work is queued in a *stream* and done in that order; streams are independent until one
waits for an *event* of another. So three rules hold:

- KV is written and read through a port (`runtime.device.plane`), or at its address by kernels of the device itself. In
  either case `Turns` orders the work of different streams on the same memory.
- A copy is done when an event recorded after it is. Until then its target is undefined, and its source must not change.
- The host itself waits for what it reads or writes (`Event.synchronize`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from errno import ENOMEM
from typing import Any, ClassVar, Protocol

import numpy.typing as npt
import torch

from keepwarm.core.ports import Bytes
from keepwarm.errors import Overloaded, UnsupportedModel
from keepwarm.runtime.device.copies import Copies

# torch's words where it has no exception for this: MPS, and the processor's allocator on each system.
_WORDS = ("out of memory", "invalid buffer size", "can't allocate memory", "not enough memory")


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Return when everything before it is done."""
        ...

    def is_past(self) -> bool:
        """Whether everything before it is done. Returns at once."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds between two events by the device's clock, both recorded with `timed`. Waits for both."""
        ...


class Stream(Protocol):
    """A queue of work that a device does in order. Threads may share one; equal ones are the same."""

    def record(self, *, timed: bool = False) -> Event:
        """Return an event after all work queued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let all further work begin after an event of any stream of the device. Returns at once."""
        ...


class Memory(Protocol):
    """Bytes on a device. They belong to the caller until `free`, or until nothing refers to them."""

    @property
    def tensor(self) -> torch.Tensor:
        """The whole memory, uint8 `[nbytes]`. New memory is not initialized."""
        ...

    @property
    def owner(self) -> object:
        """An object that lives as long as anything may read or write the bytes."""
        ...

    def used_by(self, stream: Stream) -> None:
        """Note that a stream uses the memory: once freed, it is reused only after that work is done."""
        ...

    def free(self) -> None:
        """Give the memory back now, not at garbage collection. It may be called twice."""
        ...


class DevicePort(ABC):
    """One device, as used by one engine. Threads may share it.

    `inbound` and `outbound` are its streams for copies to the device and from it. A thread's computations go to
    `current()`, torch's current stream.
    """

    kind: ClassVar[str]  # as torch names it
    is_host: ClassVar[bool]  # its memory is the host's, so it may be read and written in place, by address
    goes_ahead: ClassVar[bool] = False  # the host may queue further work while it waits for a result
    has_addresses: ClassVar[bool] = True  # its kernels read memory at the addresses that torch tells
    device: torch.device
    inbound: Stream
    outbound: Stream

    @abstractmethod
    def current(self) -> Stream:
        """Return the stream of the calling thread's computations."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream; on a device with a single stream, that one."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Send the calling thread's computations to a stream while the `with` block runs."""
        return nullcontext()

    def allocate(self, nbytes: int, *, huge: bool = True) -> Memory:
        """Allocate memory; on the host in `huge` pages if the system has them. Raises Overloaded when there is none."""
        with self.memory_for(f"{nbytes} bytes of KV"):
            return self._allocate(nbytes, huge)

    @abstractmethod
    def _allocate(self, nbytes: int, huge: bool) -> Memory: ...

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host memory, uint8 `[nbytes]`, that the device itself can copy from and to, if it supports that.

        It is reused once nothing refers to it and the copies queued in streams are done.
        """

    def register(self, data: Bytes) -> None:
        """Let the device copy from bytes of the host where they lie, for as long as something refers to `data`. Nothing
        happens if it cannot, or if they are few (see `Registered.add`)."""
        return

    def holds(self, rows: Bytes) -> bool:
        """Whether the device can copy from rows of the host, `[heads, n, head_bytes]`, where they lie."""
        return False

    @abstractmethod
    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue in a stream the copy of `source`, pinned bytes, into `target` on the device, of the same shape."""

    @abstractmethod
    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        """Queue in a stream the copy of `source` on the device into `target`, pinned bytes of the same shape."""

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a copy of an array on the device, for the calling thread's next computations. The host does not wait
        where it need not. The array may change right after."""
        return torch.from_numpy(array).to(self.device, copy=True)

    def fetch(self, result: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Queue a copy of what the calling thread computed to the host. What is returned waits for it, but for nothing
        that is queued later, and returns it."""
        copied = result.cpu()
        return lambda: copied

    @property
    def copies_by_address(self) -> bool:
        """Whether `copy_all` works, and many copies should go through it."""
        return False

    def copy_all(self, copies: Copies, stream: Stream, pinned: object = None) -> None:
        """Queue in a stream copies between pinned host memory and any memory of the device, by address. What is given
        as `pinned` lives until they are done. Raises UnsupportedModel where addresses mean nothing to the host."""
        raise UnsupportedModel(f"memory of {self.device} cannot be copied by address")

    def let_go(self) -> None:
        """Let go of what was given to `copy_all` for copies that are done."""
        return

    def write(self, target: torch.Tensor, rows: torch.Tensor, at: torch.Tensor | None = None) -> None:
        """Write rows that the calling thread computed, `[heads, n, dim]`, to all of `target`, which is part of a
        Memory; or to its positions `at`, `[n]`."""
        if at is None:
            target.copy_(rows)
        else:
            target.index_copy_(1, at, rows.to(target.dtype))

    def synchronize(self) -> None:
        """Wait until all work queued in the calling thread's stream and the streams for copies is done."""
        for stream in (self.current(), self.inbound, self.outbound):
            stream.record().synchronize()

    def reclaim(self) -> None:
        """Return freed memory to the system, so that the next allocation can use it."""
        return

    def free_memory(self) -> int | None:
        """Return the bytes that nobody has, ourselves and other programs included; None if the device does not tell.
        Freed memory counts once it is reclaimed."""
        return None

    @contextmanager
    def memory_for(self, what: str) -> Iterator[None]:
        """Run the `with` block. If memory runs out, raise Overloaded, which says for `what`."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            free = self.free_memory()
            said = "" if free is None else f"; {free} bytes are free"
            raise Overloaded(
                f"{self.device} has no memory left for {what} ({str(error).strip().splitlines()[0]}{said}): ask again "
                "later, lower max_device or max_pages, or run fewer requests at once"
            ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device, or the host, has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
