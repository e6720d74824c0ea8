"""One request of a batch: the ticket that its caller holds, and what the request itself holds at each stage."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.core.blocks import Block, TokenIds, common_length
from keepwarm.core.plan import LinkPlan
from keepwarm.core.results import Generation, Piece
from keepwarm.core.spans import Reuse
from keepwarm.pipeline.prepared import Opened, Prepared
from keepwarm.runtime.execute import Answer
from keepwarm.runtime.pages import PagedSequence

_WORTH_WAITING = 64  # tokens
Listener = Callable[["Ticket", Piece | None], None]  # gets each piece of a ticket, then None: its outcome is known


class Ticket:
    """A submitted request: iterate over its pieces (see `Engine.stream`), or wait for its `result`. In an event loop,
    `async for` yields its pieces and `await` returns its result. If a task is cancelled while it waits in either, the
    request is cancelled."""

    def __init__(self, wake: Callable[[], None], listener: Listener | None = None) -> None:
        """`wake` makes the batch look at its requests again. A `listener` gets the pieces; iteration then has none."""
        self._wake = wake
        self._listener = listener
        self.compiled: CompiledPrompt | None = None
        self.max_new_tokens = 0  # most tokens of the answer; known once the request is submitted
        self.plan: LinkPlan | None = None  # which parts of the prompt are reused; known before the first piece
        self.by_tier: dict[str, int] = {}  # tokens reused, by tier
        self._pieces: SimpleQueue[Piece | None] = SimpleQueue()
        self._outcome: Future[Generation] = Future()
        self._told: list[Callable[[], None]] = []  # called with each piece, from the batch's thread
        self._cancelled = False

    def __iter__(self) -> Iterator[Piece]:
        """Yield each piece once, the last with the result. Raises what `result` raises."""
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._end()
        self._outcome.result()

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        """Yield each piece once, as they come, without holding up the event loop. Raises what `result` raises."""
        arrived = asyncio.Event()
        tell = _setter(arrived)
        self._told.append(tell)
        try:
            while (piece := await self._arrival(arrived)) is not None:
                yield piece
        finally:
            self._told.remove(tell)
        self._end()
        self._outcome.result()

    def _end(self) -> None:
        """Let others who iterate see the end, too."""
        self._pieces.put(None)
        for tell in tuple(self._told):
            tell()

    def __await__(self) -> Generator[Any, None, Generation]:
        """Wait for the whole answer, as `result` does."""
        return self._awaited().__await__()

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the whole answer. Raises CancelledError, TimeoutError, or the error that ended the request."""
        return self._outcome.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end. Return the error that `result` would raise; None for a whole answer. Raises
        TimeoutError."""
        return self._outcome.exception(timeout)

    def cancel(self) -> bool:
        """Ask to drop the request, at whatever stage it is. Return False when it has ended already."""
        if self._outcome.done():
            return False
        self._cancelled = True
        self._wake()
        return True

    @property
    def done(self) -> bool:
        return self._outcome.done()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called in time."""
        return self._cancelled

    def put(self, piece: Piece) -> None:
        """Add a piece. The batcher calls this."""
        self._hand_out(piece)

    def end(self, outcome: Generation | BaseException) -> None:
        """Set the outcome, once. The batcher calls this."""
        if isinstance(outcome, Generation):
            self._outcome.set_result(outcome)
        else:
            self._outcome.set_exception(outcome)
        self._hand_out(None)

    def _hand_out(self, piece: Piece | None) -> None:
        if self._listener is None:
            self._pieces.put(piece)
            for tell in tuple(self._told):
                tell()
        else:
            self._listener(self, piece)

    async def _arrival(self, arrived: asyncio.Event) -> Piece | None:
        """Return the next piece; `arrived` is set after one was put."""
        while True:
            arrived.clear()  # before the look: what is put after it sets it again
            with suppress(Empty):
                return self._pieces.get_nowait()
            await self._patiently(arrived)

    async def _awaited(self) -> Generation:
        ended = asyncio.Event()
        tell = _setter(ended)
        self._outcome.add_done_callback(lambda _: tell())
        await self._patiently(ended)
        return self._outcome.result()

    async def _patiently(self, event: asyncio.Event) -> None:
        """Wait for an event; cancel the request if the waiting task is cancelled."""
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise


def _setter(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of this loop from any thread. It does nothing once the loop is closed."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return tell


@dataclass
class Room:
    """What a request holds of a batch's memory. At every stage it is safe to give it back twice."""

    sequence: PagedSequence | None = None  # None: it keeps the cache it was prefilled in
    promised: int = 0  # pages reserved for a request without a sequence
    stack: ExitStack = field(default_factory=ExitStack)  # holds the arena it was opened with


@dataclass(eq=False)
class Waiting:
    """A submitted request."""

    ticket: Ticket
    prepared: Prepared
    owner: str = ""  # several owners may share a batch
    order: tuple[float, int] = (0.0, 0)
    held_at: float = inf  # number of requests admitted before it first found no room
    room: Room = field(default_factory=Room)

    @property
    def tokens(self) -> TokenIds:
        return self.prepared.compiled.tokens

    @property
    def positions(self) -> int:
        """The number of positions whose keys and values it may need; the last token's are never computed."""
        return len(self.tokens) + self.prepared.decoding.max_new_tokens - 1

    def shares(self, other: Prefilling) -> Sequence[Block]:
        """Return the leading blocks that this request shares with `other`, among those that `other` will have stored;
        none when `other` computes too few of their tokens to be worth a wait."""
        placed = other.opened.placed
        if placed is None or Reuse.OFF in (self.prepared.reuse, other.prepared.reuse):
            return ()
        blocks = placed.linked.blocks
        count = min(bisect_right(blocks.ends, self._common(other)), len(blocks) - 1)
        if count < 1 or blocks.ends[count - 1] - other.opened.plan.cached_tokens < _WORTH_WAITING:
            return ()
        return blocks[:count]

    def _common(self, other: Waiting) -> int:
        """Return how many leading tokens can share KV: as far as both are equal and under the same salts.
        Requests for different adapters share none."""
        if self.prepared.compiled.lora is not other.prepared.compiled.lora:
            return 0
        mine, theirs = self.prepared.compiled.extra_keys, other.prepared.compiled.extra_keys
        differ = [start for start in {*mine, *theirs} if mine.get(start) != theirs.get(start)]
        return min(common_length(self.tokens, other.tokens), *differ, len(self.tokens))


@dataclass(eq=False, kw_only=True)
class Prefilling(Waiting):
    """An admitted request. Its prompt's stored KV is in an arena or on its way there; an uncached request has a cache
    of its own."""

    opened: Opened
    steps: deque[tuple[int, int]] = field(default_factory=deque)  # the prompt's steps that are still to run

    @property
    def rows_left(self) -> int:
        """The number of rows of the prompt still to compute."""
        return sum(end - start for start, end in self.steps)

    @property
    def is_in_place(self) -> bool:
        """Whether only the prompt's last step is left and all KV that it attends to is in place."""
        placed = self.opened.placed
        return placed is not None and not placed.plan.relocates and not placed.arena.arrivals and len(self.steps) == 1


@dataclass(eq=False, kw_only=True)
class Running(Prefilling):
    """A request whose prompt is computed; it has its first token."""

    answer: Answer
    decoded: int = 0  # the round in which it got its last token

    @property
    def last(self) -> tuple[int, int]:
        """The newest token and its position."""
        return self.answer.token_ids[-1], len(self.tokens) + len(self.answer.token_ids) - 1


def let_in(request: Waiting, opened: Opened) -> Prefilling:
    """Return the request as an admitted one."""
    return Prefilling(**vars(request), opened=opened)


def begun(request: Prefilling, answer: Answer) -> Running:
    """Return the request as a running one."""
    return Running(**vars(request), answer=answer)
