"""Anthropic's protocol: messages, and counting their tokens."""

from __future__ import annotations

import functools
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from keepwarm.core.results import Generation
from keepwarm.models.spelling import plain_text
from keepwarm.serving.answers import UNSTORED, Answer, Answers, written_tokens
from keepwarm.serving.events import HEARTBEAT, EventStream, disconnected, event
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
)
from keepwarm.serving.protocols.bodies import BodyRoute, apart
from keepwarm.serving.protocols.deferred import DeferredTools
from keepwarm.serving.protocols.errors import ApiError, Protocol, in_stream
from keepwarm.serving.protocols.history import Fingerprint, anthropic_diagnosis
from keepwarm.serving.protocols.reasoning import template_args
from keepwarm.serving.protocols.retention import Keep, declared_by
from keepwarm.serving.protocols.system import BILLING, check_places, system_blocks
from keepwarm.serving.schemas import anthropic as shapes
from keepwarm.serving.schemas.common import CacheControl
from keepwarm.serving.service import Asked, Service
from keepwarm.serving.tenancy.access import Calling, ServiceOf, SessionId, noted, serving
from keepwarm.serving.tenancy.tenants import Caller
from keepwarm.serving.toolgate import ToolGate

router = APIRouter(
    prefix="/v1/messages", tags=["Anthropic"], route_class=BodyRoute, responses=errors_as(shapes.ErrorResponse)
)

_OWN = ("text", "document", "tool_use", "server_tool_use")  # blocks whose breakpoints are their message's
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.post("", response_model=shapes.MessageShown, responses=_STREAMED)
async def messages(
    body: shapes.MessagesRequest, request: Request, service: ServiceOf, caller: Calling, session: SessionId = None
) -> Response:
    """Answer a conversation, streamed or whole."""
    service = await serving(request, body.model)
    noted(request, model=body.model, user=body.metadata.user_id if body.metadata else None)

    def asked() -> tuple[dict[str, Any], Asked, _About]:
        prompt, left_out = _prompt(body, service)
        if BILLING in left_out:
            service.metrics.billing_headers.inc()
        arguments = prompt | sampling(body, service.sampling)
        arguments["max_new_tokens"] = new_tokens(body.max_tokens, service.config.limits)
        if body.stop_sequences:
            arguments["stop"] = body.stop_sequences
        arguments |= service.adapted(body.model)
        keep = _kept(body, arguments["messages"])
        wanted = Asked(None, arguments, body.cache_salt, session, keep=keep, left_out=left_out)
        return arguments, wanted, _About(body, arguments, service, caller, keep)

    arguments, wanted, about = await apart(request, asked)
    gone = functools.partial(disconnected, request.receive)
    answers = await service.ask(caller, [wanted], Protocol.ANTHROPIC, gone)
    if body.stream:
        await answers.begin(HEARTBEAT)
        return EventStream(_events(request, answers, about))
    (result,) = await single(request, answers)
    log_generation(request, service, arguments, [result])
    return JSONResponse(about.message(result, answers.each[0]))


@router.post("/count_tokens", response_model=shapes.CountResponse)
async def count_tokens(
    body: shapes.CountRequest, request: Request, service: ServiceOf, caller: Calling
) -> dict[str, Any]:
    """Count the tokens of a prompt, even if the context window holds fewer. This computes and stores nothing."""
    service = await serving(request, body.model)

    def work() -> int:
        asked, _ = service.rewritten(Asked(None, _prompt(body, service)[0]))
        return service.engine.count_tokens(**asked.arguments)

    with service.tenants.entered(caller):
        count = await service.prepared(caller, work, functools.partial(disconnected, request.receive))
    return {"input_tokens": count}


# ---- the request ----


def _prompt(body: shapes.CountRequest, service: Service) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return messages and tools as the engine takes them, and the names of what is left out. Raises ApiError for what
    does not fit together."""
    if body.messages[-1].role == "assistant":
        raise ApiError(
            "invalid_request",
            "the last message is the assistant's: to continue an answer is not supported; end with the user's",
            param="messages",
        )
    if not service.config.server.mid_chat_system:
        check_places(body.messages)
    chat: list[dict[str, Any]] = []
    blocks, billed = system_blocks(body.system)
    if blocks:
        chat.append({"role": "system", "content": "\n\n".join(block.text for block in blocks)})
    adapter = service.engine.pipeline.adapter
    tools = DeferredTools(body.tools or (), adapter)
    last = len(body.messages) - 1
    for index, message in enumerate(body.messages):
        chat += _message(message, tools, body.cache_control if index == last else None)
    arguments: dict[str, Any] = {"messages": chat}
    if body.tools:
        arguments["tools"] = tools.shown
        if tools.found:
            arguments["found_tools"] = tools.found
        if getattr(body.tool_choice, "disable_parallel_tool_use", None):
            arguments["parallel_tool_calls"] = False
        match body.tool_choice:
            case shapes.AnyChoice():
                arguments["tool_choice"] = "required"
            case shapes.NamedChoice():
                arguments["tool_choice"] = {"name": body.tool_choice.name}
            case shapes.NoChoice():
                arguments["tool_choice"] = "none"
            case _:
                if any(tool.get("strict") for tool in (*tools.shown, *tools.found)):
                    arguments["tool_choice"] = "auto"
    elif body.tool_choice is not None and body.tool_choice.type != "none":
        raise ApiError("invalid_request", "tool_choice needs tools", param="tool_choice")
    if body.output_config is not None and body.output_config.format is not None:
        arguments["response_schema"] = body.output_config.format.json_schema
    found, left_out = template_args(
        adapter,
        effort=body.output_config.effort if body.output_config else None,
        thinks=body.thinking.thinks if body.thinking else None,
    )
    if found:
        arguments["template_args"] = found
    return arguments, (*((BILLING,) if billed else ()), *left_out)


def _message(message: Any, tools: DeferredTools, last: CacheControl | None = None) -> list[dict[str, Any]]:
    """Turn one of Anthropic's messages into the engine's: each tool result becomes a message. `last` ends the last."""
    if isinstance(message.content, str):
        return [_ended({"role": message.role, "content": message.content}, [last])]
    found: list[dict[str, Any]] = []
    begin = 0
    for at, block in enumerate(message.content):
        if block.type == "tool_search_tool_result":  # it stands in the middle of an answer
            found += _turns(message.role, message.content[begin:at], tools)
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _searched(block, tools)}
            found.append(_ended(result, _controls(block)))
            begin = at + 1
    if begin < len(message.content) or not found:
        found += _turns(message.role, message.content[begin:], tools)
    return [*found[:-1], _ended(found[-1], [last])]


def _turns(role: str, blocks: Sequence[Any], tools: DeferredTools) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if block.type == "text":
            texts.append({"type": "text", "text": block.text})
        elif block.type == "document":
            title = f"{block.title}\n\n" if block.title else ""
            texts.append({"type": "text", "text": f"{title}{block.source.data}\n\n"})
        elif block.type in ("tool_use", "server_tool_use"):
            function = {"name": block.name, "arguments": plain_text(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, tools)}
            found.append(_ended(result, _controls(block)))
    if texts or role == "assistant":
        found.append({"role": role, "content": texts or ""})
    if calls:
        found[-1]["tool_calls"] = calls
    own = [block.cache_control for block in blocks if block.type in _OWN]
    return [*found[:-1], _ended(found[-1], own)]


def _ended(message: dict[str, Any], controls: Sequence[CacheControl | None]) -> dict[str, Any]:
    """Return a message with a breakpoint at its end, for the longest time that it or one of `controls` asks for."""
    asked = [control for control in controls if control is not None]
    if "cache_control" in message:
        asked.append(CacheControl(**message["cache_control"]))
    if not asked:
        return message
    longest = max(asked, key=lambda control: control.seconds)
    return message | {"cache_control": longest.model_dump(exclude_none=True)}


def _result(block: shapes.ToolResultBlock, tools: DeferredTools) -> str:
    """Return a tool's result as text. The text says if it failed, since templates have no field for that."""
    content = block.content
    text = content if isinstance(content, str) else tools.text(content or ())
    return f"Error: {text}" if block.is_error else text


def _searched(block: shapes.ToolSearchResult, tools: DeferredTools) -> str:
    """Return what a search for tools found, as a tool's result."""
    if isinstance(block.content, shapes.SearchFailed):
        return f"Error: {block.content.error_message or block.content.error_code}"
    return tools.text(block.content.tool_references)


def _controls(block: Any) -> list[CacheControl]:
    """Return what a block and the parts in it declare."""
    inner = getattr(block, "content", None)
    parts = [block, *(inner if isinstance(inner, list) else ())]
    return [part.cache_control for part in parts if part.cache_control is not None]


def _kept(body: shapes.MessagesRequest, messages: Sequence[Mapping[str, Any]]) -> tuple[Keep, ...]:
    """Return the declared breakpoints. `messages` are the request's, as the engine takes them."""
    header = [tool.cache_control for tool in body.tools or () if tool.cache_control]
    header += [block.cache_control for block in system_blocks(body.system)[0] if block.cache_control]
    ends = [CacheControl(**controls[0]).seconds for message in messages if (controls := declared_by(message))]
    keeps = [Keep("message", seconds, len(ends) - 1 - at) for at, seconds in enumerate(ends)]
    return (*keeps, *([Keep("header", max(control.seconds for control in header))] if header else ()))


# ---- the answer ----


def _call(call: ShownCall, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


class _About:
    """All that an answer says besides its text."""

    def __init__(
        self,
        body: shapes.MessagesRequest,
        arguments: Mapping[str, Any],
        service: Service,
        caller: Caller,
        keep: tuple[Keep, ...],
    ) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self.body, self.arguments, self.service = body, arguments, service
        self._caller = caller
        self._hour = bool(keep) and all(one.seconds > 300 for one in keep)
        others = {"tool_choice": arguments.get("tool_choice"), "format": arguments.get("response_schema")}
        self._mark = Fingerprint.of(body.model, arguments, others)

    def usage(self, prompt: int, cached: int, written: int, output: int) -> dict[str, Any]:
        hour = written if self._hour else 0
        return {
            "input_tokens": prompt - cached - written,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": written,
            "cache_creation": {"ephemeral_5m_input_tokens": written - hour, "ephemeral_1h_input_tokens": hour},
            "output_tokens": output,
        }

    def used(self, result: Generation) -> dict[str, Any]:
        written = written_tokens(result)
        return self.usage(result.prompt_tokens, result.cached_tokens, written, len(result.token_ids))

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.body.model}

    def message(self, result: Generation, answer: Answer) -> dict[str, Any]:
        calls = shown_calls(self.service, result)
        text = (said_before_calls(result.text) or "") if calls else result.text
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
        content += [_call(call, call.value) for call in calls]
        return {
            **self.head(),
            "content": content,
            **self.stop(result, calls),
            "usage": self.used(result),
            "diagnostics": self.diagnosed(result, answer),
            "keepwarm": described(result, answer),
        }

    def stop(self, result: Generation, calls: Sequence[ShownCall]) -> dict[str, Any]:
        if calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if result.finish_reason != "stop":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        engine = self.service.running
        if (
            not self.body.stop_sequences
            or result.token_ids[-1] in engine.pipeline.model.stop_tokens | engine.pipeline.adapter.stop_tokens
        ):
            return {"stop_reason": "end_turn", "stop_sequence": None}
        whole = engine.pipeline.tokenizer.decode(list(result.token_ids), skip_special_tokens=True)
        places = [(whole.find(text), text) for text in self.body.stop_sequences if text in whole]
        if not places:  # a grammar ended it
            return {"stop_reason": "end_turn", "stop_sequence": None}
        return {"stop_reason": "stop_sequence", "stop_sequence": min(places)[1]}

    def diagnosed(self, result: Generation, answer: Answer) -> dict[str, Any] | None:
        """Remember this answer for later ones. Say why an earlier one's prompt was not reused, if asked."""
        history, asked = self.service.history, self.body.diagnostics
        earlier = history.get(self._caller, asked.previous_message_id) if asked and asked.previous_message_id else None
        mark = self._mark.of_shown(answer.shown)
        history.put(self._caller, self.id, mark.with_result(result))
        if asked is None:
            return None
        reason = anthropic_diagnosis(earlier, mark, result) if asked.previous_message_id else None
        return {"cache_miss_reason": reason}


async def _events(request: Request, answers: Answers, about: _About) -> AsyncGenerator[bytes, None]:
    named = functools.partial(_named, about)
    try:
        async for chunk in _blocks(answers, about, named):
            yield chunk
        log_generation(request, about.service, about.arguments, answers.results)
    except Exception as error:
        body = in_stream(error, Protocol.ANTHROPIC, request.scope["state"]["request_id"])
        yield event(body, "error")
    finally:
        answers.close()


def _named(about: _About, kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


async def _blocks(answers: Answers, about: _About, named: Any) -> AsyncGenerator[bytes, None]:
    answer = answers.each[0]
    gate = ToolGate() if about.body.tools and about.arguments.get("tool_choice") != "none" else None
    begun = open_text = False
    index = 0
    async for found in answers.pieces(HEARTBEAT):
        if found is None:
            yield named("ping") if begun else b": still at work\n\n"
            continue
        if not begun:
            begun = True
            plan = answer.plan
            stored = plan.cached_tokens if plan.miss_reason in UNSTORED else plan.last_cut
            written = max(0, stored - plan.cached_tokens)
            usage = about.usage(plan.length, plan.cached_tokens, written, 1)
            start = {**about.head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield named("message_start", message=start)
            yield named("ping")
        text = gate.push(found[1].text) if gate else found[1].text
        if text and not open_text:
            open_text = True
            yield named("content_block_start", index=index, content_block={"type": "text", "text": ""})
        if text:
            yield named("content_block_delta", index=index, delta={"type": "text_delta", "text": text})
    result = answer.result
    assert result is not None
    calls = shown_calls(about.service, result)
    rest = gate.rest() if gate and not calls else ""
    if not open_text and (rest or not calls):
        open_text = True
        yield named("content_block_start", index=index, content_block={"type": "text", "text": ""})
    if rest:
        yield named("content_block_delta", index=index, delta={"type": "text_delta", "text": rest})
    if open_text:
        yield named("content_block_stop", index=index)
        index += 1
    for call in calls:
        yield named("content_block_start", index=index, content_block=_call(call, {}))
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield named("content_block_delta", index=index, delta=delta)
        yield named("content_block_stop", index=index)
        index += 1
    more = {"keepwarm": described(result, answer), "diagnostics": about.diagnosed(result, answer)}
    yield named("message_delta", delta=about.stop(result, calls), usage=about.used(result), **more)
    yield named("message_stop")
