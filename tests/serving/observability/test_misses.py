"""Why a prompt missed is said once, when its plan is made, and alike wherever one looks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.processes import DEADLINE, ServerProcess

SYSTEM = "You keep the harbour's log. " + " ".join(f"Pier {i} is open." for i in range(30))
QUESTION = {"role": "user", "content": "Where do we moor?"}
PHASES = {"compile", "constrain", "queue", "link", "load", "prefill", "decode"}


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=DEADLINE) as client:
        yield client


def explained(http: httpx.Client, messages: list[dict[str, Any]], **headers: str) -> dict[str, Any]:
    told: dict[str, Any] = http.post("/v1/cache/explain", json={"messages": messages}, headers=headers).json()
    return told


def until_stored(http: httpx.Client, system: str) -> None:
    """An answer's KV is stored after the answer: then it is the nearest to what differs at its end alone."""
    until = time.monotonic() + DEADLINE
    while new(explained(http, chat(f"{system} Ahoy"))["miss"]) != ["Ahoy"]:
        assert time.monotonic() < until
        time.sleep(0.02)


def steady(http: httpx.Client, talk: list[dict[str, Any]], **headers: str) -> dict[str, Any]:
    """The explanation when nothing is on its way to the store any more."""
    before: dict[str, Any] = {}
    told = explained(http, talk, **headers)
    while before != told:
        time.sleep(0.1)
        before, told = told, explained(http, talk, **headers)
    return told


def untimed(miss: dict[str, Any] | None) -> dict[str, Any] | None:
    """All but the time that computing takes, which each answer measures anew."""
    return miss and miss | {"lost_ms": None}


def new(miss: dict[str, Any]) -> list[str]:
    """What of the asked text is not in the stored one."""
    return [text.strip() for text, differs in miss["wanted_parts"] if differs]


def line_of(server: ServerProcess, response: httpx.Response) -> dict[str, Any]:
    """The request's line in the log."""
    number, until = response.headers["x-request-id"], time.monotonic() + DEADLINE
    while True:
        lines = [json.loads(line) for line in list(server.lines) if line.startswith("{")]
        found = [line for line in lines if line.get("request_id") == number and line["message"] == "request"]
        if found:
            return dict(found[0])
        assert time.monotonic() < until
        time.sleep(0.02)


def chat(system: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, QUESTION]


def asked(http: httpx.Client, protocol: str, system: str, stream: bool) -> tuple[httpx.Response, dict[str, Any]]:
    """One question through a protocol, and the part of its answer that holds `miss`."""
    if protocol == "native":
        body: dict[str, Any] = {"messages": chat(system), "max_new_tokens": 2, "stream": stream}
        response = http.post("/query", json=body)
    elif protocol == "openai":
        body = {"model": "demo", "messages": chat(system), "max_tokens": 2, "temperature": 0, "stream": stream}
        response = http.post("/v1/chat/completions", json=body)
    else:
        body = {"model": "demo", "system": system, "messages": [QUESTION], "max_tokens": 2, "stream": stream}
        response = http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        whole = response.json()
    else:
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        whole = next(one for one in map(json.loads, reversed(data)) if "keepwarm" in one or "miss" in one)
    return response, whole


@pytest.mark.parametrize(
    ("protocol", "stream"),
    [
        ("native", False),
        pytest.param("native", True, marks=pytest.mark.slow),
        pytest.param("openai", False, marks=pytest.mark.slow),
        ("openai", True),
        ("anthropic", False),
        pytest.param("anthropic", True, marks=pytest.mark.slow),
    ],
)
def test_every_view_of_an_answer_says_the_same(
    http: httpx.Client, server: ServerProcess, protocol: str, stream: bool
) -> None:
    system = SYSTEM.replace("Pier 3 ", f"Pier 3 of the {protocol} port{' upstream' * stream} ")
    edited = system.replace("Pier 17 is open", "Pier 17 is shut")
    reasons = []
    for text in (system, system, edited):
        before = steady(http, chat(text))
        response, whole = asked(http, protocol, text, stream)
        told = whole["miss"] if protocol == "native" else whole["keepwarm"]["miss"]
        recent = http.get("/v1/cache/recent").json()["answers"][-1]
        line = line_of(server, response)
        for other in (recent, line):
            assert other["miss_reason"] == (told["reason"] if told else "none")
            assert other["miss_position"] == (told["position"] if told else None)
            assert other["missed_tokens"] == (told["lost_tokens"] if told else 0)
            assert other["cached_tokens"] == before["cached_tokens"]
            assert set(other["timings"]) >= PHASES
        assert line["total_ms"] >= line["ttft_ms"] > 0
        assert untimed(before["miss"]) == untimed(told)
        if protocol == "openai":
            found = whole["prompt_cache_diagnostics"]
            assert found["type"] == ("cache_miss" if told else "cache_hit")
            assert found.get("cache_missed_tokens", 0) == (told["lost_tokens"] if told else 0)
            assert found.get("reason", "tokens_differ").replace("input_changed", "tokens_differ") == (
                told["reason"] if told else "tokens_differ"
            )
        reasons.append(recent["miss_reason"])
        until_stored(http, text)
    assert reasons[1:] == ["none", "tokens_differ"]
    assert told["segment"] == "system"
    assert new(told) == ["shut"]


def test_a_turn_of_a_session_is_explained_as_it_is_answered(http: httpx.Client) -> None:
    session = {"x-session-id": "why it missed"}
    talk = [{"role": "system", "content": "You are kind. Answer at length."}, {"role": "user", "content": "The sea?"}]
    for _ in range(2):
        told = steady(http, talk, **session)
        answer = http.post("/query", json={"messages": talk, "max_new_tokens": 60}, headers=session).json()
        assert answer["cached_tokens"] == told["cached_tokens"]
        assert untimed(answer["miss"]) == untimed(told["miss"])
        talk += [{"role": "assistant", "content": answer["answer"]}, {"role": "user", "content": "And then?"}]
        until = time.monotonic() + DEADLINE
        while not http.get("/v1/sessions").json()["sessions"][0]["settled"]:
            assert time.monotonic() < until
            time.sleep(0.05)
    assert explained(http, talk, **session)["cached_tokens"] >= explained(http, talk)["cached_tokens"]
    assert http.delete("/v1/sessions", params={"name": session["x-session-id"]}).status_code == 200


@pytest.mark.slow
def test_other_ways_to_ask_are_explained_as_they_are_answered(http: httpx.Client) -> None:
    """A registered set, a mode of reuse, a salt."""
    tool = {"type": "function", "function": {"name": "tide", "description": "When is high water? " * 20}}
    made = http.post("/tools", json={"tools": [tool], "system": "You know the sea.", "name": "tides"})
    assert made.status_code == 200
    for more in ({}, {"reuse": "off"}, {"reuse": "prefix"}, {"cache_salt": "mine"}):
        body = {"tools": "tides", "query": "When is high water?"} | more
        told = http.post("/v1/cache/explain", json=body).json()
        answer = http.post("/query", json=body | {"max_new_tokens": 1}).json()
        assert answer["cached_tokens"] == told["cached_tokens"]
        assert untimed(answer["miss"]) == untimed(told["miss"])
    assert http.delete("/tools/tides").status_code == 200


def test_completions_say_it_too(http: httpx.Client) -> None:
    body = {"model": "demo", "prompt": f"{SYSTEM} Once more", "max_tokens": 1, "temperature": 0, "reuse": "off"}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["keepwarm"]["miss"]["reason"] == "reuse_off"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    expected = {"type": "cache_miss", "reason": "reuse_off", "cache_missed_tokens": 0}
    assert answer["prompt_cache_diagnostics"] == expected
