"""Code that chats and completions of OpenAI's protocol share: their choices, the common part of all chunks, and
streams."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import Request

from keepwarm.core.results import Generation
from keepwarm.serving.answers import Answer, Answers
from keepwarm.serving.events import HEARTBEAT, EventStream, event
from keepwarm.serving.generation import log_generation
from keepwarm.serving.protocols import misses
from keepwarm.serving.protocols.errors import ApiError, Protocol, in_stream
from keepwarm.serving.protocols.history import Fingerprint, openai_diagnosis
from keepwarm.serving.protocols.retention import Keep
from keepwarm.serving.schemas import openai as shapes
from keepwarm.serving.schemas.responses import ResponsesRequest
from keepwarm.serving.service import Asked, Service
from keepwarm.serving.tenancy.tenants import Caller

SECONDS = {"30m": 1800.0, "12h": 43_200.0, "24h": 86_400.0}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def choices_of(
    body: shapes.ChatRequest | shapes.CompletionRequest,
    service: Service,
    arguments: Mapping[str, Any],
    session: str | None,
    keep: tuple[Keep, ...] = (),
    prompts: Sequence[str | Sequence[int] | None] = (None,),
    left_out: Sequence[str] = (),
) -> list[Asked]:
    """Return one `Asked` for each choice: `n` for each prompt. From a seed, each choice gets its own."""
    count = (body.n or 1) * len(prompts)
    if session is not None and (count > 1 or isinstance(body, shapes.CompletionRequest)):
        raise ApiError(
            "invalid_request", "a session takes one chat answer: leave out x-session-id", param="x-session-id"
        )
    if service.config.server.cache_key_sessions and count == 1 and isinstance(body, shapes.ChatRequest):
        session = session or body.prompt_cache_key
    if count > service.config.limits.max_choices:
        raise ApiError(
            "invalid_request",
            f"{count} choices are asked for, and at most {service.config.limits.max_choices} are allowed",
            param="n",
        )
    wanted = []
    for prompt in prompts:
        for number in range(body.n or 1):
            seed = {"seed": arguments["seed"] + number} if "seed" in arguments else {}
            wanted.append(
                Asked(
                    prompt,
                    {**arguments, **seed},
                    body.cache_salt,
                    session,
                    fit=body.max_tokens is None and getattr(body, "max_completion_tokens", None) is None,
                    keep=keep,
                    left_out=tuple(left_out),
                )
            )
    return wanted


class About:
    """All that the chunks of one answer have in common."""

    def __init__(
        self,
        prefix: str,
        body: shapes.ChatRequest | shapes.CompletionRequest | ResponsesRequest,
        arguments: Mapping[str, Any],
        service: Service,
        caller: Caller,
    ) -> None:
        self.id = prefix + secrets.token_hex(12)
        self.created = int(time.time())
        self.model = body.model
        self.arguments = arguments
        self.service = service
        self._caller = caller
        self._compared = body.prompt_cache_options.comparison_response_id if body.prompt_cache_options else None
        self._mark = Fingerprint.of(
            body.model, arguments, {"text": arguments.get("response_schema"), "key": body.prompt_cache_key}
        )

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def diagnosed(self, result: Generation, answer: Answer) -> dict[str, Any]:
        """Say why no more was reused, compared with `comparison_response_id` if one was given. Remember this answer
        for later ones."""
        history, mark = self.service.history, self._mark.of_shown(answer.shown)
        earlier = history.get(self._caller, self._compared) if self._compared else None
        history.put(self._caller, self.id, mark.with_result(result))
        told = openai_diagnosis(earlier, mark, result) if self._compared else misses.openai(result)
        return {"prompt_cache_diagnostics": told}


async def streamed(
    request: Request,
    answers: Answers,
    service: Service,
    arguments: Mapping[str, Any],
    chunks: AsyncGenerator[bytes, None],
    protocol: Protocol = Protocol.OPENAI,
) -> EventStream:
    """Return a stream once the first token is there (or is late), so that earlier failures get a status code."""
    await answers.begin(HEARTBEAT)

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in chunks:
                yield chunk
            log_generation(request, service, arguments, answers.results)
        except Exception as error:
            yield event(in_stream(error, protocol))
        finally:
            answers.close()

    return EventStream(events())
