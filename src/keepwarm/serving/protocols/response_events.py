"""The stream of a response: the numbered events of OpenAI's Responses protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

from fastapi import Request

from keepwarm.core.results import Generation, Piece
from keepwarm.serving.answers import Answers
from keepwarm.serving.events import HEARTBEAT, event
from keepwarm.serving.generation import log_generation, shown_calls
from keepwarm.serving.protocols import items as convert
from keepwarm.serving.protocols.errors import Protocol, in_stream
from keepwarm.serving.protocols.response_objects import Wanted, is_cut

_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
_STILL = b": still at work\n\n"


async def events(
    request: Request, answers: Answers, wanted: Wanted, keep: Callable[[dict[str, Any]], Awaitable[None]]
) -> AsyncGenerator[bytes, None]:
    """Yield the whole stream. `keep` gets the response before the stream ends, so that clients can continue it then."""
    said = _Said(wanted)
    try:
        begun = wanted.begun()
        yield said.event("response.created", response=begun)
        yield said.event("response.in_progress", response=begun)
        async for found in answers.pieces(HEARTBEAT):
            if found is None:
                yield _STILL
                continue
            for chunk in said.piece(found[1]):
                yield chunk
        (result,) = answers.results
        for chunk in said.end(result):
            yield chunk
        shown = wanted.ended(result, answers.each[0], said.output)
        await keep(shown)
        log_generation(request, wanted.about.service, wanted.about.arguments, [result])
        yield said.event(f"response.{shown['status']}", response=shown)
    except Exception as error:
        told = in_stream(error, Protocol.OPENAI)["error"]
        failure = {"code": _CODES.get(told["type"], "server_error"), "message": told["message"]}
        more = {"status": "failed", "error": failure, "output": said.output, "store": False}
        yield said.event("response.failed", response=wanted.begun() | more)
    finally:
        answers.close()


class _Said:
    """The part of a response that was sent so far, and the events that send it."""

    def __init__(self, wanted: Wanted) -> None:
        self.output: list[dict[str, Any]] = []
        self._wanted = wanted
        self._gate = wanted.gate
        self._number = 0
        self._message = convert.new_id("message")
        self._text = ""
        self._blank = ""  # white space that begins the answer; it is dropped if a call follows
        self._open = False
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []  # log-probabilities whose text was not sent yet

    def event(self, kind: str, **data: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return event(data, kind)

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.logprob:
            shown = self._wanted.shown_logprobs([piece.logprob])
            self._logprobs += shown
            self._waiting += shown
        text = self._blank + (self._gate.push(piece.text) if self._gate else piece.text)
        if text.strip() or (text and self._open):
            self._blank = ""
            yield from self._delta(text)
        else:
            self._blank = text

    def end(self, result: Generation) -> Iterator[bytes]:
        """Yield the rest of the text, and the calls."""
        if not result.tool_calls:
            rest = self._blank + (self._gate.rest() if self._gate else "")
            yield from self._delta(rest) if rest else self._opened()
        if self._open:
            yield from self._closed("incomplete" if is_cut(result) else "completed", whole=not result.tool_calls)
        for item in convert.call_items(shown_calls(self._wanted.about.service, result)):
            yield from self._call(item)

    def _opened(self) -> Iterator[bytes]:
        if self._open:
            return
        self._open = True
        item = convert.message_item(self._message, "in_progress")
        yield self.event("response.output_item.added", output_index=0, item=item)
        yield self.event("response.content_part.added", **self._place(), part=convert.text_part(""))

    def _delta(self, text: str) -> Iterator[bytes]:
        yield from self._opened()
        self._text += text
        logprobs, self._waiting = self._waiting, []
        yield self.event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _closed(self, status: str, *, whole: bool) -> Iterator[bytes]:
        """Yield the end of the text. With `whole` there are no calls, so the tokens' log-probabilities belong to the
        text."""
        part = convert.text_part(self._text, self._logprobs if whole else ())
        item = convert.message_item(self._message, status, part)
        more = {"text": self._text, "logprobs": part["logprobs"]}
        yield self.event("response.output_text.done", **self._place(), **more)
        yield self.event("response.content_part.done", **self._place(), part=part)
        self.output.append(item)
        yield self.event("response.output_item.done", output_index=0, item=item)

    def _call(self, item: dict[str, Any]) -> Iterator[bytes]:
        """Yield one call. It is known completely, so its arguments are sent at once."""
        index = len(self.output)
        place = {"item_id": item["id"], "output_index": index}
        empty = item | {"status": "in_progress", "arguments": ""}
        yield self.event("response.output_item.added", output_index=index, item=empty)
        yield self.event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self.event("response.function_call_arguments.done", **place, **done)
        self.output.append(item)
        yield self.event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}
