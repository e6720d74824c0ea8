"""SGLang's own protocol: `/generate` with a text or token ids, and `/flush_cache`."""

from __future__ import annotations

import functools
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from keepwarm.core.results import Generation, Piece, TokenLogprob
from keepwarm.serving.answers import Answer, Answers
from keepwarm.serving.events import HEARTBEAT, disconnected, event
from keepwarm.serving.generation import described, errors_as, log_generation, sampling, single
from keepwarm.serving.protocols import caching
from keepwarm.serving.protocols.bodies import BodyRoute
from keepwarm.serving.protocols.choices import STREAMED, choices_of, streamed
from keepwarm.serving.protocols.errors import Protocol
from keepwarm.serving.schemas import sglang as shapes
from keepwarm.serving.schemas.native import NativeError
from keepwarm.serving.schemas.openai import CompletionRequest
from keepwarm.serving.service import Service
from keepwarm.serving.tenancy.access import Calling, LookingService, SessionId, noted, serving

_NEW_TOKENS = 128  # of an answer to requests that do not say, as in SGLang
_GROWTH = 64  # an event comes when an answer has grown by more than a 64th, so up to this length for every token

router = APIRouter(tags=["SGLang"], route_class=BodyRoute, responses=errors_as(NativeError))


@router.post("/generate", response_model=shapes.Generated | list[shapes.Generated], responses=STREAMED)
async def generate(
    body: shapes.GenerateRequest, request: Request, caller: Calling, session: SessionId = None
) -> Response:
    """Continue a text or token ids, or each of several, streamed or whole."""
    service = await serving(request, body.model)
    asked = _as_completion(body, body.model or service.model_id)
    arguments = sampling(asked, {"temperature": 1.0}) | {"max_new_tokens": asked.max_tokens}
    if body.return_logprob:
        arguments["logprobs"] = body.top_logprobs_num or 0
    arguments |= service.adapted(asked.model)
    wanted = choices_of(asked, service, arguments, session, prompts=body.prompts)
    noted(request, model=asked.model)
    answers = await service.ask(caller, wanted, Protocol.NATIVE, functools.partial(disconnected, request.receive))
    shown = _Shown(body, service)
    if body.stream:
        chunks = _chunks(answers, shown, many=body.listed)
        return await streamed(request, answers, service, arguments, chunks, Protocol.NATIVE)
    results = await single(request, answers)
    log_generation(request, service, arguments, results)
    each = [shown.whole(result, answer) for result, answer in zip(results, answers.each, strict=True)]
    return JSONResponse(each if body.listed else each[0])


@router.post("/flush_cache", response_model=shapes.Flushed)
async def flush_cache(service: LookingService, caller: Calling) -> dict[str, Any]:
    """Remove everything this tenant stored, as `/v1/cache/purge` does: its sets and conversations, too."""
    removed = await caching.purge(service, caller)
    return {"success": True, "message": f"stored runs that were removed: {removed['runs']}"}


def _as_completion(body: shapes.GenerateRequest, model: str) -> CompletionRequest:
    """Return the same request in OpenAI's words."""
    given = body.sampling.model_dump(exclude_none=True, exclude={"max_new_tokens", "no_stop_trim"})
    renamed = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}
    fields = {renamed.get(name, name): value for name, value in given.items()}
    own = {"cache_salt": body.cache_salt, "reuse": body.reuse, "stream": body.stream}
    most = body.sampling.max_new_tokens or _NEW_TOKENS
    return CompletionRequest.model_validate({"model": model, "prompt": "", "max_tokens": most, **own, **fields})


@dataclass
class _SoFar:
    """What has come of an answer, and how many of its tokens the last event had."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sent: int = 0

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.ids += [] if piece.token_id is None else [piece.token_id]
        self.logprobs += [] if piece.logprob is None else [piece.logprob]

    @property
    def is_due(self) -> bool:
        """Whether it has grown enough for an event. Each event has all of it, so events for every token would take
        time and bytes by the square of its length."""
        return len(self.ids) - self.sent > self.sent // _GROWTH


class _Shown:
    """How answers of one request are shown."""

    def __init__(self, body: shapes.GenerateRequest, service: Service) -> None:
        self._body, self._service = body, service
        self._id = body.rid or secrets.token_hex(16)

    def whole(self, result: Generation, answer: Answer) -> dict[str, Any]:
        reason: dict[str, Any] = {"type": result.finish_reason}
        reason |= {"length": len(result.token_ids)} if result.finish_reason == "length" else {"matched": None}
        meta = self._meta(answer, reason, result.token_ids, result.logprobs or ())
        meta |= {"prompt_tokens": result.prompt_tokens, "cached_tokens": result.cached_tokens}
        meta |= {"e2e_latency": result.total_ms / 1000, "keepwarm": described(result, answer)}
        return {"text": result.text, "output_ids": list(result.token_ids), "meta_info": meta}

    def so_far(self, answer: Answer, come: _SoFar) -> dict[str, Any]:
        meta = self._meta(answer, None, come.ids, come.logprobs)
        return {"text": come.text, "output_ids": come.ids, "meta_info": meta}

    def _meta(self, answer: Answer, reason: Any, ids: Sequence[int], found: Sequence[TokenLogprob]) -> dict[str, Any]:
        name = self._id if answer.index == 0 else f"{self._id}-{answer.index}"
        meta: dict[str, Any] = {"id": name, "finish_reason": reason, "completion_tokens": len(ids)}
        if self._body.return_logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [self._pair(each.token_id, each.logprob) for each in found]
            if self._body.top_logprobs_num:
                meta["output_top_logprobs"] = [[self._pair(*top) for top in each.top] for each in found]
        return meta

    def _pair(self, token: int, logprob: float) -> tuple[float, int, str | None]:
        if not self._body.return_text_in_logprobs:
            return logprob, token, None
        return logprob, token, self._service.running.pipeline.tokenizer.decode([token])


async def _chunks(answers: Answers, shown: _Shown, *, many: bool) -> AsyncGenerator[bytes, None]:
    """Yield events, each with the whole answer so far, as SGLang's have. One says that the stream is alive, too:
    SGLang's benchmark takes no comments."""
    come = [_SoFar() for _ in answers.each]

    def chunk(answer: Answer, what: dict[str, Any]) -> bytes:
        return event(what | ({"index": answer.index} if many else {}))

    async for piece_of in answers.pieces(HEARTBEAT):
        answer, piece = piece_of or (answers.each[0], None)
        grown = come[answer.index]
        if piece is not None:
            grown.add(piece)
        if piece is None or grown.is_due:
            grown.sent = len(grown.ids)
            yield chunk(answer, shown.so_far(answer, grown))
    for answer in answers.each:
        assert answer.result is not None
        yield chunk(answer, shown.whole(answer.result, answer))
    yield event("[DONE]")
