"""What a body may hold: counted without parsing it, in every protocol, before anything is rendered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepwarm.serving.protocols.bodies import MAX_DEPTH, _structure, check_counts, read
from keepwarm.serving.protocols.errors import ApiError
from keepwarm.serving.schemas.native import QueryRequest
from keepwarm.serving.schemas.openai import CompletionRequest
from keepwarm.serving.settings import LimitsSection

LIMITS = LimitsSection(max_messages=20, max_tools=10, max_documents=5, max_values=300)
KEYS = st.text(alphabet='b"\\]:', max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\,[{', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
CACHED = {"type": "ephemeral"}


def counted(value: Any) -> tuple[int, int]:
    """All values of a JSON value, and how deep they lie."""
    if not isinstance(value, dict | list):
        return 1, 0
    inside = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(count for count, _ in inside), 1 + max((depth for _, depth in inside), default=0)


@given(value=VALUES, indent=st.sampled_from([None, 1]))
def test_values_and_depth_are_counted_without_parsing(value: Any, indent: int | None) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
        found, depth = _structure(text)
        assert _structure(text, piece=5) == (found, depth)
        count, deep = counted(value)
        assert depth == deep
        assert count <= found <= 2 * count  # an empty list counts for the value that it could hold


def refused(kind: str, body: Any, match: str) -> None:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError, match=match) as caught:
        read(text, QueryRequest, LIMITS)
    assert caught.value.kind == kind


def user(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def part(**more: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x", **more}


def test_everything_countable_is_counted() -> None:
    check_counts({"messages": [user()] * 20, "tools": [{}] * 10, "documents": [""] * 5}, LIMITS)
    result = {"type": "tool_result", "tool_use_id": "1", "content": [part()] * 7}
    for body in (
        {"messages": [user()] * 21},
        {"messages": [user([part()] * 21)]},
        {"messages": [user([result] * 3)]},
        {"messages": [user([{"type": "tool_result", "tool_use_id": "1", "content": "x"}] * 11)] * 2},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 20}]},
        {"tools": [{}] * 11},
        {"documents": [""] * 6},
    ):
        with pytest.raises(ApiError) as caught:
            check_counts(body, LIMITS)
        assert caught.value.kind == "too_large"


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"name": f"t{n}", "cache_control": CACHED} for n in range(5)]},
        {"tools": [{"type": "function", "function": {"name": f"t{n}", "cache_control": CACHED}} for n in range(5)]},
        {"messages": [user(cache_control=CACHED)] * 5},
        {"messages": [user([part(cache_control=CACHED)])] * 5},
        {"messages": [user([part(prompt_cache_breakpoint={"mode": "explicit"})])] * 5},
        {"messages": [user([{"type": "tool_result", "content": [part(cache_control=CACHED)]}])] * 5},
        {"system": [part(cache_control=CACHED)] * 3, "cache_control": CACHED, "tools": [{"cache_control": CACHED}]},
    ],
)
def test_every_declared_breakpoint_counts(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="at most 4 blocks may have cache_control, and 5 have"):
        check_counts(body, LIMITS)


def test_bodies_of_too_many_values_are_never_parsed() -> None:
    refused("too_large", b'{"messages": [' + b"[]," * 200_000, "more than 300 values")
    refused("too_large", {"query": "x", "response_schema": {"enum": list(range(400))}}, "more than 300 values")
    refused("invalid_request", b"[" * 500_000, f"more than {MAX_DEPTH} levels")
    assert isinstance(read(json.dumps({"query": ",[{" * 500}).encode(), QueryRequest, LIMITS), QueryRequest)
    call = {"function": {"name": "f", "arguments": json.dumps({"a": [[]] * 400})}}
    refused("too_large", {"messages": [{"role": "assistant", "tool_calls": [call]}]}, "a call's arguments")


def test_half_a_surrogate_pair_anywhere_is_a_bad_request() -> None:
    half = "\ud800"
    schema = {"type": "object", "properties": {half: {"type": "string"}}}
    for body in (
        {"query": half},
        {"query": "x", "response_schema": schema},
        {"messages": [{half: 1}]},
        {"cache_salt": half},
    ):
        refused("invalid_request", body, "half a surrogate pair")
    assert read(json.dumps({"query": "\U0001f600"}).encode(), QueryRequest, LIMITS).query == "\U0001f600"  # type: ignore[attr-defined]


def test_stops_are_bounded_in_the_native_protocol_too() -> None:
    refused("invalid_request", {"query": "x", "stop": ["a"] * 17}, "stop")
    refused("invalid_request", {"query": "x", "stop": "a" * 1001}, "stop")


def test_a_message_does_not_repeat_what_was_sent() -> None:
    assert len(ApiError("invalid_request", "x" * 100_000).message) < 2100


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "there"], [1, 2], [[1], [2, 3]]])
def test_every_shape_of_a_completions_prompt_is_read(prompt: Any) -> None:
    found = read(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionRequest, LimitsSection())
    assert isinstance(found, CompletionRequest)
    assert found.prompt == prompt


@pytest.mark.parametrize(
    ("prompt", "where"),
    [(7, "prompt"), ([], "prompt"), (["a", 1], "prompt.1"), ([1, "a"], "prompt.1"), ([[1], ["a"]], "prompt.1.0")],
)
def test_a_wrong_one_is_told_by_its_first_fault(prompt: Any, where: str) -> None:
    with pytest.raises(ApiError) as told:
        read(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionRequest, LimitsSection())
    assert told.value.param == where
    assert told.value.message.count("prompt") == 1
