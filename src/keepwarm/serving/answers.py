"""Brings the answers to one request from the batch's thread to the event loop, piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from keepwarm.core.plan import LinkPlan
from keepwarm.core.results import Generation, Piece
from keepwarm.core.spans import MissReason, Segment
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.protocols.retention import Keep
from keepwarm.serving.rewrite import Applied
from keepwarm.serving.uses import Hold

if TYPE_CHECKING:  # they load torch
    from keepwarm.batching.request import Listener, Ticket

Ended = Callable[["Answers", "Answer", BaseException | None], None]


class Answer:
    """One of the answers to a request."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ticket: Ticket | None = None
        self.result: Generation | None = None
        self.times: list[float] = []  # of its tokens, `time.perf_counter`
        self.ended = False
        self.wanted: int | None = None  # tokens that the request asked for; None if it did not say
        self.left_out: tuple[str, ...] = ()  # names of parts of the request that have no effect
        self.rewritten: tuple[Applied, ...] = ()  # by the operator's rules
        self.shown: Mapping[str, Any] | None = None  # the request's arguments, if rules changed them
        self.keep: tuple[Keep, ...] = ()
        self.ask_again: Callable[[Generation], None] | None = None  # hands the result to the shadow

    @property
    def cut_to(self) -> int | None:
        """How many tokens the answer may have if the request asked for more; None if it may have what was asked."""
        if self.ticket is None or self.wanted is None or self.ticket.max_new_tokens >= self.wanted:
            return None
        return self.ticket.max_new_tokens

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of its prompt. They exist once the first piece has come."""
        assert self.ticket is not None
        assert self.ticket.compiled is not None
        found: list[int] = self.ticket.compiled.tokens.tolist()
        return found

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of its prompt."""
        assert self.ticket is not None
        assert self.ticket.compiled is not None
        return self.ticket.compiled.segments

    @property
    def plan(self) -> LinkPlan:
        """The plan of what is reused of its prompt. It exists once the first piece has come."""
        assert self.ticket is not None
        assert self.ticket.plan is not None
        return self.ticket.plan


class Answers:
    """The answers to one request, which the batch computes together; one consumer iterates over their pieces.

    The consumer must `close` them, which cancels what is still running.
    """

    def __init__(self, count: int, ended: Ended, deadline: float) -> None:
        """`ended` is called in the event loop for each answer, even if no one waits; `deadline` is in loop time."""
        self.each = [Answer(index) for index in range(count)]
        self.hold: Hold | None = None  # of the model, until the last answer has ended
        self._ended = ended
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Answer, Piece | None]] = asyncio.Queue()
        self._held: list[tuple[Answer, Piece | None]] = []
        self._closed = False

    def listener(self, answer: Answer) -> Listener:
        """Return the function that the batch's thread calls."""
        loop, push = self._loop, self._push

        def heard(ticket: Ticket, piece: Piece | None) -> None:
            answer.ticket = ticket  # the submitting thread may set it later
            with suppress(RuntimeError):  # the loop is closed: no client waits
                loop.call_soon_threadsafe(push, answer, piece, time.perf_counter())

        return heard

    def submitted(self, answer: Answer, ticket: Ticket) -> None:
        """Set an answer's ticket, from the thread that submitted it."""
        answer.ticket = ticket
        if self._closed:
            ticket.cancel()

    def all_submitted(self) -> None:
        """Note that no more will be submitted: an answer without a ticket never runs."""
        for answer in self.each:
            answer.ended = answer.ended or answer.ticket is None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def over(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.ended for answer in self.each)

    @property
    def results(self) -> list[Generation]:
        """All results, once the iteration is over."""
        return [answer.result for answer in self.each if answer.result is not None]

    async def begin(self, timeout: float) -> bool:
        """Wait for the first piece, so that an earlier failure gets a status code. Return False if none came. Closes
        the answers if it raises."""
        try:
            try:
                async with asyncio.timeout(timeout):
                    event = await self._events.get()
            except TimeoutError:
                return False
            self._raise_failure(*event)
        except BaseException:
            self.close()
            raise
        self._held.append(event)
        return True

    async def pieces(self, timeout: float | None = None) -> AsyncIterator[tuple[Answer, Piece] | None]:
        """Yield every piece with its answer, and None each time that nothing came for `timeout` seconds.

        Raises what stopped an answer, and ApiError past the deadline.
        """
        open_ones = len(self.each)
        while open_ones:
            try:
                answer, piece = self._held.pop() if self._held else await self._wait(timeout)
            except TimeoutError:
                yield None
                continue
            self._raise_failure(answer, piece)
            if piece is None:
                open_ones -= 1
            elif piece.result is None:
                yield answer, piece

    async def wait(self) -> list[Generation]:
        """Wait for all results, and return them."""
        async for _ in self.pieces():
            pass
        return self.results

    def close(self) -> None:
        """Cancel what is running. It may be called twice, and after the end."""
        self._closed = True
        for answer in self.each:
            if answer.ticket is not None:
                answer.ticket.cancel()

    async def _wait(self, timeout: float | None) -> tuple[Answer, Piece | None]:
        if not self._events.empty():
            return self._events.get_nowait()
        left = self._deadline - self._loop.time()
        if left <= 0:
            raise ApiError("too_slow", "the answer took longer than this service allows (limits.request_timeout)")
        if timeout is not None and timeout < left:
            async with asyncio.timeout(timeout):
                return await self._events.get()
        with suppress(TimeoutError):
            async with asyncio.timeout(left):
                return await self._events.get()
        return await self._wait(None)

    def _push(self, answer: Answer, piece: Piece | None, at: float) -> None:
        if piece is None:
            answer.ended = True
            assert answer.ticket is not None
            self._ended(self, answer, answer.ticket.exception(0))
        elif piece.result is not None:
            answer.result = piece.result
        else:
            answer.times.append(at)
        self._events.put_nowait((answer, piece))

    def _raise_failure(self, answer: Answer, piece: Piece | None) -> None:
        if piece is None and answer.ticket is not None and (error := answer.ticket.exception(0)) is not None:
            raise error


UNSTORED = (MissReason.OFF, MissReason.UNCACHEABLE)  # nothing of these requests is kept


def usage_of(results: list[Generation]) -> dict[str, Any]:
    """Return OpenAI's usage. It counts the prompt once, however many answers it has."""
    first = results[0]
    written = written_tokens(first)
    completion = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": first.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens, "cache_write_tokens": written},
    }


def written_tokens(result: Generation) -> int:
    """Count the tokens whose KV this answer computed and stored: those up to its last cut that were not reused."""
    unstored = result.miss is not None and result.miss.reason in UNSTORED
    return 0 if unstored else max(0, result.last_cut - result.cached_tokens)
