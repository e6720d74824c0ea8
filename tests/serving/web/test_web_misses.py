"""The page says why a prompt missed as everything else does: its JavaScript in a real Chromium, beside the record."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.browser import ask, needs_chromium
from tests.helpers.processes import DEADLINE, ServerProcess

from keepwarm.core.spans import MissReason

pytestmark = needs_chromium

DESK = "The desk opens at nine and closes at six. " * 9


@pytest.fixture
def http(empty: ServerProcess) -> Any:
    with httpx.Client(base_url=empty.url, timeout=DEADLINE) as client:
        yield client


KEEP_ANSWERS = """() => {
    const own = window.fetch;
    window.told = [];
    window.fetch = async (...asked) => {
        const response = await own(...asked);
        if (response.url.endsWith("/query")) window.told.push(response.clone().text());
        return response;
    };
}"""


def spoken(page: Any, question: str) -> tuple[Any, dict[str, Any]]:
    """The card of an answer, and what the service told the page; Chromium keeps no body that was read as a stream."""
    page.evaluate(KEEP_ANSWERS)
    card = ask(page, question)
    lines = page.evaluate("() => window.told[0]").splitlines()
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return card, next(each for each in reversed(data) if "miss" in each)


def untimed(miss: dict[str, Any] | None) -> dict[str, Any] | None:
    return miss and miss | {"lost_ms": None}


def explained(http: httpx.Client, body: Any, least: int, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """What a request would reuse, once so many tokens are stored: an answer's KV is, a moment after the answer."""
    until = time.monotonic() + DEADLINE
    while True:
        told: dict[str, Any] = http.post("/v1/cache/explain", json=body, headers=headers).json()
        if told["cached_tokens"] >= least:
            return told
        assert time.monotonic() < until
        time.sleep(0.02)


def check(page: Any, card: Any, told: dict[str, Any], http: httpx.Client) -> None:
    """Card, chart and record say the same."""
    why, miss = card.get_by_role("region", name="Why it missed"), told["miss"]
    assert f"{told['cached_tokens']:,} of {told['prompt_tokens']:,} tokens reused" in card.inner_text()
    heading = why.get_by_role("heading").inner_text()
    assert (heading == "Everything that can be reused was") is (miss is None)
    if miss is not None:
        assert miss["detail"].lower() in why.inner_text().lower()
        for tag, parts in (("del", miss["stored_parts"]), ("ins", miss["wanted_parts"])):
            assert why.locator(tag).all_text_contents() == [text for text, differs in parts if differs]
    recent = http.get("/v1/cache/recent").json()["answers"][-1]
    assert recent["cached_tokens"] == told["cached_tokens"]
    assert recent["miss_reason"] == (miss["reason"] if miss else "none")
    page.get_by_role("link", name="Live").click()
    page.locator("details", has_text="The same as a table").evaluate("details => { details.open = true; }")
    row = page.locator("#live-table").get_by_role("row").nth(1)
    row.get_by_text(f"{told['cached_tokens']:,}", exact=True).first.wait_for()
    assert recent["miss_reason"].replace("none", "all was reused").replace("_", " ") in row.inner_text()
    page.get_by_role("link", name="Ask").click()


@pytest.mark.slow
def test_a_question_and_its_edit(page: Any, http: httpx.Client) -> None:
    there = 0
    for clock in ("noon", "noon", "midnight"):
        question = f"{DESK} The bell rings at {clock}. {DESK} When?"
        body = {"messages": [{"role": "user", "content": question}]}
        before = explained(http, body, there if clock == "noon" else 0)
        card, told = spoken(page, question)
        there = told["prompt_tokens"] - 1
        assert before["cached_tokens"] == told["cached_tokens"]
        assert untimed(before["miss"]) == untimed(told["miss"])
        check(page, card, told, http)
    assert told["miss"]["reason"] == "tokens_differ"


def test_a_turn_of_a_session(page: Any, http: httpx.Client) -> None:
    """It used to say less than was reused."""
    talk, headers = {"role": "user", "content": DESK}, {"x-session-id": "a talk"}
    first = http.post("/query", json={"messages": [talk], "max_new_tokens": 8}, headers=headers).json()
    page.get_by_label("Session (optional)").fill("a talk")
    said = http.get("/v1/sessions/messages", params={"name": "a talk"}).json()["messages"]
    body = {"messages": [*said, {"role": "user", "content": "And on Sundays?"}]}
    before = explained(http, body, first["prompt_tokens"] + first["completion_tokens"] - 1, headers)
    card, told = spoken(page, "And on Sundays?")
    assert before["cached_tokens"] == told["cached_tokens"]
    assert untimed(before["miss"]) == untimed(told["miss"])
    check(page, card, told, http)


def test_every_reason_has_words(page: Any) -> None:
    told = page.evaluate(
        """async (reasons) => {
            const {why} = await import("/web/timing.js");
            const answer = {cached_tokens: 1, prompt_tokens: 2, segments: []};
            const miss = {detail: "", changed: null, stored_parts: [], wanted_parts: []};
            return reasons.map((reason) => why({...answer, miss: {...miss, reason}}).querySelector("h3").textContent);
        }""",
        [reason.value for reason in MissReason if reason is not MissReason.NONE],
    )
    assert len(set(told)) == len(told) > 10
    assert not [words for words in told if "_" in words or words.islower()]
