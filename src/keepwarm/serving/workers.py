"""Threads for what must not run in the event loop, shared fairly among tenants.

No tenant holds all of them, and of the tenants that wait the one that had the least time goes first. While others have
requests, a tenant's thread rests as long as it worked: preparing holds the interpreter's lock, and every answer needs
it for every token. Work has a deadline, and is abandoned when its client leaves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from itertools import chain
from typing import Any, Generic, TypeVar

from keepwarm.core.deadline import Deadline
from keepwarm.core.shares import Shares
from keepwarm.errors import Overloaded, TookTooLong
from keepwarm.serving.protocols.errors import ApiError

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_AT_ONCE = 0.25  # seconds after which to look whether the client is still there
_NO_REST = 0.005  # seconds; what ordinary requests take
_LONGEST_REST = 1.0  # seconds
_QUICK = 0.1  # seconds; owners whose work all ends within them have threads reserved for them
_FADING = 0.8  # factor on the time of earlier work, with each later piece
_KNOWN = 10_000  # owners


class Work(Generic[_Result]):
    """One piece of work for an owner."""

    def __init__(self, owner: str, run: Callable[[], _Result], seconds: float) -> None:
        self.owner = owner
        self.future: Future[_Result] = Future()
        self.started = math.inf  # `time.monotonic`
        self._run = copy_context().run, run
        self._deadline = Deadline(seconds)

    def run(self) -> None:
        """Do the work, in a worker's thread."""
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
        """Abandon it: no client waits for it."""
        self._deadline.give_up()
        self.future.cancel()

    @property
    def late(self) -> TookTooLong:
        """The error for when its time is over."""
        return self._deadline.late

    def refuse(self, reason: Exception) -> None:
        """Fail it for this reason, without running it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(reason)


class Workers:
    """Some threads, and the work that waits for them."""

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        each: int,
        waiting: int,
        quick: int = 0,
        nice: int = 0,
        beside: Callable[[str], bool] = lambda owner: False,
    ) -> None:
        """One owner has at most `each` threads and `waiting` pieces of work that wait. `quick` of the threads are
        reserved for owners whose work is quick. `nice` is the threads' niceness, where a thread has its own priority.
        `beside` tells whether anyone except an owner has requests under way."""
        self._each, self._most = each, waiting
        self._slow_at_once, self._nice, self._beside = threads - quick, nice, beside
        self._longest: OrderedDict[str, float] = OrderedDict()  # seconds that a work took lately, by owner
        self._shares = Shares()
        self._waiting: dict[str, deque[Work[Any]]] = {}  # by owner
        self._running: defaultdict[str, list[Work[Any]]] = defaultdict(list)
        self._resting: defaultdict[str, list[float]] = defaultdict(list)  # until when
        self._changed = threading.Condition()
        self._closed = False
        self._ended = asyncio.Event()  # of the event loop: nothing may wait any longer
        self._name, self._count = name, threads
        self._threads: list[threading.Thread] = []  # started as they are needed

    def submit(self, owner: str, run: Callable[[], _Result], seconds: float) -> Work[_Result]:
        """Queue `run`, to be done within `seconds`, waiting included. Raises Overloaded."""
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
        """Return the result of `run`, which is abandoned when this call is cancelled or the client is `gone`.

        Raises what it raises, Overloaded, TookTooLong, and ApiError when the client left.
        """
        work = self.submit(owner, run, seconds)
        waiting = asyncio.wrap_future(work.future)
        try:
            await asyncio.wait({waiting}, timeout=_AT_ONCE)
            if not waiting.done():
                await self._first(waiting, gone, seconds)
            if not waiting.done():
                raise work.late
            return await waiting
        finally:
            if not work.future.done():  # `waiting` is done too when this task was cancelled in `await waiting`
                work.give_up()

    async def _first(
        self, waiting: asyncio.Future[Any], gone: Callable[[], Awaitable[None]] | None, seconds: float
    ) -> None:
        """Return when the work is done or its time is over: a tokenizer does not notice that itself. Raises when the
        client leaves before that, or when nothing may wait any longer."""
        leaving = asyncio.ensure_future(gone()) if gone is not None else None
        ending = asyncio.ensure_future(self._ended.wait())
        beside: list[asyncio.Future[Any]] = [each for each in (leaving, ending) if each is not None]
        try:
            await asyncio.wait({waiting, *beside}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return
            if ending.done():
                raise Overloaded("the service is stopping")
            if leaving is not None and leaving.done():
                raise ApiError("timeout", "the client has gone")
        finally:
            for each in beside:
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each

    def wait_no_longer(self) -> None:
        """Tell all callers that wait for work that the service stops. Call this in the event loop."""
        self._ended.set()

    def close(self, seconds: float = 60.0) -> None:
        """Take no more work, and abandon what waits or runs. Return when the threads have ended, or after `seconds`: a
        thread inside a tokenizer does not notice that its work is abandoned."""
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
        if self._nice and sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):  # it is lower already, or a sandbox forbids it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            with self._changed:
                while not self._closed and (owner := self._next()) is None:
                    self._changed.wait(self._rested())
                if self._closed:
                    return
                assert owner is not None
                work = self._waiting[owner].popleft()
                if not self._waiting[owner]:
                    del self._waiting[owner]
                self._running[owner].append(work)
                work.started = time.monotonic()
            work.run()
            with self._changed:
                self._running[owner].remove(work)
                if not self._running[owner]:
                    del self._running[owner]
                self._took(owner, time.monotonic() - work.started)
                self._changed.notify_all()
            del work  # while this thread waits, it must not keep alive what a request refers to: a model, say

    def _took(self, owner: str, seconds: float) -> None:
        self._shares.take(owner, seconds)
        self._longest[owner] = max(seconds, _FADING * self._longest.pop(owner, 0.0))
        if len(self._longest) > _KNOWN:
            self._longest.popitem(last=False)
        if seconds > _NO_REST:
            self._resting[owner].append(time.monotonic() + min(seconds, _LONGEST_REST))

    def _next(self) -> str | None:
        """Return whose work is next: of the owners that may have another thread, the one that had the least time."""
        self._shares.active({*self._waiting, *self._running})
        now = time.monotonic()
        for owner in [*self._resting]:
            self._resting[owner] = [until for until in self._resting[owner] if until > now]
            if not self._resting[owner]:
                del self._resting[owner]
        slow = sum(
            not self._is_quick(owner) or now - work.started > _QUICK
            for owner, works in self._running.items()
            for work in works
        )
        free = [owner for owner in self._waiting if self._held(owner) < self._each and self._may_begin(owner, slow)]
        return min(free, key=self._shares.taken, default=None)

    def _held(self, owner: str) -> int:
        resting = len(self._resting.get(owner, ()))
        return len(self._running.get(owner, ())) + (resting if resting and self._beside(owner) else 0)

    def _may_begin(self, owner: str, slow: int) -> bool:
        """Whether an owner may have a free thread, while `slow` pieces of slow work run. One of the reserved threads is
        also for owners about whom nothing is known yet."""
        return self._is_quick(owner) or slow < self._slow_at_once + (owner not in self._longest)

    def _is_quick(self, owner: str) -> bool:
        return self._longest.get(owner, math.inf) <= _QUICK

    def _rested(self) -> float | None:
        """Return the seconds until an owner that waits has rested; None when none rests."""
        ends = [until for owner in self._waiting for until in self._resting.get(owner, ())]
        return max(0.0, min(ends) - time.monotonic()) if ends else None
