"""The background thread that stores, promotes and merges, so that no request waits for it."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from keepwarm.store.health import logger

Job = Callable[[], None]
_Result = TypeVar("_Result")


class Writer:
    """Runs jobs one after another. At most `limit` submitted jobs wait or run; more are refused.

    `idle` is called after `idle_seconds` without a job. A job's exception is logged and goes no further.
    """

    def __init__(self, limit: int, idle: Job, idle_seconds: float = 5.0) -> None:
        self._limit = limit
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="keepwarm-store", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Queue a job. False when too many are pending, or after `close`."""
        with self._lock:
            if self._closed or self._pending >= self._limit:
                return False
            self._pending += 1
            self._queue.put(self._counted(job))
            return True

    def flush(self) -> None:
        """Wait until everything submitted so far is done. Called from a job, it returns at once."""
        done = threading.Event()
        with self._lock:
            if self._closed or threading.current_thread() is self._thread:
                return
            self._queue.put(done.set)
        done.wait()

    def wait_for(self, job: Callable[[], _Result]) -> _Result:
        """Do a job after all that was submitted so far, in this thread while the other one rests; raises what it
        raises."""
        resting, done = threading.Event(), threading.Event()

        def rest() -> None:
            resting.set()
            done.wait()

        with self._lock:
            if not self._closed:
                self._queue.put(rest)
            else:
                resting.set()
        resting.wait()
        try:
            return job()
        finally:
            done.set()

    def close(self) -> None:
        """Do what is queued, then end the thread. Later calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _counted(self, job: Job) -> Job:
        def counted() -> None:
            try:
                job()
            finally:
                with self._lock:
                    self._pending -= 1

        return counted

    def _run(self) -> None:
        _yield_to_compute()
        while True:
            try:
                job = self._queue.get(timeout=self._idle_seconds)
            except queue.Empty:
                job = self._idle
            if job is None:
                return
            try:
                job()
            except Exception:
                logger.exception("a background job of the store failed")


def _yield_to_compute() -> None:
    """Lowest priority for this thread alone: a third busy thread would stall the compute threads at every barrier."""
    if sys.platform == "linux":  # elsewhere a nice value belongs to the whole process
        with suppress(OSError):  # a sandbox that forbids it: only slower
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
