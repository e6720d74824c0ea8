"""What a first visit meets: three prompts that can be run, a map to scale, and a page for everyone."""

from __future__ import annotations

import re
from typing import Any

import httpx2 as httpx
import pytest
from tests.helpers.browser import ask, needs_chromium, opened, ready, violations
from tests.helpers.processes import DEADLINE, ServerProcess
from tests.helpers.services import weather

pytestmark = needs_chromium

DESK = "The desk opens at nine and closes at six. " * 9


@pytest.mark.slow
def test_three_prompts_that_can_be_run(page: Any) -> None:
    asked: list[Any] = []
    page.on("request", lambda one: asked.append(one.post_data_json) if one.url.endswith("/query") else None)
    took, says, told = page.locator("#tour-steps .note"), page.locator("#tour-says"), []
    for number in range(3):
        page.get_by_role("button", name=re.compile("^Run: ")).click()
        took.nth(number).wait_for()
        told.append(says.inner_text())
    assert "Nothing was reused" in told[0]
    assert "the same to the last bit" in told[1]
    for one in asked:  # the text is a message of its own: where arithmetic is scheduled, a prompt parts behind messages
        assert [message["role"] for message in one["messages"]] == ["system", "user"]
    reused = [int(re.search(r"([\d,]+) of", said)[1].replace(",", "")) for said in took.all_inner_texts()]
    assert reused[0] == 0
    assert reused[1] > 300 > reused[2]
    card = page.get_by_role("article", name="Answer").first
    card.get_by_text("The edit that would have hit").wait_for()
    edit = card.locator(".edit").inner_text()
    assert "clerk" in edit
    assert "in the system message" in edit
    assert card.get_by_role("button", name="Put it in the box").count() == 0  # the box is for the question
    page.get_by_role("link", name="Open the cache map").click()
    page.get_by_role("treeitem").first.wait_for()


def test_the_first_visit_says_no_more_than_an_answers_label(page: Any) -> None:
    told = page.evaluate(
        """async (labels) => {
            const {shows} = await import("/web/tour.js");
            const said = labels.map((exactness) => shows({cached_tokens: 9, prompt_tokens: 10, exactness}));
            return [...said, shows({cached_tokens: 0, prompt_tokens: 10, exactness: "exact"})];
        }""",
        ["exact", "prefix", "quantized", "blended"],
    )
    assert len(set(told)) == 5
    assert [one for one in told if "the same to the last bit" in one] == told[:1]
    assert all("9 of 10 tokens were not read again" in one for one in told[:4])
    assert "Nothing was reused" in told[4]


def test_the_first_visit_is_hidden_once(page: Any) -> None:
    page.get_by_role("button", name="Hide").click()
    page.reload()
    ready(page)
    assert not page.locator("#tour").is_visible()


def test_the_edit_that_would_have_hit(page: Any) -> None:
    ask(page, f"{DESK} The bell rings at noon. {DESK} When?")
    card = ask(page, f"{DESK} The bell rings at midnight. {DESK} When?")
    edit = card.locator(".edit")
    edit.wait_for()
    told = re.search(r"Then ([\d,]+) of ([\d,]+) tokens would have been reused, not ([\d,]+)", edit.inner_text())
    assert told is not None
    would, whole, was = (int(number.replace(",", "")) for number in told.groups())
    assert was < would == whole - 1
    edit.get_by_role("button").click()
    page.get_by_role("button", name="Ask", exact=True).click()
    again = page.get_by_role("article", name="Answer").first
    again.get_by_text(f"{would:,} of {whole:,} tokens reused").wait_for()


def test_the_edit_is_made_where_the_difference_is(page: Any) -> None:
    """The same words come again and again, at less distance than the template's words before the question have."""
    words = "It opens at nine. " * 6
    ask(page, f"{words.replace('nine', 'eight', 1)} When?")
    edit = ask(page, f"{words} When?").locator(".edit")
    edit.wait_for()
    told = re.search(r"Then (\d+) of (\d+) tokens", edit.inner_text())
    assert told is not None
    assert int(told[1]) == int(told[2]) - 1
    edit.get_by_role("button").click()
    assert page.get_by_label("Question", exact=True).input_value() == f"{words.replace('nine', 'eight', 1)} When?"


def test_places_where_the_stored_words_may_belong(page: Any) -> None:
    made = page.evaluate(
        """async () => {
            const {edits} = await import("/web/edit.js");
            const miss = {reason: "tokens_differ", wanted_parts: [["It is ", false], ["wet", true], [". It", false]],
                          stored_parts: [["It is ", false], ["dry", true], [". It", false]], in_segment: 20};
            const question = "It is wet. It is wet. It is wet.";
            const begins = {...miss, wanted_parts: [["<user>\\nIt is ", false], ["wet", true]],
                            stored_parts: [["<user>\\nIt is ", false], ["dry", true]], in_segment: 13};
            const other = [edits("Else.", miss), edits(question, {reason: "never_stored"})];
            return [edits(question, miss), edits(question, begins), ...other];
        }"""
    )
    first, second = "It is dry. It is wet. It is wet.", "It is wet. It is dry. It is wet."
    assert made == [[first, second], [first], [], []]


def test_a_new_session_begins_without_a_complaint(page: Any) -> None:
    page.get_by_label("Session (optional)").fill("never seen before")
    ask(page, "Hello.")
    assert page.complaints == []


def test_every_stage_has_a_colour_of_its_own(page: Any) -> None:
    card = ask(page, DESK)
    swatches = card.get_by_role("list", name="Phases").locator(".swatch")
    colours = swatches.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
    assert len(colours) == len(set(colours)) == 6


def test_the_map_is_to_scale_and_selecting_moves_nothing(browser: Any, empty: ServerProcess) -> None:
    words = [f"{DESK} {DESK} Who?", f"{DESK} Where?", "How warm is it in the harbour at noon, in May? " * 4]
    with httpx.Client(base_url=empty.url, timeout=DEADLINE) as http:
        for query in words:
            http.post("/query", json={"query": query, "max_new_tokens": 2}).raise_for_status()
        page = opened(browser, f"{empty.url}/#cache", viewport={"width": 390, "height": 700})
        page.get_by_role("treeitem").first.wait_for()
        tree = http.get("/v1/cache/tree").json()["stretches"]
    last = max(one["start"] + one["tokens"] for one in tree)
    for one in tree:
        row = page.locator(f"[data-stretch='{one['id']}']")
        track, bar = row.locator(".track").bounding_box(), row.locator(".stretch").bounding_box()
        assert bar["x"] - track["x"] == pytest.approx(track["width"] * one["start"] / last, abs=1)
        assert bar["width"] == pytest.approx(max(3, track["width"] * one["tokens"] / last), abs=1)
    page.evaluate("scrollTo(0, 60)")
    before = page.evaluate("scrollY")
    page.get_by_role("treeitem").first.click(position={"x": 40, "y": 12})
    page.get_by_role("region", name="Text of this stretch").wait_for()
    assert page.evaluate("scrollY") == before
    page.context.close()


def test_a_row_of_the_map_closes_and_opens(page: Any) -> None:
    for word in ("first", "last"):
        ask(page, f"{DESK} Which ship was {word}?")
    page.get_by_role("link", name="Cache map").click()
    shared = page.get_by_role("treeitem", name=re.compile("2 prompts begin so")).last
    shared.focus()
    shown = page.get_by_role("treeitem").count()
    page.keyboard.press("ArrowLeft")
    assert shared.get_attribute("aria-expanded") == "false"
    assert page.get_by_role("treeitem").count() < shown
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("treeitem").count() == shown


def test_live_compares_hits_and_misses_of_like_length(page: Any) -> None:
    told = page.evaluate(
        """async () => {
            const {alike} = await import("/web/live.js");
            const one = (prompt_tokens, cached_tokens, ttft_ms, model) =>
                ({prompt_tokens, cached_tokens, ttft_ms, model});
            const small = [one(600, 590, 1, "small"), one(600, 0, 3, "small")];
            const large = [one(600, 590, 10, "large"), one(600, 0, 70, "large")];
            window.several = alike([...small, ...large]);
            return alike([one(20, 0, 5), one(600, 0, 90), one(700, 10, 110), one(800, 790, 10), one(5000, 4999, 50)]);
        }"""
    )
    several = page.evaluate("window.several")
    assert [(one["model"], one["from"], one["sooner"]) for one in several] == [("large", 512, 7), ("small", 512, 3)]
    assert [(group["from"], len(group["hits"]), len(group["misses"])) for group in told] == [
        (16, 0, 1),
        (512, 1, 2),
        (4096, 1, 0),
    ]
    assert [group["sooner"] for group in told] == [None, 11.0, None]


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(browser: Any, empty: ServerProcess, theme: str, width: int) -> None:
    made = {"name": "house", "tools": [weather(words=9)]}
    httpx.post(f"{empty.url}/tools", json=made, timeout=DEADLINE).raise_for_status()
    page = opened(browser, empty.url, viewport={"width": width, "height": 900}, color_scheme=theme)
    ready(page)
    page.get_by_label("Session (optional)").fill("a talk")
    for word in ("noon", "midnight"):
        ask(page, f"{DESK} The bell rings at {word}. When?")
    page.get_by_role("button", name="Cold beside warm").click()
    page.get_by_role("article", name="Cold beside warm").wait_for()
    assert violations(page) == []
    page.get_by_role("button", name="Remove the set house").click()
    page.locator("#confirm[open]").wait_for()
    assert violations(page) == []
    page.get_by_role("button", name="Cancel").locator("visible=true").click()
    for view in ("Cache map", "Live", "Sessions"):
        page.get_by_role("link", name=view, exact=True).click()
        if view == "Cache map":
            page.get_by_role("treeitem").first.click()
            page.get_by_role("region", name="Text of this stretch").wait_for()
        if view == "Live":
            page.locator("#ttft-chart svg").wait_for()
        if view == "Sessions":
            page.get_by_role("button", name=re.compile("^a talk")).click()
            page.get_by_role("button", name="Continue").wait_for()
        assert violations(page) == [], view
    page.get_by_role("link", name="Ask", exact=True).click()
    page.get_by_role("button", name="Register…").click()
    page.get_by_role("button", name="Smart home").wait_for()
    assert violations(page) == []
    page.context.close()
