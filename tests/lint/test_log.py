"""Logs come in many wrappings, and broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.logs import CLAUDE, anthropic, openai

from keepwarm.lint.log import read_log
from keepwarm.lint.prompt import as_sent, prompt_of
from keepwarm.lint.report import lint
from keepwarm.lint.rules import load_prices


@pytest.mark.parametrize(
    ("entry", "vendor"),
    [
        (openai("Hi"), "openai"),
        (anthropic("Hi"), "anthropic"),
        ({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": openai("Hi")}, "openai"),
        ({"custom_id": "1", "params": anthropic("Hi")}, "anthropic"),
        ({"custom_id": "1", "params": {"model": "m", "messages": []}}, "anthropic"),
        ({"request": {"body": json.dumps(openai("Hi"))}, "response": {}}, "openai"),
        ({"provider": "anthropic", "body": {"messages": [{"role": "user", "content": "Hi"}]}}, "anthropic"),
        ({"model": "gpt-5", "input": "Hi", "instructions": "Be kind."}, "openai"),
        ({"model": "house", "messages": [], "tools": [{"name": "a", "input_schema": {}}]}, "anthropic"),
        ({"model": "house", "messages": [{"role": "system", "content": "Hi"}]}, "openai"),
    ],
)
def test_wrappings_are_opened_and_vendors_told_apart(entry: Any, vendor: str) -> None:
    requests, broken = read_log(json.dumps(entry))
    assert not broken
    assert requests[0].vendor == vendor


def test_vendor_option_settles_what_does_not_tell() -> None:
    entry = json.dumps({"model": "house", "messages": [{"role": "user", "content": "Hi"}]})
    assert read_log(entry)[0][0].vendor == "openai"
    assert read_log(entry, "anthropic")[0][0].vendor == "anthropic"


def test_a_json_list_and_a_byte_order_mark_are_read() -> None:
    assert len(read_log("\ufeff" + json.dumps([openai("a"), anthropic("b")], indent=1))[0]) == 2


def test_broken_lines_are_named_and_the_rest_is_used() -> None:
    lines = ["{", "[1, 2]", "7", '{"model": "gpt-5"}', '{"messages": [1]}', "", "[" * 100_000, json.dumps(openai("a"))]
    requests, broken = read_log("\n".join(lines))
    assert [request.line for request in requests] == [8]
    assert [each.line for each in broken] == [1, 2, 3, 4, 5, 7]
    assert "not JSON" in broken[0].why
    assert "'messages'" in broken[3].why


@pytest.mark.parametrize("when", [1763700000, 1763700000000, "2025-11-21T04:40:00Z", "2025-11-21T04:40:00"])
def test_times_in_several_forms(when: Any) -> None:
    assert read_log(json.dumps({"timestamp": when, "body": openai("a")}))[0][0].at == 1763700000


def test_a_log_out_of_order_is_put_in_order() -> None:
    lines = [json.dumps({"ts": 1763700000 + second, "body": openai("a")}) for second in (9, 3, 6)]
    assert [request.line for request in read_log("\n".join(lines))[0]] == [2, 3, 1]


def test_usage_of_both_vendors() -> None:
    ours = {
        "body": openai("a"),
        "response": {"body": {"usage": {"prompt_tokens": 2000, "prompt_tokens_details": {"cached_tokens": 1024}}}},
    }
    theirs = {
        "body": anthropic("a"),
        "response": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 1500, "cache_creation_input_tokens": 90}},
    }
    first, second = read_log(json.dumps(ours) + "\n" + json.dumps(theirs))[0]
    assert first.usage is not None
    assert (first.usage.prompt, first.usage.cached) == (2000, 1024)
    assert second.usage is not None
    assert (second.usage.prompt, second.usage.cached, second.usage.written) == (1600, 1500, 90)


def test_parts_stand_in_the_vendors_order() -> None:
    body = anthropic("Hi", tools=[{"name": "look", "input_schema": {"type": "object"}}], tool_choice={"type": "auto"})
    kinds = [part.kind for part in prompt_of(read_log(json.dumps(body))[0][0]).parts]
    assert kinds == ["tools", "system", "settings", "message"]
    schema = {"type": "json_schema", "json_schema": {"name": "answer"}}
    kinds = [p.kind for p in prompt_of(read_log(json.dumps(openai("Hi", response_format=schema)))[0][0]).parts]
    assert kinds == ["tools"] * 8 + ["schema", "system", "message"]


def test_pictures_are_named_by_their_hash() -> None:
    def body(data: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return anthropic("x", messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])

    parts = [prompt_of(read_log(json.dumps(body(data * 4000)))[0][0]).parts[-1] for data in ("A", "A", "B")]
    assert parts[0] == parts[1] != parts[2]
    assert len(parts[0].text) < 300
    assert 500 < parts[0].tokens < 2000


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
block = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "tool_use"])},
    optional={"text": anything, "cache_control": anything, "source": anything},
)
message = st.fixed_dictionaries({}, optional={"role": anything, "content": anything | st.lists(block, max_size=2)})
bodies = st.fixed_dictionaries(
    {"messages": st.lists(message, max_size=3)},
    optional={
        "model": anything | st.just(CLAUDE),
        "system": anything,
        "tools": anything
        | st.lists(
            st.dictionaries(st.sampled_from(["name", "function", "input_schema"]), anything, max_size=2), max_size=2
        ),
        "instructions": anything,
        "prompt_cache_key": anything,
        "cache_control": anything,
        "text": anything,
        "response_format": anything,
        "thinking": anything,
    },
)
entries = st.one_of(
    anything,
    bodies,
    st.fixed_dictionaries(
        {"body": bodies}, optional={"timestamp": anything, "usage": anything, "response": anything, "url": anything}
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(entries, max_size=4))
def test_no_log_is_too_odd(log: list[Any]) -> None:
    report = lint("\n".join(json.dumps(entry) for entry in log), load_prices())
    if not (log and isinstance(log[0], list)):  # a log that begins with a list may be one
        assert report.requests + len(report.broken) == len(log)
    as_sent(report.to_dict()).encode()  # half a surrogate pair would fail here


def test_tools_that_are_loaded_later_stand_where_they_are_named() -> None:
    def texts(*results: Any) -> list[str]:
        tools = [{"name": "find", "input_schema": {}}, {"name": "late", "input_schema": {}, "defer_loading": True}]
        said = [{"role": "user", "content": [{"type": "tool_result", "content": result}]} for result in results]
        body = anthropic("Hi", tools=tools, messages=said)
        return [part.text for part in prompt_of(read_log(json.dumps(body))[0][0]).parts]

    named = [{"type": "tool_reference", "tool_name": "late"}, {"type": "tool_reference", "tool_name": "unknown"}]
    before, after = texts("none"), texts("none", named, named, {"tool_references": named})
    assert after[: len(before)] == before
    assert ['"defer_loading":true' in text for text in after] == [False] * len(before) + [True, False, False]
