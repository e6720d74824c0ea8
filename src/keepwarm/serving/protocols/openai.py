"""OpenAI's protocol: models, chat completions, completions."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from keepwarm.core.results import Generation
from keepwarm.serving.answers import Answers, usage_of
from keepwarm.serving.events import HEARTBEAT, disconnected, event
from keepwarm.serving.generation import (
    ShownCall,
    described,
    errors_as,
    log_generation,
    new_tokens,
    said_before_calls,
    sampling,
    shown_calls,
    single,
    token_logprobs,
)
from keepwarm.serving.models import Models
from keepwarm.serving.protocols.bodies import BodyRoute, apart
from keepwarm.serving.protocols.choices import SECONDS, STREAMED, About, choices_of, streamed
from keepwarm.serving.protocols.errors import ApiError, Protocol
from keepwarm.serving.protocols.reasoning import template_args
from keepwarm.serving.protocols.retention import Keep
from keepwarm.serving.schemas import openai as shapes
from keepwarm.serving.service import Asked, Service
from keepwarm.serving.tenancy.access import Calling, ModelsOf, ServiceOf, SessionId, asked_for, noted
from keepwarm.serving.toolgate import ToolGate

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BodyRoute, responses=errors_as(shapes.ErrorResponse))


@router.get("/models", response_model=shapes.ModelList, response_model_exclude_unset=True)
async def models(found: ModelsOf, caller: Calling) -> dict[str, Any]:
    """List the served models, under all their names, and their adapters."""
    shown = [_model(found, name) for name in found.names]
    return {"object": "list", "data": shown, "has_more": False, "first_id": shown[0]["id"], "last_id": shown[-1]["id"]}


@router.get("/models/{name:path}", response_model=shapes.ModelShown, response_model_exclude_unset=True)
async def model(name: str, found: ModelsOf, caller: Calling) -> dict[str, Any]:
    """Return one model by its name."""
    return _model(found, name)


def _model(models: Models, name: str) -> dict[str, Any]:
    service = models.find(name)
    state = {"status": {"value": models.state(service)}} if service.several else {}
    created = datetime.fromtimestamp(int(service.started), UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "keepwarm",
        "type": "model",
        "display_name": name,
        "created_at": created,
        **state,
    }


# ---- chat ----


@router.post("/chat/completions", response_model=shapes.ChatResponse, responses=STREAMED)
async def chat(
    body: shapes.ChatRequest, request: Request, service: ServiceOf, caller: Calling, session: SessionId = None
) -> Response:
    """Answer a conversation, streamed or whole."""
    service = await asked_for(request, body)
    noted(request, model=body.model, user=body.user or body.safety_identifier)

    def asked() -> tuple[dict[str, Any], list[Asked], About]:
        arguments = _chat_arguments(body, service)
        found, left_out = template_args(
            service.engine.pipeline.adapter,
            effort=body.reasoning_effort,
            thinks=body.thinks,
            verbosity=body.verbosity,
            given=body.chat_template_kwargs,
        )
        arguments |= {"template_args": found} if found else {}
        arguments |= service.adapted(body.model)
        wanted = choices_of(body, service, arguments, session, _kept(body), left_out=left_out)
        return arguments, wanted, About("chatcmpl-", body, arguments, service, caller)

    arguments, wanted, about = await apart(request, asked)
    answers = await service.ask(caller, wanted, Protocol.OPENAI, functools.partial(disconnected, request.receive))
    if body.stream:
        return await streamed(request, answers, service, arguments, _chat_chunks(answers, about, body))
    results = await single(request, answers)
    log_generation(request, service, arguments, results)
    return JSONResponse(_chat_response(about, answers, body))


def _usage(results: list[Generation], body: shapes.ChatRequest) -> dict[str, Any]:
    """Return the usage; of a request with a prediction with its drafted tokens, whatever they were drafted from."""
    if body.prediction is None:
        return usage_of(results)
    drafted, accepted = (sum(getattr(each, f"{name}_tokens") for each in results) for name in ("drafted", "accepted"))
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return usage_of(results) | {"completion_tokens_details": details}


def _chat_arguments(body: shapes.ChatRequest, service: Service) -> dict[str, Any]:
    """Return the arguments of `Engine.generate`. Raises ApiError for what does not fit together."""
    messages = [_message(message) for message in body.messages]
    arguments: dict[str, Any] = {"messages": messages} | sampling(body, service.sampling)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError("invalid_request", "give max_completion_tokens or max_tokens, not both", param="max_tokens")
    arguments["max_new_tokens"] = new_tokens(body.max_completion_tokens or body.max_tokens, service.config.limits)
    if body.tools:
        arguments["tools"] = [tool.sent for tool in body.tools]
        if body.parallel_tool_calls is False:
            arguments["parallel_tool_calls"] = False
        strict = any(tool.function.strict for tool in body.tools)
        match body.tool_choice:
            case shapes.NamedChoice():
                arguments["tool_choice"] = {"name": body.tool_choice.function.name}
            case None | "auto":
                if strict:  # else a call may be wrong, and no time is spent on a grammar
                    arguments["tool_choice"] = "auto"
            case choice:
                arguments["tool_choice"] = choice
    elif body.tool_choice not in (None, "none", "auto"):
        raise ApiError("invalid_request", "tool_choice needs tools", param="tool_choice")
    elif body.parallel_tool_calls is False:
        raise ApiError("invalid_request", "parallel_tool_calls needs tools", param="parallel_tool_calls")
    match body.response_format:
        case shapes.JsonFormat():
            arguments["response_schema"] = {}
        case shapes.SchemaFormat():
            arguments["response_schema"] = body.response_format.json_schema.json_schema or {}
    if body.prediction is not None:
        content = body.prediction.content
        arguments["prediction"] = content if isinstance(content, str) else "".join(part.text for part in content)
    if body.logprobs:
        arguments["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ApiError("invalid_request", "top_logprobs needs logprobs", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError("invalid_request", "stream_options needs stream", param="stream_options")
    return arguments


def _message(message: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if isinstance(content, list):
        parts = [{"type": "text", "text": part.text} for part in content]
        if any(part.cache_control or part.prompt_cache_breakpoint for part in content):
            parts[-1]["cache_control"] = {"type": "ephemeral"}
        shown["content"] = parts
    else:
        shown["content"] = content or ""
    if message.role == "assistant" and message.tool_calls:
        shown["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    if message.name is not None:
        shown["name"] = message.name
    if message.role == "tool":
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _kept(body: shapes.ChatRequest) -> tuple[Keep, ...]:
    """Return what the request asks to keep, by breakpoint."""
    options = body.prompt_cache_options
    general = SECONDS.get(body.prompt_cache_retention or (options.ttl if options else None) or "", 0.0)
    keeps = [Keep("all", general)] if general else []
    ends: list[float] = []
    for message in body.messages:
        parts = message.content if isinstance(message.content, list) else []
        declared = [part for part in parts if part.cache_control or part.prompt_cache_breakpoint]
        if declared:
            ends.append(max(_part_seconds(part, general) for part in declared))
    keeps += [Keep("message", seconds, len(ends) - 1 - at) for at, seconds in enumerate(ends)]
    if header := [tool.cache_control.seconds for tool in body.tools or () if tool.cache_control]:
        keeps.append(Keep("header", max(header)))
    return tuple(keeps)


def _part_seconds(part: shapes.TextPart, general: float) -> float:
    if part.prompt_cache_breakpoint is not None:
        return SECONDS.get(part.prompt_cache_breakpoint.ttl or "", general or 1800.0)
    assert part.cache_control is not None
    return part.cache_control.seconds


def _chat_response(about: About, answers: Answers, body: shapes.ChatRequest) -> dict[str, Any]:
    choices, results = [], answers.results
    for index, result in enumerate(results):
        calls = shown_calls(about.service, result)
        message: dict[str, Any] = {"role": "assistant", "content": result.text}
        if calls:
            message |= {"content": said_before_calls(result.text), "tool_calls": [_call(call) for call in calls]}
        choices.append({
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else result.finish_reason,
            "logprobs": _chat_logprobs(about.service, result.logprobs) if body.logprobs else None,
            **({"token_ids": list(result.token_ids)} if body.return_token_ids else {}),
        })
    return {
        **about.head("chat.completion"),
        "choices": choices,
        **({"prompt_token_ids": answers.each[0].prompt_ids} if body.return_token_ids else {}),
        "usage": _usage(results, body),
        "keepwarm": described(results[0], answers.each[0]),
        **about.diagnosed(results[0], answers.each[0]),
    }


def _call(call: ShownCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _chat_chunks(answers: Answers, about: About, body: shapes.ChatRequest) -> AsyncGenerator[bytes, None]:
    gates = {answer.index: ToolGate() for answer in answers.each} if body.tools and body.tool_choice != "none" else {}
    usage = bool(body.stream_options and body.stream_options.include_usage)
    null = {"usage": None} if usage else {}

    def chunk(
        index: int,
        delta: Mapping[str, Any],
        finish: str | None = None,
        logprobs: Any = None,
        ids: Mapping[str, Any] = {},
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs, **ids}
        return event({**about.head("chat.completion.chunk"), "choices": [choice], **null, **more})

    for answer in answers.each:
        yield chunk(answer.index, {"role": "assistant", "content": ""})
    async for found in answers.pieces(HEARTBEAT):
        if found is None:
            yield b": still at work\n\n"
            continue
        answer, piece = found
        gate = gates.get(answer.index)
        text = gate.push(piece.text) if gate else piece.text
        logprobs = _chat_logprobs(about.service, [piece.logprob]) if piece.logprob else None
        ids = {"token_ids": [piece.token_id]} if body.return_token_ids else {}
        if text or logprobs or ids:
            begins = ids and piece.index == answer.index == 0
            prompt: dict[str, Any] = {"prompt_token_ids": answer.prompt_ids} if begins else {}
            yield chunk(answer.index, {"content": text}, logprobs=logprobs, ids=ids, **prompt)
    for answer in answers.each:
        result = answer.result
        assert result is not None
        calls = shown_calls(about.service, result)
        gate = gates.get(answer.index)
        if gate and not calls and (rest := gate.rest()):
            yield chunk(answer.index, {"content": rest})
        for number, call in enumerate(calls):
            yield chunk(answer.index, {"tool_calls": [{"index": number, **_call(call)}]})
        more = about.diagnosed(result, answer) if answer.index == 0 else {}
        finish = "tool_calls" if calls else result.finish_reason
        yield chunk(answer.index, {}, finish, keepwarm=described(result, answer), **more)
    if usage:
        yield event({**about.head("chat.completion.chunk"), "choices": [], "usage": _usage(answers.results, body)})
    yield event("[DONE]")


def _chat_logprobs(service: Service, found: Sequence[Any] | None) -> dict[str, Any]:
    return {"content": token_logprobs(service, found or ()), "refusal": None}
