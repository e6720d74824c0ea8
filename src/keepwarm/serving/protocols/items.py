"""Items of OpenAI's Responses protocol, and their conversion to the engine's messages and tools."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from keepwarm.serving.generation import ShownCall
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.schemas import responses as shapes

_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def new_id(kind: str) -> str:
    return _PREFIXES[kind] + secrets.token_hex(12)


# ---- what came in ----


def taken(body: shapes.ResponsesRequest) -> list[dict[str, Any]]:
    """Return the request's own items in the form in which they are kept, each with an id."""
    said = body.input
    return [
        _kept(item) for item in ([shapes.MessageItem(role="user", content=said)] if isinstance(said, str) else said)
    ]


def _kept(item: Any) -> dict[str, Any]:
    found: dict[str, Any] = item.model_dump(exclude_none=True)
    if isinstance(found.get("content"), str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": found["content"]}]
    if item.type == "message":
        found.setdefault("status", "completed")
    return {**found, "id": item.id or new_id(item.type)}


def messages_of(items: Sequence[dict[str, Any]], instructions: str | None, *, reasoning: bool) -> list[dict[str, Any]]:
    """Return a conversation as the engine takes it. `reasoning` says whether the model's template shows earlier
    reasoning.

    The parts of one answer (reasoning, text, calls) become one message. System messages at the beginning become one,
    since many templates accept only one. Raises ApiError for the result of a call that is not there.
    """
    chat: list[dict[str, Any]] = []
    if instructions:
        chat.append({"role": "system", "content": instructions})
    thoughts = ""
    called: set[str] = set()
    for number, item in enumerate(items):
        match item["type"]:
            case "reasoning":
                thoughts += "".join(part["text"] for part in item.get("content") or ())
                continue
            case "function_call":
                called.add(item["call_id"])
                _add_call(chat, item)
            case "function_call_output":
                if item["call_id"] not in called:
                    raise ApiError(
                        "invalid_request",
                        f"input[{number}] is the result of the call {item['call_id']!r}, and no function_call before "
                        "it has this call_id: send the call too, or previous_response_id",
                        param="input",
                    )
                chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
            case _:
                _add_message(chat, item)
        if thoughts and reasoning and chat[-1]["role"] == "assistant":
            chat[-1]["reasoning_content"] = chat[-1].get("reasoning_content", "") + thoughts
        thoughts = ""
    return chat


def _add_message(chat: list[dict[str, Any]], item: dict[str, Any]) -> None:
    role = "system" if item["role"] == "developer" else item["role"]
    text = _text(item["content"])
    if role == "system" and chat and all(message["role"] == "system" for message in chat):
        chat[-1]["content"] += f"\n\n{text}"
    else:
        chat.append({"role": role, "content": text})


def _add_call(chat: list[dict[str, Any]], item: dict[str, Any]) -> None:
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": item["arguments"]}
    chat[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _text(content: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def tool_arguments(body: shapes.ResponsesRequest) -> dict[str, Any]:
    """Return the arguments of `Engine.generate` that concern tools. Raises ApiError for what does not fit together."""
    functions = [tool for tool in body.tools or () if isinstance(tool, shapes.FunctionTool)]
    if not functions:
        if isinstance(body.tool_choice, shapes.NamedChoice) or body.tool_choice == "required":
            raise ApiError(
                "invalid_request", "tool_choice needs tools, and none of type 'function' is there", param="tool_choice"
            )
        return {}
    arguments: dict[str, Any] = {"tools": [tool.shown for tool in functions]}
    if body.parallel_tool_calls is False:
        arguments["parallel_tool_calls"] = False
    match body.tool_choice:
        case shapes.NamedChoice():
            arguments["tool_choice"] = {"name": body.tool_choice.name}
        case None | "auto":
            if any(tool.strict for tool in functions):  # otherwise a call may be wrong, so none needs a grammar
                arguments["tool_choice"] = "auto"
        case choice:
            arguments["tool_choice"] = choice
    return arguments


def left_out(body: shapes.ResponsesRequest, items: Sequence[dict[str, Any]], *, reasoning: bool) -> list[str]:
    """Return the parts of a request that have no effect. They are accepted because clients always send them."""
    found = []
    for number, tool in enumerate(body.tools or ()):
        if isinstance(tool, shapes.OtherTool):
            found.append(f"tools[{number}] ({tool.type}{f' {tool.name}' if tool.name else ''})")
    if body.reasoning is not None:
        found += [f"reasoning.{name}" for name in body.reasoning.model_dump(exclude_none=True, exclude={"effort"})]
    shown = [item for item in items if item["type"] == "reasoning" and reasoning and item.get("content")]
    if len(shown) < sum(item["type"] == "reasoning" for item in items):
        found.append("input (reasoning)")
    return found


# ---- what goes out ----


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(number: str, status: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"id": number, "type": "message", "status": status, "role": "assistant", "content": list(content)}


def call_items(calls: Sequence[ShownCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": new_id("function_call"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in calls
    ]
