"""Background threads that store, promote and merge, so that no request waits for that work."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from keepwarm.core.unclosed import nothing

log = logging.getLogger(__name__)

Job = Callable[[], None]
_Result = TypeVar("_Result")
_REST = 0.1  # seconds that a job waits for `resting` at most
_LOOK = 0.004  # seconds between two calls of `resting`


class Writer:
    """Runs jobs one after another. At most `limit` submitted jobs wait or run; more are refused.

    `idle` is called after `idle_seconds` without a job, `ended` after the last one. A job's exception is only logged.
    Until the thread ends, it keeps alive what `idle` and `ended` refer to.
    """

    def __init__(
        self, limit: int, idle: Job = nothing, ended: Job = nothing, idle_seconds: float = 5.0, *, awaited: bool = False
    ) -> None:
        """`awaited`: requests wait for its jobs, so its thread does not lower its priority below compute threads."""
        self._limit = limit
        self._awaited = awaited
        self._idle = idle
        self._ended = ended
        self._idle_seconds = idle_seconds
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._pending = 0
        self._closed = False
        self._hurried = False
        self.resting: Callable[[], float] = lambda: 0.0  # seconds to delay a job if none follows it
        self._thread = threading.Thread(target=self._run, name="keepwarm-store", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in this writer's thread, as a job."""
        return threading.current_thread() is self._thread

    def submit(self, job: Job, *, timeout: float = 0.0, at_once: bool = False) -> bool:
        """Queue a job. Return False after `close`, or when too many jobs are pending and still are after `timeout`
        seconds. A job with `at_once` is not delayed by `resting`."""
        with self._lock:
            if timeout:
                self._lock.wait_for(lambda: self._closed or self._pending < self._limit, timeout)
            if self._closed or self._pending >= self._limit:
                return False
            self._pending += 1
            self._queue.put(self._counted(job, at_once))
            self._lock.notify_all()
            return True

    def flush(self) -> None:
        """Wait until everything submitted so far is done. Called from a job, it returns at once."""
        done = threading.Event()
        with self._lock:
            if self._closed or self.is_here:
                return
            self._queue.put(done.set)
            self._lock.notify_all()
        done.wait()

    def wait_for(self, job: Callable[[], _Result]) -> _Result:
        """Do a job after everything submitted so far, in the caller's thread, while the writer's thread pauses. Raises
        what the job raises."""
        resting, done = threading.Event(), threading.Event()

        def rest() -> None:
            resting.set()
            done.wait()

        with self._lock:
            if not self._closed:
                self._queue.put(rest)
                self._lock.notify_all()
            else:
                resting.set()
        resting.wait()
        try:
            return job()
        finally:
            done.set()

    def close(self, timeout: float | None = None) -> bool:
        """Do what is queued, then `ended`, and end the thread. Wait for that, `timeout` seconds at most. Return False
        when it is not done by then."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._lock.notify_all()
                self._queue.put(None)
        if not self.is_here:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def let_go(self, first: Job) -> None:
        """Do what is queued, then `first` and `ended`, without waiting for it. May be called from a finalizer."""
        self._queue.put(first)  # takes no lock that this thread may hold
        self._queue.put(None)

    def hurry(self) -> None:
        """Do not delay the present job any longer, since a request waits for it."""
        with self._lock:
            self._hurried = True
            self._lock.notify_all()

    def _counted(self, job: Job, at_once: bool) -> Job:
        def counted() -> None:
            try:
                if not at_once:
                    self._rest()
                job()
            finally:
                with self._lock:
                    self._pending -= 1
                    self._lock.notify()

        return counted

    def _run(self) -> None:
        if not self._awaited:
            _yield_to_compute()
        while True:
            try:
                job = self._queue.get(timeout=self._idle_seconds)
            except queue.Empty:
                job = self._idle
            if job is None:
                break
            self._do(job)
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        while not self._queue.empty():  # jobs that were queued during `let_go`
            if (job := self._queue.get()) is not None:
                self._do(job)
        self._do(self._ended)

    def _rest(self) -> None:
        """Delay a job, unless a request waits for it or other jobs follow it. A thread that runs Python code takes the
        interpreter's lock from compute threads, whatever its priority."""
        until = time.monotonic() + _REST
        with self._lock:
            while self._queue.empty() and not self._hurried:
                left = min(self.resting(), until - time.monotonic())
                if left <= 0:
                    break
                self._lock.wait(min(left, _LOOK))
            self._hurried = False

    def _do(self, job: Job) -> None:
        try:
            job()
        except Exception:
            log.exception("a background job of the store failed")


def _yield_to_compute() -> None:
    """Give this thread alone the lowest priority: a busy one would delay the compute threads at every barrier."""
    if sys.platform == "linux":  # elsewhere a nice value belongs to the whole process
        with suppress(OSError):  # a sandbox may forbid it; that only makes us slower
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
