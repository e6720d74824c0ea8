"""Tools with `defer_loading`: shown where the conversation names them, and called like others from there on."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.chats import adapter
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.tokenizers import NAMES

from keepwarm.serving.protocols.anthropic import _message
from keepwarm.serving.protocols.deferred import DeferredTools
from keepwarm.serving.schemas.anthropic import MessagesRequest

SCHEMA = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
SEARCH = {"name": "find_tools", "description": "Finds tools. " * 30, "input_schema": {"type": "object"}}
TIMETABLE = {"name": "timetable", "description": "Trains of a day", "input_schema": SCHEMA, "defer_loading": True}
OTHER = TIMETABLE | {"name": "fares", "description": "What a ticket costs"}
TOOLS = [OTHER, SEARCH, TIMETABLE]
QUESTION = {"role": "user", "content": "Which trains leave on day 3? " * 10}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_01", "name": "find_tools", "input": {}}]}


def named(*names: str) -> dict[str, Any]:
    content = [{"type": "tool_reference", "tool_name": name} for name in names]
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_01", "content": content}]}


def asked(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 40, "temperature": 0, "messages": messages, "tools": TOOLS} | more


def post(server: ServerProcess, body: dict[str, Any], path: str = "/v1/messages", status: int = 200) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=DEADLINE)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def read(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["cache_read_input_tokens"])


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_definition_stands_once_where_it_is_named_first(name: str) -> None:
    turns = [QUESTION, CALL, named("timetable"), CALL, named("timetable", "find_tools")]
    shown = adapter(name)

    def prompt(count: int) -> tuple[str, list[dict[str, Any]]]:
        body = MessagesRequest.model_validate(asked(turns[:count]))
        tools = DeferredTools(body.tools or (), shown)
        chat = [each for message in body.messages for each in _message(message, tools)]
        return shown.render(chat, tools.shown, answer=False).text, tools.found

    before, none = prompt(1)
    after, found = prompt(3)
    assert not none
    assert "Trains of a day" not in before
    assert found == [TIMETABLE]
    assert after.startswith(before.rstrip()), "what stands before stays as it was"
    assert after.count("Trains of a day") == 1
    assert "What a ticket costs" not in after
    later, found = prompt(5)
    assert found == [TIMETABLE]
    assert later.count("Trains of a day") == 1
    assert "You may call timetable, find_tools, as shown above." in later
    sent = [tool for tool in TOOLS if not tool.get("defer_loading")]
    assert before == shown.render([QUESTION], sent, answer=False).text


@pytest.mark.slow
def test_a_named_tool_is_called_and_what_stands_before_it_is_reused(server: ServerProcess) -> None:
    first = post(server, asked([QUESTION], max_tokens=2))
    count = post(
        server,
        {k: v for k, v in asked([QUESTION]).items() if k not in ("max_tokens", "temperature")} | {"tools": [SEARCH]},
        "/v1/messages/count_tokens",
    )["input_tokens"]
    usage = first["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == count
    turns = [QUESTION, CALL, named("timetable")]
    for choice in ({"type": "tool", "name": "timetable"}, {"type": "any"}, {"type": "auto"}):
        body = asked(turns, tool_choice=choice)
        more = {"diagnostics": {"previous_message_id": first["id"]}}
        warm, cold = post(server, body | more), post(server, body | {"reuse": "off"})
        assert read(warm) >= count - 32, "all but the beginning of the answer that was not given"
        assert read(cold) == 0
        strip = [[{k: v for k, v in block.items() if k != "id"} for block in each["content"]] for each in (warm, cold)]
        assert strip[0] == strip[1]
        assert (warm["diagnostics"]["cache_miss_reason"] or {}).get("type") != "tools_changed"
        if choice["type"] == "tool":
            (call,) = warm["content"]
            assert call["name"] == "timetable"
            assert isinstance(call["input"]["day"], int)


def test_what_another_service_found_is_shown_where_it_stood(server: ServerProcess) -> None:
    use = {"type": "server_tool_use", "id": "srv_1", "name": "tool_search_tool_bm25", "input": {"query": "trains"}}
    listed = {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": "timetable"}],
    }
    failed = {"type": "tool_search_tool_result_error", "error_code": "unavailable"}
    said = {"type": "text", "text": "I have it."}
    for content, shown in ((listed, '"timetable"'), (failed, "Error: unavailable")):
        result = {"type": "tool_search_tool_result", "tool_use_id": "srv_1", "content": content}
        turns = [QUESTION, {"role": "assistant", "content": [use, result, said]}, QUESTION]
        body = MessagesRequest.model_validate(asked(turns))
        chat = [
            each for one in body.messages for each in _message(one, DeferredTools(body.tools or (), adapter(NAMES[0])))
        ]
        assert [each["role"] for each in chat] == ["user", "assistant", "tool", "assistant", "user"]
        assert shown in chat[2]["content"]
    post(server, asked(turns, max_tokens=1))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"messages": [QUESTION, CALL, named("unknown")]}, "tool reference 'unknown' has no corresponding tool"),
        ({"tools": [TIMETABLE]}, "all tools have defer_loading"),
        ({"tools": [SEARCH, TIMETABLE | {"cache_control": {"type": "ephemeral"}}]}, "no cache_control"),
        ({"tools": [SEARCH, TIMETABLE, TIMETABLE]}, "both called 'timetable'"),
        ({"tools": [SEARCH, TIMETABLE | {"input_schema": {"type": "array"}}]}, "'object'"),
        ({"tool_choice": {"type": "tool", "name": "timetable"}}, "names 'timetable'"),
        (
            {"tools": [{"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}, TIMETABLE]},
            "does not search for tools itself",
        ),
    ],
)
def test_what_is_refused_says_why(server: ServerProcess, change: dict[str, Any], told: str) -> None:
    answer = post(server, asked([QUESTION]) | change, status=400)
    assert told in answer["error"]["message"], json.dumps(answer)
