"""Threads for what must not run in the event loop, shared fairly among tenants.

No tenant holds all of them, and of those who wait the one goes first who had least time. A work has a deadline, and is
given up when its client leaves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from itertools import chain
from typing import Any, Generic, TypeVar

from keepwarm.core.deadline import Deadline
from keepwarm.core.shares import Shares
from keepwarm.errors import Overloaded
from keepwarm.serving.errors import ApiError

log = logging.getLogger("keepwarm.serving")

_Result = TypeVar("_Result")
_AT_ONCE = 0.25  # seconds after which it is looked whether the client is still there


class Work(Generic[_Result]):
    """One thing to be done for somebody."""

    def __init__(self, owner: str, run: Callable[[], _Result], seconds: float) -> None:
        self.owner = owner
        self.future: Future[_Result] = Future()
        self._run = copy_context().run, run
        self._deadline = Deadline(seconds)

    def run(self) -> None:
        """In a worker's thread."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self._deadline.check()
            within, run = self._run
            result = within(self._governed, run)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def _governed(self, run: Callable[[], _Result]) -> _Result:
        with self._deadline.governing():
            return run()

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._deadline.give_up()
        self.future.cancel()

    def refuse(self, reason: Exception) -> None:
        """It is never run; who waits for it is told why."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(reason)


class Workers:
    """Some threads, and the works that wait for them."""

    def __init__(self, name: str, *, threads: int, each: int, waiting: int) -> None:
        """One owner has at most `each` threads and `waiting` works that wait."""
        self._each, self._most = each, waiting
        self._shares = Shares()
        self._waiting: dict[str, deque[Work[Any]]] = {}  # by owner
        self._running: defaultdict[str, list[Work[Any]]] = defaultdict(list)
        self._changed = threading.Condition()
        self._closed = False
        self._name, self._count = name, threads
        self._threads: list[threading.Thread] = []  # started as they are needed

    def submit(self, owner: str, run: Callable[[], _Result], seconds: float) -> Work[_Result]:
        """Have something done within so many seconds, waiting included. Raises Overloaded."""
        work = Work(owner, run, seconds)
        with self._changed:
            if self._closed:
                raise Overloaded("the service is stopping")
            waiting = self._waiting.setdefault(owner, deque())
            if len(waiting) >= self._most:
                raise Overloaded(f"{len(waiting)} requests of this tenant wait to be prepared: ask again later")
            waiting.append(work)
            self._shares.active({*self._waiting, *self._running})  # before what runs now is added up
            if len(self._threads) < self._count:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()
        return work

    async def run(
        self, owner: str, run: Callable[[], _Result], seconds: float, gone: Callable[[], Awaitable[None]] | None = None
    ) -> _Result:
        """The result of `run`. It is given up when this is cancelled, or when the client is `gone`.

        Raises what it raises, Overloaded, TookTooLong, and ApiError when the client left.
        """
        work = self.submit(owner, run, seconds)
        waiting = asyncio.wrap_future(work.future)
        try:
            await asyncio.wait({waiting}, timeout=_AT_ONCE)
            if not waiting.done() and gone is not None:
                leaving = asyncio.ensure_future(gone())
                either: set[asyncio.Future[Any]] = {waiting, leaving}
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    leaving.cancel()
                    with suppress(asyncio.CancelledError):
                        await leaving
                if not waiting.done():
                    raise ApiError("timeout", "the client has gone")
            return await waiting
        finally:
            if not work.future.done():  # `waiting` is done too when this task was cancelled in `await waiting`
                work.give_up()

    def close(self, seconds: float = 60.0) -> None:
        """Take no more; what waits or runs is given up. Returns when the threads have ended, or after so long: who is
        in a tokenizer does not hear that nobody waits any more."""
        with self._changed:
            self._closed = True
            for work in chain(*self._waiting.values()):
                work.refuse(Overloaded("the service is stopping"))
            self._waiting.clear()
            for work in chain(*self._running.values()):
                work.give_up()
            self._changed.notify_all()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (owner := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    return
                assert owner is not None
                work = self._waiting[owner].popleft()
                if not self._waiting[owner]:
                    del self._waiting[owner]
                self._running[owner].append(work)
            started = time.monotonic()
            work.run()
            with self._changed:
                self._shares.take(owner, time.monotonic() - started)
                self._running[owner].remove(work)
                if not self._running[owner]:
                    del self._running[owner]
                self._changed.notify_all()

    def _next(self) -> str | None:
        """Whose work is to be done: of those who may have another thread, who had least time."""
        self._shares.active({*self._waiting, *self._running})
        free = [owner for owner in self._waiting if len(self._running.get(owner, ())) < self._each]
        return min(free, key=self._shares.taken, default=None)
