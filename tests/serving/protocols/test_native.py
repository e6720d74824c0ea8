"""The native protocol against a real server with the embedded model."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.services import weather


@pytest.fixture
def http(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=DEADLINE)


def register(http: httpx.Client, name: str, **more: Any) -> dict[str, Any]:
    body = {"name": name, "tools": [weather("now"), weather("tomorrow")], "system": "You help."} | more
    answer = http.post("/tools", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_set_is_compiled_loaded_extended_and_removed(http: httpx.Client) -> None:
    first = register(http, "trip")
    assert first["status"] == "compiled"
    assert 50 < first["recomputed_tokens"] <= first["prefix_tokens"]  # others may have asked with the same first tokens
    assert first["bytes"] > 0
    assert len(first["hash"]) == len(first["key"]) == 64
    again = register(http, "trip", tools=[weather("tomorrow"), weather("now")])
    assert (again["status"], again["hash"], again["version"]) == ("loaded", first["hash"], 1)
    assert again["tier"] in ("ram", "disk")
    more = register(http, "trip", tools=[weather("now"), weather("tomorrow"), weather("yesterday")])
    assert (more["status"], more["version"]) == ("extended", 2)
    assert more["changes"]["added"] == ["yesterday"]
    assert 0 < more["recomputed_tokens"] < more["prefix_tokens"]
    assert [one["name"] for one in http.get("/tools").json()] == ["trip"]
    assert [tool["function"]["name"] for tool in http.get("/tools/trip").json()["tools"]] == [
        "now",
        "tomorrow",
        "yesterday",
    ]
    gone = http.delete("/tools", params={"name": "trip"}).json()
    assert gone["removed"][0]["runs"] >= 1
    assert http.get("/tools").json() == []
    assert http.get("/tools/trip").status_code == 404
    assert register(http, "trip")["status"] == "compiled"
    assert len(http.delete("/tools").json()["removed"]) == 1


def test_sets_are_listed_and_removed_while_others_remove_them(http: httpx.Client) -> None:
    """The web page asks for them all the time: whoever purges or lists at that moment is answered."""
    asked = [("POST", "/v1/cache/purge"), ("DELETE", "/tools"), ("GET", "/tools"), ("GET", "/status")] * 4
    for _ in range(3):
        for name in ("one", "two", "three", "four", "five", "six"):
            register(http, name)
        with ThreadPoolExecutor(len(asked)) as several:
            answers = list(several.map(lambda each: http.request(*each), asked))
        assert [answer.text for answer in answers if answer.status_code != 200] == []
        assert http.get("/tools").json() == []


def test_a_set_keeps_the_order_in_which_it_was_registered(http: httpx.Client) -> None:
    properties = {"reasoning": {"type": "string"}, "answer": {"const": 0}}
    schema = {"type": "object", "required": ["reasoning", "answer"], "properties": properties}
    given = {"name": "fill", "input_schema": schema, "description": "Fills a form."}
    wanted = {"type": "function", "function": {"name": "fill", "parameters": schema, "description": "Fills a form."}}
    register(http, "form", tools=[given, weather()])
    assert json.dumps(http.get("/tools/form").json()["tools"]) == json.dumps([wanted, weather()])
    turned = json.loads(json.dumps([weather(), given], sort_keys=True))
    assert register(http, "form", tools=turned)["version"] == 1
    assert json.dumps(http.get("/tools/form").json()["tools"]) == json.dumps([wanted, weather()])
    properties["answer"]["const"] = False  # type: ignore[assignment]
    edited = register(http, "form", tools=[*turned[:1], given])
    assert (edited["version"], edited["changes"]["changed"]) == (2, ["fill"])
    assert '"const": false' in json.dumps(http.get("/tools/form").json()["tools"])
    http.delete("/tools", params={"name": "form"})


def test_a_question_to_a_set_hits_it(http: httpx.Client) -> None:
    made = register(http, "ask")
    answer = http.post("/query", json={"tools": "ask", "query": "Weather in Oslo?", "max_new_tokens": 4}).json()
    assert answer["exactness"] == "exact"
    assert answer["cached_tokens"] >= made["prefix_tokens"] - 1
    assert sum(answer["cached_by_tier"].values()) == answer["cached_tokens"]
    assert {"compile", "queue", "link", "load", "prefill", "decode"} <= set(answer["timings"])
    assert answer["completion_tokens"] <= 4
    unknown = http.post("/query", json={"tools": "nobody", "query": "x"})
    assert unknown.status_code == 404
    assert "ask" in unknown.json()["error"]["message"]


def test_cold_and_warm_are_the_same_to_the_bit(http: httpx.Client) -> None:
    register(http, "both")
    body = {"tools": "both", "query": "Is it cold in Rome?", "max_new_tokens": 3}
    found = http.post("/query/compare", json=body).json()
    assert found["cold"]["cached_tokens"] == 0
    assert found["warm"]["cached_tokens"] > 50
    assert found["same_answer"]
    assert found["bit_identical"]
    assert found["ttft_speedup"] > 0


def test_a_streamed_question_is_the_whole_one_in_pieces(http: httpx.Client) -> None:
    body = {"query": "Say three words.", "max_new_tokens": 6}
    whole = http.post("/query", json=body).json()
    events = []
    with http.stream("POST", "/query", json=body | {"stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in stream.iter_lines():
            name = line.removeprefix("event: ") if line.startswith("event: ") else name
            if line.startswith("data: "):
                events.append((name, json.loads(line.removeprefix("data: "))))
    assert "".join(data["text"] for name, data in events if name == "token") == whole["answer"]
    assert events[-1][0] == "done"
    assert events[-1][1]["answer"] == whole["answer"]


def test_explain_entries_pin_and_removal(http: httpx.Client) -> None:
    made = register(http, "looked-at")
    told = http.post("/v1/cache/explain", json={"tools": "looked-at", "query": "Rain?"}).json()
    assert told["cached_tokens"] >= made["prefix_tokens"] - 1
    cold = http.post(
        "/v1/cache/explain",
        json={"messages": [{"role": "system", "content": "New. " * 60}, {"role": "user", "content": "x"}]},
    ).json()
    assert cold["miss"]["reason"] in ("never_stored", "tokens_differ", "cuts_differ")
    listed = http.get("/v1/cache/entries").json()["entries"]
    mine = next(one for one in listed if one["name"] == "looked-at")
    ids = {one["id"] for one in listed}
    assert all(one["parent"] is None or one["parent"] in ids for one in listed)
    assert http.post("/v1/cache/pin", json={"name": "looked-at", "ttl": 60}).json()["runs"] >= 1
    shown = http.get(f"/v1/cache/entries/{mine['id']}").json()
    assert "tomorrow" in shown["text"]
    assert shown["pinned_until"] > shown["created"]
    assert http.delete("/v1/cache/pin", params={"name": "looked-at"}).json()["runs"] >= 1
    assert http.get(f"/v1/cache/entries/{mine['id']}").json()["pinned_until"] is None
    assert http.post("/v1/cache/pin", json={"id": mine["id"], "ttl": 60}).json()["runs"] >= 1
    assert http.get(f"/v1/cache/entries/{mine['id']}").json()["pinned_until"] > time.time()
    assert http.delete("/v1/cache/pin", params={"id": mine["id"]}).status_code == 200
    assert http.delete("/v1/cache/pin").status_code == 400
    assert http.delete(f"/v1/cache/entries/{mine['id']}").json()["runs"] >= 1
    after = http.post("/v1/cache/explain", json={"tools": "looked-at", "query": "Rain?"}).json()
    assert after["cached_tokens"] < told["cached_tokens"]


def test_the_tree_parts_where_prompts_part(http: httpx.Client) -> None:
    words = "The harbour opens at six, and the ferry leaves at seven. " * 6
    for question in ("When is noon?", "When is dusk?"):
        asked = {"messages": [{"role": "user", "content": words + question}], "max_new_tokens": 2}
        assert http.post("/query", json=asked).status_code == 200
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # it is stored behind the answers
        told = http.get("/v1/cache/tree").json()
        known = {one["id"]: one for one in told["stretches"]}
        ends = [one for one in known.values() if one["text"].startswith((" noon", " dusk"))]
        if len(ends) == 2:
            break
    assert len({one["parent"] for one in ends}) == 1
    shared = known[ends[0]["parent"]]
    assert shared["prompts"] == 2
    assert shared["start"] + shared["tokens"] == ends[0]["start"] == ends[1]["start"]
    assert all(one["parent"] is None or one["parent"] in known for one in known.values())
    part = {"start": shared["start"], "tokens": shared["tokens"]}
    full = http.get(f"/v1/cache/entries/{shared['run']}", params=part).json()
    assert "ferry leaves" in full["text"]
    assert full["text"].endswith("When is")
    few = http.get("/v1/cache/tree", params={"most": 1}).json()
    assert few["left_out"] == few["runs"] - len({one["run"] for one in few["stretches"]}) >= 0
    assert http.get("/v1/cache/tree", params={"most": 0}).status_code == 400


def test_what_differs_is_told_in_pieces(http: httpx.Client) -> None:
    words = "The ferry leaves at nine and comes back at six. " * 12
    first, second = (f"{words} Bring {what}. {words}" for what in ("coats", "hats"))
    http.post("/query", json={"query": first, "max_new_tokens": 1})
    until = time.monotonic() + DEADLINE
    while "coats" not in (told := http.post("/v1/cache/explain", json={"query": second}).json()["miss"])["stored"]:
        assert time.monotonic() < until, told  # it is stored after the answer
        time.sleep(0.02)
    assert told["reason"] == "tokens_differ"
    assert [text.strip() for text, differs in told["stored_parts"] if differs] == ["coats"]
    assert [text.strip() for text, differs in told["wanted_parts"] if differs] == ["hats"]
    assert "".join(text for text, _ in told["wanted_parts"]) == told["wanted"]


def test_the_latest_answers_in_numbers(http: httpx.Client) -> None:
    before = max((one["number"] for one in http.get("/v1/cache/recent").json()["answers"]), default=0)
    http.post("/query", json={"query": "One", "max_new_tokens": 2})
    chat = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "Two"}]}
    http.post("/v1/chat/completions", json=chat)
    told = http.get("/v1/cache/recent", params={"after": before}).json()
    found = told["answers"]
    assert [one["protocol"] for one in found] == ["native", "openai"]
    assert all(one["prompt_tokens"] > 0 and one["ttft_ms"] > 0 and "prefill" in one["timings"] for one in found)
    assert http.get("/v1/cache/recent", params={"after": found[-1]["number"]}).json() == told | {"answers": []}
    ahead = http.get("/v1/cache/recent", params={"after": found[-1]["number"] + 1000}).json()  # as before a restart
    assert ahead["answers"][-2:] == found
    assert http.get("/v1/cache/recent", params={"after": "x"}).status_code == 400


def test_status_and_health(http: httpx.Client) -> None:
    assert http.get("/health").json()["status"] == "ready"
    assert http.get("/health/ready").status_code == 200
    status = http.get("/status").json()
    assert status["model"] == "demo"
    assert status["engine"]["requests"] >= 0
    assert status["batch"]["pages"]["capacity"] > 0
    assert status["usage"]["tenant"] == "local"


def test_metrics_count_tokens_by_tier_and_label(http: httpx.Client) -> None:
    http.post("/query", json={"query": "Count me", "max_new_tokens": 2})
    text = http.get("/metrics").text
    for name in (
        "keepwarm_prefix_cache_queries_total",
        "keepwarm_reused_tokens_total",
        "keepwarm_prefix_cache_misses_total",
        "keepwarm_time_to_first_token_seconds_bucket",
        "keepwarm_inter_token_seconds_bucket",
        "keepwarm_store_bytes",
        "keepwarm_store_evictions_total",
        "keepwarm_queue_depth",
        "keepwarm_kv_pages",
    ):
        assert name in text
    assert "Count me" not in text


def test_a_session_goes_on_where_it_was(http: httpx.Client) -> None:
    headers = {"x-session-id": "trip to Oslo"}
    chat = [{"role": "system", "content": "You plan trips. " * 12}, {"role": "user", "content": "Plan one."}]
    first = http.post("/query", json={"messages": chat, "max_new_tokens": 4}, headers=headers).json()
    more = [*chat, {"role": "assistant", "content": first["answer"]}, {"role": "user", "content": "Shorter."}]
    second = http.post("/query", json={"messages": more, "max_new_tokens": 4}, headers=headers).json()
    assert second["cached_tokens"] > 0
    listed = {each["name"]: each["turns"] for each in http.get("/v1/sessions").json()["sessions"]}
    assert listed["trip to Oslo"] == 2
    shown = http.get("/v1/sessions/messages", params={"name": "trip to Oslo"}).json()
    assert [message["role"] for message in shown["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert http.get("/v1/sessions/messages", params={"name": "no such"}).status_code == 404
    two = {"model": "demo", "messages": chat, "n": 2}
    assert http.post("/v1/chat/completions", json=two, headers=headers).status_code == 400
    assert http.delete("/v1/sessions", params={"name": "trip to Oslo"}).json() == {"removed": True}
    assert "trip to Oslo" not in [each["name"] for each in http.get("/v1/sessions").json()["sessions"]]


def test_what_is_asked_to_be_kept_is_pinned(http: httpx.Client) -> None:
    """The end of the header for five minutes, the first message for an hour: the head stays as long as it is asked."""
    system = [{"type": "text", "text": "You keep ledgers. " * 30, "cache_control": {"type": "ephemeral"}}]
    text = {"type": "text", "text": "Ledger. " * 150, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    answer = {"role": "assistant", "content": "Noted."}
    messages = [{"role": "user", "content": [text]}, answer, {"role": "user", "content": "Sum?"}]
    body = {"model": "demo", "max_tokens": 2, "temperature": 0, "system": system, "messages": messages}
    assert http.post("/v1/messages", json=body).status_code == 200
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        pins = [one["pinned_until"] for one in http.get("/v1/cache/entries").json()["entries"] if one["pinned_until"]]
        if any(pin > time.time() + 3000 for pin in pins):
            return
        time.sleep(0.05)
    raise AssertionError(pins)
