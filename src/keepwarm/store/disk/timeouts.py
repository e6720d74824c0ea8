"""Bounded waits for calls that may hang forever: system calls on a folder whose device or server stopped answering."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from keepwarm.errors import StoreStalled

_Result = TypeVar("_Result")
SECONDS = 5.0
_LINGER = 30.0  # seconds until a thread without work ends


class BoundedCalls:
    """Makes calls in its own threads; the caller waits at most `seconds` for each.

    A call that takes longer goes on, since nothing can stop it. Until it returns, every new call is refused at once, so
    that only the first request waits in vain. The threads are daemons, so they do not keep the process alive. While the
    process ends and no thread can be started, the caller's own thread makes the call.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = 0  # threads that wait for work, minus the work that waits for a thread
        self._late = 0  # overdue calls, for which no caller waits any more

    @property
    def stalled(self) -> bool:
        """Whether a call is overdue."""
        return self._late > 0

    def start(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Begin a call. Raises StoreStalled when another one is overdue."""
        if self._late:
            raise StoreStalled("the store's folder has not answered for a while")
        future: Future[_Result] = Future()

        def work() -> None:
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            there = self._free > 0 or self._has_another()
            if there:
                self._free -= 1
                self._work.put(work)
        if not there:
            work()
        return future

    def wait(self, future: Future[_Result]) -> _Result:
        """Return the result of a call, or raise what it raised. Raises StoreStalled when it does not end in time."""
        try:
            return future.result(self.seconds)
        except FutureTimeout:
            if future.done():  # it ended just now, or raised a time-out of its own
                return future.result()
        with self._lock:
            self._late += 1
        future.add_done_callback(self._came)
        raise StoreStalled(f"the store's folder did not answer within {self.seconds:g} s")

    def call(self, call: Callable[[], _Result]) -> _Result:
        """Make a call. Raises what it raises, and StoreStalled."""
        return self.wait(self.start(call))

    def _has_another(self) -> bool:
        """Start a thread, under the lock. Return False when the interpreter no longer allows that."""
        try:
            threading.Thread(target=self._run, name="keepwarm-disk", daemon=True).start()
        except RuntimeError:
            return False
        self._free += 1
        return True

    def _came(self, future: Future[_Result]) -> None:
        with self._lock:
            self._late -= 1

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=_LINGER)
            except queue.Empty:
                with self._lock:
                    if self._free > 0:
                        self._free -= 1
                        return
                work = self._work.get()  # a caller has just counted on this thread
            work()
            del work  # and what it read, so that a waiting thread holds no memory
            with self._lock:
                self._free += 1
