"""An engine for programs that run in an event loop: many requests at once share a batch, and nothing holds up the loop.

What takes time runs in threads: rendering, tokenizing and explaining in some, loading and warming in others, and the
batch's own rounds in the batch's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TypeVar, Unpack

from keepwarm.batching.batcher import Batcher, check_bounds
from keepwarm.batching.request import Ticket
from keepwarm.checks import check
from keepwarm.config import EngineConfig
from keepwarm.core.deadline import Deadline
from keepwarm.core.request import GenerateArgs, PromptArgs
from keepwarm.core.results import EngineStats, Explanation, Generation, Piece, WarmReport
from keepwarm.core.settings import EngineArgs
from keepwarm.engine import Engine
from keepwarm.errors import ConfigError
from keepwarm.runtime.loader import ModelSource

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_PREPARING = 4  # threads that render, tokenize, look up: more would only take turns at the interpreter's lock
_COMPUTING = 2  # threads for work that holds the model for long, so that it never holds up the others


class AsyncEngine:
    """One model with its cache, and a batch of requests over it. Use it as `async with`, or `open` and `close` it.

    Cancelling a task that waits for an answer cancels its request. Errors are those of `Engine` and `Batcher`. The
    coroutines may be awaited in several event loops.
    """

    def __init__(
        self,
        source: Engine | Callable[[], Engine],
        *,
        max_batch: int = 32,
        max_queue: int = 256,
        max_prefill_tokens: int = 256,
    ) -> None:
        """`source` is an engine, which its owner closes, or a function that makes one: that one is closed with this.

        The bounds are those of `Batcher`. Raises ConfigError.
        """
        check_bounds(max_batch=max_batch, max_queue=max_queue, max_prefill_tokens=max_prefill_tokens)
        self._source, self._owns = source, not isinstance(source, Engine)
        self._make_batch = partial(
            Batcher, max_batch=max_batch, max_queue=max_queue, max_prefill_tokens=max_prefill_tokens
        )
        self._batcher: Batcher | None = None
        self._opened = self._closed = False
        self._preparing = ThreadPoolExecutor(_PREPARING, "keepwarm-async")
        self._computing = ThreadPoolExecutor(_COMPUTING, "keepwarm-async-long")

    @classmethod
    def from_pretrained(
        cls,
        model: ModelSource,
        *,
        max_batch: int = 32,
        max_queue: int = 256,
        max_prefill_tokens: int = 256,
        adapters: Mapping[str, str | Path] | None = None,
        progress: Callable[[str], None] = log.info,
        **settings: Unpack[EngineArgs],
    ) -> AsyncEngine:
        """Return an engine that loads its model when it is opened; arguments are those of `Engine.from_pretrained`.

        This call itself refuses wrong settings: ConfigError, StoreError. `progress` is called from another thread.
        """
        check(EngineConfig.build(**settings))
        make = partial(Engine.from_pretrained, model, adapters=adapters, progress=progress, **settings)
        return cls(make, max_batch=max_batch, max_queue=max_queue, max_prefill_tokens=max_prefill_tokens)

    # ---- life ----

    async def open(self) -> AsyncEngine:
        """Load the model and open its store, in another thread. Raises what `Engine.from_pretrained` raises."""
        self._begin()
        try:
            batcher = await _result(self._computing, self._start, self._end)
        except BaseException:
            self._closed = True
            for threads in (self._preparing, self._computing):
                threads.shutdown(wait=False)
            raise
        if self._closed:
            await asyncio.to_thread(self._end, batcher)
            raise ConfigError("this engine was closed while it was being opened")
        self._batcher = batcher
        return self

    async def close(self, *, cancel: bool = False) -> None:
        """Take no more requests, finish or `cancel` the present ones, wait for `warm` calls, and write what is queued.

        It may be called twice. If it is never closed, its requests are cancelled when the program ends.
        """
        self._closed = True
        await asyncio.to_thread(self._close, cancel)

    async def __aenter__(self) -> AsyncEngine:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(cancel=error is not None)

    @property
    def engine(self) -> Engine:
        """The engine underneath, for what is not offered here (tool sets, sessions, purges). Its calls hold up the
        event loop unless they run in a thread: `asyncio.to_thread`. Raises ConfigError."""
        return self.batcher.engine

    @property
    def batcher(self) -> Batcher:
        """The batch that answers the requests. Raises ConfigError while the engine is not open."""
        if self._closed:
            raise ConfigError("this engine is closed; make a new one")
        if self._batcher is None:
            raise ConfigError("this engine is not open yet: use it as `async with`, or await its open()")
        return self._batcher

    # ---- requests ----

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        priority: int = 0,
        owner: str = "",
        **arguments: Unpack[GenerateArgs],
    ) -> Generation:
        """Answer a prompt as `Engine.generate` does, in a batch with all other requests under way.

        `priority` and `owner` are as for `Batcher.submit`. Raises what that and `Ticket.result` raise.
        """
        return await (await self.submit(prompt, priority=priority, owner=owner, **arguments))

    async def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        priority: int = 0,
        owner: str = "",
        **arguments: Unpack[GenerateArgs],
    ) -> AsyncGenerator[Piece, None]:
        """Answer as `generate` does, piece by piece. The last piece carries the result.

        Leaving the loop early cancels the request (at once with `contextlib.aclosing`). A bad request is refused when
        the first piece is asked for.
        """
        ticket = await self.submit(prompt, priority=priority, owner=owner, **arguments)
        try:
            async with aclosing(aiter(ticket)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            ticket.cancel()

    async def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        priority: int = 0,
        owner: str = "",
        **arguments: Unpack[GenerateArgs],
    ) -> Ticket:
        """Queue a request and return its ticket, which can be awaited, iterated over and cancelled. The request's clock
        starts with this call. Raises what `Batcher.submit` raises."""
        batcher = self.batcher
        submit = partial(
            batcher.submit,
            prompt,
            priority=priority,
            owner=owner,
            epoch=batcher.engine.pipeline.archive.epoch_known(),
            started=time.perf_counter(),
            **arguments,
        )
        return await self._prepared(submit, Ticket.cancel)

    async def warm(
        self, prompt: str | Sequence[int] | None = None, *, name: str | None = None, **arguments: Unpack[PromptArgs]
    ) -> WarmReport:
        """Compute and store a prompt's beginning, as `Engine.warm` does. Answers under way have the first turn.

        A cancelled call ends at once, but what it computes is computed and stored all the same.
        """
        return await _result(self._computing, partial(self.engine.warm, prompt, name=name, **arguments))

    async def explain(
        self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]
    ) -> Explanation:
        """Return what a prompt would hit and why no more, as `Engine.explain` does."""
        return await self._prepared(partial(self.engine.explain, prompt, **arguments))

    async def count_tokens(self, prompt: str | Sequence[int] | None = None, **arguments: Unpack[GenerateArgs]) -> int:
        """Return how many tokens `generate` would run for a prompt, as `Engine.count_tokens` does."""
        return await self._prepared(partial(self.engine.count_tokens, prompt, **arguments))

    async def stats(self) -> EngineStats:
        """Return the engine's counters and the sizes of its tiers. `batcher.stats()` tells about the batch."""
        return await self._prepared(self.engine.stats)

    # ---- threads ----

    async def _prepared(
        self, work: Callable[[], _Result], unwanted: Callable[[_Result], object] = lambda _: None
    ) -> _Result:
        """Run `work` in a thread, which gives it up if the caller is cancelled."""
        deadline = Deadline(inf)

        def governed() -> _Result:
            with deadline.governing():
                deadline.check()
                return work()

        try:
            return await _result(self._preparing, governed, unwanted)
        except asyncio.CancelledError:
            deadline.give_up()
            raise

    def _begin(self) -> None:
        if self._opened or self._closed:
            raise ConfigError("this engine was opened before; make a new one")
        self._opened = True

    def _start(self) -> Batcher:
        engine = self._source if isinstance(self._source, Engine) else self._source()
        try:
            return self._make_batch(engine)
        except BaseException:
            if self._owns:
                engine.close()
            raise

    def _end(self, batcher: Batcher, *, cancel: bool = True) -> None:
        batcher.close(cancel=cancel)
        if self._owns:
            batcher.engine.close()

    def _close(self, cancel: bool) -> None:
        if self._batcher is not None:
            self._batcher.close(cancel=cancel)  # whoever comes later from a thread is refused by it
        self._preparing.shutdown()
        self._computing.shutdown()
        if self._batcher is not None:
            self._end(self._batcher)


async def _result(
    threads: ThreadPoolExecutor, work: Callable[[], _Result], unwanted: Callable[[_Result], object] = lambda _: None
) -> _Result:
    """Return the result of `work`, done in a thread. If the caller is cancelled meanwhile, `unwanted` gets it."""
    future: Future[_Result] = threads.submit(copy_context().run, work)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(partial(_drop, unwanted))
        raise


def _drop(unwanted: Callable[[_Result], object], future: Future[_Result]) -> None:
    if not future.cancelled() and future.exception() is None:
        unwanted(future.result())
