"""OpenAI's older protocol: completions of texts and token ids."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from keepwarm.core.results import Generation
from keepwarm.serving.answers import Answer, Answers, usage_of
from keepwarm.serving.events import HEARTBEAT, disconnected, event
from keepwarm.serving.generation import (
    described,
    errors_as,
    log_generation,
    new_tokens,
    sampling,
    single,
    token_logprobs,
)
from keepwarm.serving.protocols import misses
from keepwarm.serving.protocols.bodies import BodyRoute
from keepwarm.serving.protocols.choices import SECONDS, STREAMED, About, choices_of, streamed
from keepwarm.serving.protocols.errors import ApiError, Protocol, unsupported
from keepwarm.serving.protocols.retention import Keep
from keepwarm.serving.schemas import openai as shapes
from keepwarm.serving.service import Service
from keepwarm.serving.tenancy.access import Calling, ServiceOf, SessionId, asked_for, noted

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BodyRoute, responses=errors_as(shapes.ErrorResponse))


@router.post("/completions", response_model=shapes.CompletionResponse, responses=STREAMED)
async def completions(
    body: shapes.CompletionRequest, request: Request, service: ServiceOf, caller: Calling, session: SessionId = None
) -> Response:
    """Continue a text or token ids, streamed or whole."""
    service = await asked_for(request, body)
    arguments = sampling(body, service.sampling)
    arguments["max_new_tokens"] = new_tokens(
        body.max_tokens if body.max_tokens is not None else 16, service.config.limits
    )
    if body.logprobs is not None:
        arguments["logprobs"] = body.logprobs
    if body.stream_options is not None and not body.stream:
        raise ApiError("invalid_request", "stream_options needs stream", param="stream_options")
    if body.prompt_cache_options is not None and body.prompt_cache_options.comparison_response_id:
        raise unsupported("prompt_cache_options.comparison_response_id", "chat completions have it")
    arguments |= service.adapted(body.model)
    ttl = body.prompt_cache_options.ttl if body.prompt_cache_options else None
    keep = (Keep("all", SECONDS[ttl]),) if ttl else ()
    wanted = choices_of(body, service, arguments, session, keep, _prompts(body.prompt))
    noted(request, model=body.model, user=body.user)
    answers = await service.ask(caller, wanted, Protocol.OPENAI, functools.partial(disconnected, request.receive))
    about = About("cmpl-", body, arguments, service, caller)
    if body.stream:
        return await streamed(request, answers, service, arguments, _text_chunks(answers, about, body))
    results = await single(request, answers)
    log_generation(request, service, arguments, results)
    with_ids = bool(body.return_token_ids)
    choices = [
        {
            "index": index,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "logprobs": _text_logprobs(service, result.logprobs) if body.logprobs is not None else None,
            **({"prompt_token_ids": answer.prompt_ids, "token_ids": list(result.token_ids)} if with_ids else {}),
        }
        for index, (answer, result) in enumerate(zip(answers.each, results, strict=True))
    ]
    usage = usage_of_prompts(results, body.n or 1)
    more = {"keepwarm": described(results[0], answers.each[0]), "prompt_cache_diagnostics": misses.openai(results[0])}
    return JSONResponse({**about.head("text_completion"), "choices": choices, "usage": usage, **more})


def _prompts(prompt: Any) -> list[str | Sequence[int] | None]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def usage_of_prompts(results: list[Generation], each: int) -> dict[str, Any]:
    """Return the usage of several prompts with `each` answers per prompt. It counts each prompt once."""
    parts = [usage_of(results[at : at + each]) for at in range(0, len(results), each)]
    total: dict[str, Any] = {
        name: sum(part[name] for part in parts) for name in parts[0] if name != "prompt_tokens_details"
    }
    details = [part["prompt_tokens_details"] for part in parts]
    return total | {"prompt_tokens_details": {name: sum(each[name] for each in details) for name in details[0]}}


async def _text_chunks(answers: Answers, about: About, body: shapes.CompletionRequest) -> AsyncGenerator[bytes, None]:
    usage = bool(body.stream_options and body.stream_options.include_usage)
    null = {"usage": None} if usage else {}

    def chunk(
        answer: Answer, text: str, finish: str | None, logprobs: Any, ids: Mapping[str, Any] = {}, **more: Any
    ) -> bytes:
        choice = {"index": answer.index, "text": text, "finish_reason": finish, "logprobs": logprobs, **ids}
        return event({**about.head("text_completion"), "choices": [choice], **null, **more})

    ends = dict.fromkeys(range(len(answers.each)), 0)  # characters of each answer's tokens so far
    async for found in answers.pieces(HEARTBEAT):
        if found is None:
            yield b": still at work\n\n"
            continue
        answer, piece = found
        logprobs = _text_logprobs(about.service, [piece.logprob], ends[answer.index]) if piece.logprob else None
        if logprobs:
            ends[answer.index] += len(logprobs["tokens"][0])
        ids: dict[str, Any] = {}
        if body.return_token_ids:
            prompt = {} if piece.index else {"prompt_token_ids": answer.prompt_ids}
            ids = prompt | {"token_ids": [piece.token_id]}
        if piece.text or logprobs or ids:
            yield chunk(answer, piece.text, None, logprobs, ids)
    for answer in answers.each:
        assert answer.result is not None
        more = {"keepwarm": described(answer.result, answer), "prompt_cache_diagnostics": misses.openai(answer.result)}
        yield chunk(answer, "", answer.result.finish_reason, None, **more)
    if usage:
        found_usage = usage_of_prompts(answers.results, body.n or 1)
        yield event({**about.head("text_completion"), "choices": [], "usage": found_usage})
    yield event("[DONE]")


def _text_logprobs(service: Service, found: Sequence[Any] | None, at: int = 0) -> dict[str, Any]:
    """Return log-probabilities in the older form, as parallel lists. `at` is where the first token begins in the
    answer, in characters."""
    shown = token_logprobs(service, found or ())
    offsets = []
    for token in shown:
        offsets.append(at)
        at += len(token["token"])
    return {
        "tokens": [token["token"] for token in shown],
        "token_logprobs": [token["logprob"] for token in shown],
        "top_logprobs": [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in shown],
        "text_offset": offsets,
    }
