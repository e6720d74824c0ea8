"""Tenants on a real server: nobody learns what another cached; what is public is shared, and nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.processes import DEADLINE, chat
from tests.helpers.services import CATALOGUE_SYSTEM, Keyed, weather

from keepwarm.serving.tenancy.keys import add_key, revoke_key

LONG = "The quarterly figures of the northern branch are as follows. " * 12
DESK = [weather("desk_weather", 10), weather("desk_time", 10)]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(keyed: Keyed, key: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    answer = chat(keyed.url, "", bearer(key), model="tiny", messages=messages, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def private(text: str = LONG) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}, {"role": "user", "content": "Sum it up."}]


def explained(keyed: Keyed, key: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages} | more
    answer = httpx.post(f"{keyed.url}/v1/cache/explain", json=body, headers=bearer(key), timeout=DEADLINE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    if found["miss"]:
        found["miss"]["lost_ms"] = None  # how fast this machine computes now, whoever asked what
    found["cached_by_tier"] = sum(found["cached_by_tier"].values())  # whoever computes takes room, whatever it is
    return found


def test_a_tenant_cannot_tell_what_another_cached(keyed: Keyed) -> None:
    """Nothing that a tenant is told (counts, plans, reasons, entries, names) depends on another's requests."""
    before = explained(keyed, keyed.umbrella, private())
    never = explained(keyed, keyed.umbrella, private(LONG.replace("northern", "southern")))
    ask(keyed, keyed.acme, private())
    assert cached(ask(keyed, keyed.acme, private())) > 100
    after = explained(keyed, keyed.umbrella, private())
    assert after == before
    assert after["cached_tokens"] < 8, "a template's first tokens, of this tenant's own prompts"
    assert (after["cached_tokens"], after["miss"]["reason"]) == (never["cached_tokens"], never["miss"]["reason"])
    assert cached(ask(keyed, keyed.umbrella, private())) == after["cached_tokens"]
    assert cached(ask(keyed, keyed.umbrella, private())) > 100


def test_a_client_salt_narrows_and_never_widens(keyed: Keyed) -> None:
    text = private(LONG.replace("northern", "eastern"))
    ask(keyed, keyed.acme, text)
    assert cached(ask(keyed, keyed.acme, text)) > 100
    assert cached(ask(keyed, keyed.acme, text, cache_salt="user-1")) == 0
    assert cached(ask(keyed, keyed.acme, text, cache_salt="user-1")) > 100
    assert cached(ask(keyed, keyed.acme, text, cache_salt="user-2")) == 0
    assert cached(ask(keyed, keyed.umbrella, text, cache_salt="user-1")) == 0


def test_the_catalogue_is_shared_and_what_follows_is_not(keyed: Keyed) -> None:
    desk = [{"role": "system", "content": CATALOGUE_SYSTEM}, {"role": "user", "content": LONG}]
    turned = [{"role": "system", "content": CATALOGUE_SYSTEM}, {"role": "user", "content": "Quite another question."}]
    first = ask(keyed, keyed.acme, desk, tools=DESK)
    header = cached(first)
    assert header > 200
    assert cached(ask(keyed, keyed.umbrella, turned, tools=DESK)) == header
    more = [*desk, {"role": "assistant", "content": "Noted. " * 40}, {"role": "user", "content": "And then?"}]
    ask(keyed, keyed.acme, more, tools=DESK)
    assert cached(ask(keyed, keyed.acme, more, tools=DESK)) > header + 100
    assert explained(keyed, keyed.admin, more, tools=DESK)["cached_tokens"] == header, "of who asked nothing yet"
    own = explained(keyed, keyed.umbrella, more, tools=DESK)["cached_tokens"] - header
    assert 0 <= own < 10, "its own question begins with the same marks"
    assert cached(ask(keyed, keyed.umbrella, more, tools=DESK)) == header + own
    never = explained(keyed, keyed.umbrella, desk, tools=[weather("desk_weather", 10), weather("desk_never", 10)])
    other = [weather("desk_weather", 10), weather("desk_clock", 10)]
    assert cached(ask(keyed, keyed.umbrella, desk, tools=other)) == never["cached_tokens"] < 8


def test_entries_do_not_tell_what_others_do_with_what_is_public(keyed: Keyed) -> None:
    def public() -> list[dict[str, Any]]:
        answer = httpx.get(f"{keyed.url}/v1/cache/entries", headers=bearer(keyed.umbrella), timeout=DEADLINE).json()
        return [one for one in answer["entries"] if one["public"]]

    desk = [{"role": "system", "content": CATALOGUE_SYSTEM}, {"role": "user", "content": "Who asks?"}]
    before = public()
    assert before
    assert cached(ask(keyed, keyed.acme, desk, tools=DESK)) > 200
    assert public() == before
    run = before[0]["id"]
    shown = httpx.get(f"{keyed.url}/v1/cache/entries/{run}", headers=bearer(keyed.umbrella), timeout=DEADLINE).json()
    assert (shown["uses"], shown["last_used"]) == (None, shown["created"])


def test_a_tenants_pin_leaves_what_is_public_as_it_is(keyed: Keyed) -> None:
    def entries() -> dict[str, dict[str, Any]]:
        answer = httpx.get(f"{keyed.url}/v1/cache/entries", headers=bearer(keyed.acme), timeout=DEADLINE).json()
        return {one["id"]: one for one in answer["entries"]}

    desk = [{"role": "system", "content": CATALOGUE_SYSTEM}, {"role": "user", "content": "To be kept. " * 40}]
    ask(keyed, keyed.acme, desk, tools=DESK)
    assert cached(ask(keyed, keyed.acme, desk, tools=DESK)) > 200
    before = entries()
    public = {run: one for run, one in before.items() if one["public"]}
    own = next(run for run, one in before.items() if one["own"] and one["parent"] in public)
    asked = {"headers": bearer(keyed.acme), "timeout": DEADLINE}
    answer = httpx.post(f"{keyed.url}/v1/cache/pin", json={"id": own, "ttl": 60}, **asked)
    assert answer.json()["runs"] >= 2
    after = entries()
    assert after[own]["pinned_until"] > time.time()
    assert {run: one for run, one in after.items() if one["public"]} == public
    assert httpx.delete(f"{keyed.url}/v1/cache/pin?id={own}", **asked).status_code == 200
    time.sleep(0.01)
    assert entries()[own]["pinned_until"] is None


def test_what_the_server_holds_reorders_no_request(keyed: Keyed) -> None:
    desk = [{"role": "system", "content": CATALOGUE_SYSTEM}, {"role": "user", "content": LONG}]
    shown = explained(keyed, keyed.acme, desk, tools=list(reversed(DESK)))
    assert shown["cached_tokens"] < 8, "another order is another prompt, and this tenant's own"
    assert explained(keyed, keyed.acme, desk, tools=DESK)["cached_tokens"] > 200
    made = [
        httpx.post(
            f"{keyed.url}/tools",
            headers=bearer(keyed.acme),
            timeout=DEADLINE,
            json={"name": name, "tools": tools, "system": CATALOGUE_SYSTEM},
        ).json()
        for name, tools in (("desk", DESK), ("turned", list(reversed(DESK))))
    ]
    assert [one["public"] for one in made] == [True, False]
    assert made[0]["hash"] == made[1]["hash"]


def test_the_same_answer_with_the_shared_header_and_without_the_cache(keyed: Keyed) -> None:
    desk = [{"role": "system", "content": CATALOGUE_SYSTEM}, {"role": "user", "content": "Who are you?"}]
    warm = ask(keyed, keyed.umbrella, desk, tools=DESK, max_tokens=12)
    cold = ask(keyed, keyed.umbrella, desk, tools=DESK, max_tokens=12, reuse="off")
    assert (cached(warm) > 0, cached(cold)) == (True, 0)
    assert warm["choices"] == cold["choices"]


def test_sets_entries_and_removal_are_each_tenants_own(keyed: Keyed) -> None:
    def call(key: str, method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(method, f"{keyed.url}{path}", headers=bearer(key), timeout=DEADLINE, **more)

    body = {"name": "mine", "tools": [weather("secret_tool", 12)]}
    made = call(keyed.acme, "POST", "/tools", json=body).json()
    assert made["status"] == "compiled"
    assert call(keyed.umbrella, "POST", "/tools", json=body).json()["status"] == "compiled"
    assert "mine" in [one["name"] for one in call(keyed.umbrella, "GET", "/tools").json()]
    ids = {one["id"] for one in call(keyed.acme, "GET", "/v1/cache/entries").json()["entries"] if not one["public"]}
    theirs = {
        one["id"] for one in call(keyed.umbrella, "GET", "/v1/cache/entries").json()["entries"] if not one["public"]
    }
    assert ids
    assert theirs
    assert not ids & theirs
    run = min(ids)
    assert call(keyed.umbrella, "GET", f"/v1/cache/entries/{run}").status_code == 404
    assert call(keyed.umbrella, "DELETE", f"/v1/cache/entries/{run}").status_code == 404
    assert call(keyed.umbrella, "POST", "/v1/cache/pin", json={"id": run, "ttl": 5}).status_code == 404
    public = [one["id"] for one in call(keyed.acme, "GET", "/v1/cache/entries").json()["entries"] if one["public"]]
    assert public
    assert call(keyed.acme, "DELETE", f"/v1/cache/entries/{public[0]}").status_code == 403
    assert call(keyed.umbrella, "DELETE", f"/v1/cache/pin?id={run}").status_code == 404
    assert call(keyed.acme, "DELETE", f"/v1/cache/pin?id={public[0]}").status_code == 403
    ask(keyed, keyed.acme, private("Told in confidence. " * 30), cache_salt="deep")
    series = {key: call(key, "GET", "/v1/cache/recent").json()["series"] for key in (keyed.acme, keyed.short)}
    last = call(keyed.acme, "GET", "/v1/cache/recent").json()["answers"][-1]["number"]
    assert last not in [one["number"] for one in call(keyed.umbrella, "GET", "/v1/cache/recent").json()["answers"]]
    assert call(keyed.umbrella, "POST", "/v1/cache/purge").json()["sets"] >= 1
    assert "mine" in [one["name"] for one in call(keyed.acme, "GET", "/tools").json()]
    assert call(keyed.acme, "POST", "/v1/cache/purge").json()["runs"] >= 2
    entries = call(keyed.acme, "GET", "/v1/cache/entries").json()["entries"]
    assert all(one["public"] and not one["own"] for one in entries)
    assert call(keyed.acme, "GET", "/v1/cache/recent").json()["answers"] == []
    assert call(keyed.acme, "GET", "/v1/cache/recent").json()["series"] != series[keyed.acme]
    assert call(keyed.short, "GET", "/v1/cache/recent").json()["series"] == series[keyed.short]
    assert cached(ask(keyed, keyed.acme, private("Told in confidence. " * 30), cache_salt="deep")) == 0


def test_a_purge_leaves_nothing_of_what_is_under_way(keyed: Keyed) -> None:
    """A set and a narrowed salt of before, an answer that is being streamed, a salt that comes meanwhile."""
    secret = "The password of the harbour is marmalade. "
    body = {"name": "harbour", "tools": [weather("marmalade", 12)], "system": secret * 12, "cache_salt": "deep"}
    assert httpx.post(f"{keyed.url}/tools", json=body, headers=bearer(keyed.acme), timeout=DEADLINE).status_code == 200
    told = {"model": "tiny", "messages": private(secret * 12), "max_tokens": 200, "stream": True, "cache_salt": "wide"}
    url = f"{keyed.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=told, headers=bearer(keyed.acme), timeout=DEADLINE) as answer:
        lines = answer.iter_lines()
        next(lines)
        purged = httpx.post(f"{keyed.url}/v1/cache/purge", headers=bearer(keyed.acme), timeout=DEADLINE).json()
        assert purged["sets"] >= 1
        ask(keyed, keyed.acme, private(), cache_salt="new")
        list(lines)
    left = [path for path in keyed.store.rglob("*") if path.is_file() and b"marmalade" in path.read_bytes()]
    assert left == []
    assert httpx.get(f"{keyed.url}/tools", headers=bearer(keyed.acme), timeout=DEADLINE).json() == []
    assert cached(ask(keyed, keyed.acme, private(secret * 12), cache_salt="wide")) == 0
    assert cached(ask(keyed, keyed.acme, private(), cache_salt="new")) > 100, "stored after the purge"
    httpx.post(f"{keyed.url}/v1/cache/purge", headers=bearer(keyed.acme), timeout=DEADLINE)
    assert cached(ask(keyed, keyed.acme, private(), cache_salt="new")) == 0


def test_keys_are_needed_and_stay_out_of_urls_and_metrics(keyed: Keyed) -> None:
    assert chat(keyed.url, "hi", model="tiny").status_code == 401
    assert (
        httpx.post(f"{keyed.url}/v1/messages", json={}, timeout=DEADLINE).json()["error"]["type"]
        == "authentication_error"
    )
    wrong = chat(keyed.url, "hi", bearer("kw-0-0"), model="tiny")
    assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{keyed.url}/health", timeout=DEADLINE).status_code == 200
    in_url = httpx.get(f"{keyed.url}/status?api_key={keyed.acme}", timeout=DEADLINE)
    assert in_url.status_code == 400
    assert httpx.get(f"{keyed.url}/metrics", headers=bearer(keyed.acme), timeout=DEADLINE).status_code == 403
    metrics = httpx.get(f"{keyed.url}/metrics", headers=bearer(keyed.admin), timeout=DEADLINE).text
    log = "\n".join(keyed.process.lines)
    for text in (keyed.acme, keyed.umbrella, "acme", "umbrella"):
        assert text not in metrics
    for text in (keyed.acme, keyed.umbrella, "quarterly"):
        assert text not in log
    assert '"tenant": "acme"' in log
    status = httpx.get(f"{keyed.url}/status", headers=bearer(keyed.acme), timeout=DEADLINE).json()
    assert "engine" not in status
    assert "engine" in httpx.get(f"{keyed.url}/status", headers=bearer(keyed.admin), timeout=DEADLINE).json()


def test_a_tenants_limits(keyed: Keyed) -> None:
    answers = [chat(keyed.url, "hi", bearer(keyed.narrow), model="tiny") for _ in range(5)]
    codes = [answer.status_code for answer in answers]
    assert codes[0] == 200
    assert 429 in codes
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    theirs = httpx.post(f"{keyed.url}/v1/messages", json=body, headers={"x-api-key": keyed.narrow}, timeout=DEADLINE)
    assert (theirs.status_code, theirs.json()["error"]["type"]) == (429, "rate_limit_error")
    used = httpx.get(f"{keyed.url}/v1/usage", headers=bearer(keyed.narrow), timeout=DEADLINE).json()
    assert used["requests"] == codes.count(200)
    assert used["running"] == 0


def metered(keyed: Keyed, name: str, **limits: int) -> str:
    """The key of a new tenant."""
    key = add_key(keyed.keys_file, name, limits=limits)[1]
    until = time.monotonic() + DEADLINE
    while httpx.get(f"{keyed.url}/v1/usage", headers=bearer(key), timeout=DEADLINE).status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    return key


def used(keyed: Keyed, key: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{keyed.url}/v1/usage", headers=bearer(key), timeout=DEADLINE).json()
    return found


def test_a_stream_that_is_broken_off_is_charged(keyed: Keyed) -> None:
    key = metered(keyed, "leaver", tokens_per_day=20)
    body = {"model": "tiny", "messages": private(), "max_tokens": 1000, "temperature": 0, "stream": True}
    with httpx.stream(
        "POST", f"{keyed.url}/v1/chat/completions", json=body, headers=bearer(key), timeout=DEADLINE
    ) as stream:
        lines = (line for line in stream.iter_lines() if line)
        for _ in range(4):
            next(lines)
    until = time.monotonic() + DEADLINE
    while (usage := used(keyed, key))["running"]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert usage["prompt_tokens"] > 100
    assert 0 < usage["completion_tokens"] < 1000
    assert usage["day_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    refused = chat(keyed.url, "more", bearer(key), model="tiny")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


@pytest.mark.slow
def test_what_only_prepares_or_looks_enters_the_limits_too(keyed: Keyed) -> None:
    chatted = [{"role": "user", "content": "hi"}]
    paths: dict[str, dict[str, Any]] = {
        "/tools": {"name": "metered", "tools": [weather()]},
        "/v1/cache/explain": {"messages": chatted},
        "/v1/messages/count_tokens": {"model": "tiny", "messages": chatted},
    }

    def call(key: str, path: str) -> int:
        url = f"{keyed.url}{path}"
        return httpx.post(url, json=paths[path], headers=bearer(key), timeout=DEADLINE).status_code

    sparse = metered(keyed, "sparse", requests_per_minute=3)
    assert [call(sparse, path) for path in paths] == [200] * 3
    assert [call(sparse, path) for path in paths] == [429] * 3
    assert used(keyed, sparse)["requests"] == 3
    daily = metered(keyed, "daily", tokens_per_day=10)
    assert call(daily, "/tools") == 200
    assert used(keyed, daily)["day_tokens"] > 10, "what is compiled counts"
    assert [call(daily, path) for path in paths] == [429] * 3


def test_a_key_that_is_made_or_revoked_counts_within_a_second(keyed: Keyed) -> None:
    import time

    key, text = add_key(keyed.keys_file, "guest")

    def code() -> int:
        return httpx.get(f"{keyed.url}/v1/usage", headers=bearer(text), timeout=DEADLINE).status_code

    def becomes(wanted: int) -> bool:
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            if code() == wanted:
                return True
            time.sleep(0.05)
        return False

    assert becomes(200)
    revoke_key(keyed.keys_file, key.id)
    assert becomes(401)


@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
def test_pages_of_other_origins_are_kept_out(keyed: Keyed, origin: str) -> None:
    answer = httpx.get(f"{keyed.url}/health", headers={"origin": origin}, timeout=DEADLINE)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    own = httpx.get(f"{keyed.url}/health", headers={"origin": keyed.url}, timeout=DEADLINE)
    assert own.status_code == 200


def test_logs_are_one_json_object_per_line(keyed: Keyed) -> None:
    mark = "seen-in-the-log"
    httpx.get(f"{keyed.url}/health", headers={"x-request-id": mark}, timeout=DEADLINE)
    until = time.monotonic() + DEADLINE
    lines: list[dict[str, Any]] = []
    while not any(line.get("request_id") == mark and line["path"] == "/health" for line in lines):
        assert time.monotonic() < until
        lines = [json.loads(line) for line in list(keyed.process.lines) if line.startswith("{")]
