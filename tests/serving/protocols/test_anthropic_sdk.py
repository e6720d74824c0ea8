"""Anthropic's own SDK against a real server with the embedded model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from tests.helpers.chats import adapter
from tests.helpers.processes import DEADLINE, ServerProcess

from keepwarm.serving.protocols.anthropic import _kept, _message
from keepwarm.serving.protocols.deferred import DeferredTools
from keepwarm.serving.protocols.retention import placed
from keepwarm.serving.schemas.anthropic import MessagesRequest

SYSTEM = [{"type": "text", "text": "You know trains. " * 20, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 6,
    "extra_body": {"temperature": 0},
    "system": SYSTEM,
    "messages": [{"role": "user", "content": "Is the train late?"}],
}
NO_TOOLS = DeferredTools((), adapter("smollm2"))
TOOL = {"name": "timetable", "description": "Trains of a day", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", timeout=DEADLINE, max_retries=0) as client:
        yield client


def test_a_message_and_its_usage(client: Any) -> None:
    client.messages.create(**ASKED)
    again = client.messages.create(**ASKED)
    assert again.content[0].type == "text"
    assert again.stop_reason in ("end_turn", "max_tokens")
    usage = again.usage
    assert usage.cache_read_input_tokens > 50
    counted = client.messages.count_tokens(**{name: ASKED[name] for name in ("model", "system", "messages")})
    assert (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted.input_tokens
    )
    assert usage.cache_creation.ephemeral_5m_input_tokens == 0


def test_a_stream_says_the_same(client: Any) -> None:
    whole = client.messages.create(**ASKED)
    with client.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_a_stream_begins_with_the_usage_with_which_it_ends(client: Any) -> None:
    new = {"messages": [{"role": "user", "content": "Which train is never late, and why is it? " * 9}]}
    with client.messages.stream(**ASKED | new) as stream:
        begun = next(event.message.usage for event in stream if event.type == "message_start")
        final = stream.get_final_message().usage
    assert begun.cache_creation_input_tokens > 50
    for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert getattr(begun, name) == getattr(final, name)


def test_blocks_tools_and_results(client: Any) -> None:
    use = {"type": "tool_use", "id": "toolu_01", "name": "timetable", "input": {"day": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_01", "content": [{"type": "text", "text": "none today"}]}
    page = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "Rules."},
        "title": "House",
    }
    messages = [
        {"role": "user", "content": [page, {"type": "text", "text": "Trains?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}]},
    ]
    answer = client.messages.create(**ASKED | {"messages": messages, "tools": [TOOL]})
    assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")
    assert answer.usage.output_tokens > 0


def test_a_result_with_a_breakpoint_of_its_own_stays_text() -> None:
    part = {"type": "text", "text": "42", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_01", "content": [part]}
    message = MessagesRequest.model_validate({
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": [result]}],
    }).messages[0]
    (found,) = _message(message, NO_TOOLS)
    assert (found["content"], found["cache_control"]) == ("42", {"type": "ephemeral"})


def test_every_breakpoint_keeps_its_own_time() -> None:
    """A `tool_use` without text, a result, a message that ends twice: each is one cut of the prompt."""

    def control(ttl: str) -> dict[str, Any]:
        return {"cache_control": {"type": "ephemeral", "ttl": ttl}}

    use = {"type": "tool_use", "id": "t1", "name": "timetable", "input": {}} | control("1h")
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "None."} | control("5m")
    asked = {"role": "user", "content": [{"type": "text", "text": "Trains?"} | control("5m")]}
    turns = [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": turns} | control("1h"))
    messages = [
        each
        for n, message in enumerate(body.messages)
        for each in _message(message, NO_TOOLS, body.cache_control if n == 2 else None)
    ]
    assert [message["cache_control"]["ttl"] for message in messages] == ["5m", "1h", "1h"]
    kept = placed(_kept(body, messages), messages, session=False)
    assert [(keep.where, keep.seconds, keep.from_end) for keep in kept] == [
        ("message", 300.0, 2),
        ("message", 3600.0, 1),
        ("message", 3600.0, 0),
    ]


def test_more_tokens_than_the_window_holds_are_counted(client: Any) -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": "word " * 9000}]}
    assert client.messages.count_tokens(**asked).input_tokens > 9000
    with pytest.raises(anthropic.BadRequestError, match="context window"):
        client.messages.create(**asked, max_tokens=1)


def test_a_breakpoint_that_moves_on_changes_no_message(client: Any) -> None:
    said = {"type": "text", "text": "Is the train very late? " * 20}
    first = client.messages.create(
        **ASKED | {"messages": [{"role": "user", "content": [said | {"cache_control": {"type": "ephemeral"}}]}]}
    )
    turns = [{"role": "user", "content": said["text"]}, {"role": "assistant", "content": "Yes."}, ASKED["messages"][0]]
    later = client.messages.create(**ASKED | {"messages": turns}, diagnostics={"previous_message_id": first.id})
    reason = later.diagnostics.cache_miss_reason
    assert reason is None or reason.type == "unavailable"


def test_a_forced_call_is_valid_whole_and_streamed(client: Any) -> None:
    schema = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
    asked = ASKED | {"tools": [TOOL | {"input_schema": schema}], "tool_choice": {"type": "any"}, "max_tokens": 60}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    use = whole.content[-1]
    assert (use.type, use.name) == ("tool_use", "timetable")
    assert isinstance(use.input["day"], int)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == use.input
    assert final.stop_reason == "tool_use"


def test_stop_sequences_are_named(client: Any) -> None:
    text = client.messages.create(**ASKED).content[0].text
    letter = text.strip()[2]
    cut = client.messages.create(**ASKED, stop_sequences=["\u2603", letter])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", letter)
    assert cut.content[0].text == text[: text.index(letter)]


def test_what_is_wrong_is_told_as_anthropic_does(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**ASKED | {"model": "claude-x"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    five = [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 4}]
    image = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}
    for more, said in (
        ({"messages": five}, "at most 4"),
        ({"messages": [{"role": "user", "content": [image]}]}, "fetches no URL"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": "It"}]}, "last message"),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}}, "clear_thinking"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tools"),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**ASKED | more)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert said in caught.value.body["error"]["message"], more


@pytest.mark.slow
def test_why_it_missed(client: Any) -> None:
    first = client.messages.create(**ASKED, diagnostics={"previous_message_id": None})
    assert first.diagnostics.cache_miss_reason is None
    same = client.messages.create(**ASKED, diagnostics={"previous_message_id": first.id})
    assert same.diagnostics.cache_miss_reason is None
    reasons = {}
    for name, more in (
        ("system_changed", {"system": "You know ships. " * 20}),
        ("tools_changed", {"tools": [TOOL]}),
        ("messages_changed", {"messages": [{"role": "user", "content": "Is the ship late?"}]}),
    ):
        answer = client.messages.create(**ASKED | more, diagnostics={"previous_message_id": first.id})
        reasons[name] = answer.diagnostics.cache_miss_reason.type
    assert all(name == reason for name, reason in reasons.items()), reasons
    lost = client.messages.create(**ASKED, diagnostics={"previous_message_id": "msg_0"})
    assert lost.diagnostics.cache_miss_reason.type == "previous_message_not_found"


@pytest.mark.slow
def test_many_at_once_answer_as_one_alone(server: ServerProcess) -> None:
    async def ask(client: Any, number: int) -> str:
        asked = ASKED | {"messages": [{"role": "user", "content": f"Train number {number}?"}]}
        if number % 2:
            async with client.messages.stream(**asked) as stream:
                return "".join([text async for text in stream.text_stream])
        return str((await client.messages.create(**asked)).content[0].text)

    async def both() -> tuple[list[str], list[str]]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", timeout=DEADLINE) as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(6)))
            return list(together), [await ask(client, number) for number in range(6)]

    together, alone = asyncio.run(both())
    assert together == alone


def test_tools_are_shown_as_they_are_sent(client: Any, server: ServerProcess) -> None:
    """The order of keys reaches the prompt through every layer: what one request stores, only its like finds."""
    properties = {"reasoning": {"type": "string"}, "answer": {"type": ["string", "null"], "default": None}}
    schema = {"type": "object", "properties": properties, "required": ["reasoning", "answer"]}
    tool = {"name": "fill", "input_schema": schema, "description": "Fills in a form. " * 30}
    turned = json.loads(json.dumps(tool, sort_keys=True))
    system = {"role": "system", "content": "You fill in all forms."}
    said = [{"role": "user", "content": "Fill it in."}]
    client.messages.create(**ASKED | {"messages": said, "system": system["content"], "tools": [tool]})

    def reused(tools: list[Any]) -> int:
        prompt = {"messages": [system, {"role": "user", "content": "Fill it in."}], "tools": tools}
        told = httpx.post(f"{server.url}/v1/cache/explain", json=prompt, timeout=DEADLINE)
        return int(told.json()["cached_tokens"])

    assert reused([tool]) > 100
    assert reused([turned]) < reused([tool]), "up to where the order differs"
